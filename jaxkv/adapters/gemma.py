"""A cache policy in the models of gemma: in its samplers, and in chats of unbounded length.

    from jaxkv.adapters.gemma import ChatSampler, with_policy
    model = with_policy(model, "streaming:sinks=4,window=1020")
    chat = ChatSampler(model=model, params=params, multi_turn=True)

`gm.text.Sampler` takes the model as it is. Between turns it takes `next_turn(state)`, as the
ChatSampler here does by itself.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

try:
    from gemma import gm
    from gemma.gm.nn import _modules, _transformer
except ImportError as error:
    remedy = "pip install -e '.[gemma]' in the clone of jaxkv, on Python 3.12 or newer"
    raise ImportError(f"jaxkv.adapters.gemma needs gemma; {remedy}", name="gemma") from error

from jaxkv.adapters.layer import PolicyLayer
from jaxkv.contract import Chunk, Policy, Spec, State
from jaxkv.errors import UserError, check_int
from jaxkv.policy_spec import by_layer
from jaxkv.rotary import rotary
from jaxkv.typing import Array, Bool, Int32

VERSION = "4.0.1"  # of gemma
PADDING = 0  # the token
GemmaCache = dict[str, Any]  # of a layer, with the names k, v, positions, end_index


@flax.struct.dataclass
class PolicyCache:
    """The cache of a layer, in the place of gemma's keys.

    Samplers of gemma slice keys to the columns of a prompt, and put the slice back after it. Here a
    slice is the cache itself, and what is put back replaces it.

    state: of the policy. count: tokens in the state. newest: gemma's position of the newest of
    them. pending: a token that was sampled and that no call computed, 0 for none; None in a turn.
    columns: of gemma's attention masks.
    """

    state: State
    count: Int32[Array, " B"]
    newest: Int32[Array, " B"]
    pending: Int32[Array, " B"] | None
    columns: int = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.count), self.columns, 0, 0

    def __getitem__(self, key: Any) -> PolicyCache:
        return self

    @property
    def at(self) -> PolicyCache:
        return self

    def set(self, after: PolicyCache) -> PolicyCache:
        return after


def with_policy(
    model: nn.Module,
    policy: str | Policy | Sequence[Policy | str],
    *,
    prompt: int | None = None,
    seed: int = 0,
) -> nn.Module:
    """A model with a cache policy: the same fields and names of weights.

    model: a Gemma 2 or 3 of gemma; gm.nn.LoRA may wrap the result. policy: as for `jaxkv.by_layer`;
    layers with a sliding window keep it, unless a policy is named for them. prompt: the number of
    tokens of every prompt where the model is called without a cache; policies that compress a
    finished prompt need it. seed: of policies that draw.

    cache_length of a sampler bounds a prompt, and the text too under a policy that grows. Called
    without a cache, the model computes the attention of the policy: each query sees what it saw in
    the sampler, which compresses a prompt without its last token. Raises UserError for another
    model or version of gemma; the model does for images, masks that are not causal, and a cache of
    a model without a policy.
    """
    version = importlib.metadata.version("gemma")
    if version != VERSION:
        raise UserError(
            f"policies were tried in gemma {VERSION}, got {version}; pip install gemma=={VERSION}"
        )
    if hasattr(model, "layers_with_policy"):
        raise UserError("the model has a policy already; give the model that it was made from")
    base = _transformer.Transformer
    # Gemma 3n derives from it with an attention of its own.
    if isinstance(model, gm.nn.LoRA):
        raise UserError(
            "LoRA goes around a model with a policy; give with_policy the model inside, and then "
            "gm.nn.LoRA the result"
        )
    if not isinstance(model, base) or type(model).setup is not base.setup:
        raise UserError(
            f"models of gemma that take a policy are those of Gemma 2 and 3, got "
            f"{type(model).__name__}; for other decoders call jaxkv.step (docs/integration.md)"
        )
    if prompt is not None:
        check_int("prompt", prompt, 2)
        prompt -= 1  # samplers compute the last token again, after the prompt
    check_int("seed", seed, 0)
    config = model.config
    windows = [
        config.sliding_window_size if kind is _modules.AttentionType.LOCAL_SLIDING else None
        for kind in config.attention_types
    ]
    policies = by_layer(policy, len(windows), windows)
    layers = tuple(
        PolicyLayer(layer_policy, _spec(config, window), number, seed, prompt)
        for number, (layer_policy, window) in enumerate(zip(policies, windows, strict=True))
    )
    fields = {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(model)
        if field.init and field.name not in ("parent", "name")
    }
    return _model_class(type(model))(**fields, layers_with_policy=layers)


def _spec(config: Any, window: int | None) -> Spec:
    """How a layer attends. window: its own, None for full attention."""
    theta, factor = (
        (config.global_base_frequency, config.global_scale_factor)
        if window is None
        else (config.local_base_frequency, config.local_scale_factor)
    )
    scaling = {"kind": "linear", "factor": factor} if factor != 1 else None
    return Spec(
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.query_pre_attn_scalar(),
        encoding=rotary(config.head_dim, theta, scaling),
        softcap=config.attn_logits_soft_cap,
        group=config.num_heads // config.num_kv_heads,
    )


@cache
def _model_class(base: type) -> type:
    """The model's class with caches of policies."""

    class PolicyTransformer(base):
        layers_with_policy: tuple[PolicyLayer, ...] = ()

        def init_cache(
            self, *, batch_size: int, dtype: Any, cache_length: int, sharding: Any = None
        ) -> dict[str, GemmaCache]:
            if sharding is not None:
                raise UserError("caches of policies are not sharded here; leave sharding out")
            return _empty(self.layers_with_policy, batch_size, dtype, cache_length)

        def __call__(self, tokens: Array, **inputs: Any) -> Any:
            if self.is_initializing():
                return super().__call__(tokens, **inputs)
            last_only = bool(inputs.get("return_last_only") or self.return_last_only)
            tokens, inputs, complete = _inputs(self.layers_with_policy, tokens, last_only, **inputs)
            with nn.intercept_methods(partial(_attend, self.layers_with_policy)):
                out = super().__call__(tokens, **inputs)
            return out if out.cache is None else out.replace(cache=complete(out.cache))

    PolicyTransformer.__name__ = PolicyTransformer.__qualname__ = base.__name__
    return PolicyTransformer


def _empty(
    layers: Sequence[PolicyLayer], batch: int, dtype: Any, tokens: int
) -> dict[str, GemmaCache]:
    """The caches before the first token."""
    columns = tokens + 1  # samplers of gemma stop one column before the last
    count = jnp.zeros(batch, jnp.int32)
    no_keys = jnp.zeros((batch, columns, 0, 0), dtype)
    return {
        f"layer_{layer.number}": {
            "k": PolicyCache(
                _with_dtype(layer, dtype).empty(batch, tokens), count, count - 1, None, columns
            ),
            "v": no_keys,
            "positions": no_keys,
            "end_index": count,
        }
        for layer in layers
    }


def _with_dtype(layer: PolicyLayer, dtype: Any) -> PolicyLayer:
    return dataclasses.replace(layer, spec=dataclasses.replace(layer.spec, dtype=dtype))


def _inputs(
    layers: Sequence[PolicyLayer],
    tokens: Int32[Array, "B T"],
    last_only: bool,
    *,
    images: Any = None,
    cache: dict[str, GemmaCache] | None = None,
    positions: Int32[Array, "B T"] | None = None,
    attention_mask: Bool[Array, "B T S"] | None = None,
    **rest: Any,
) -> tuple[Array, dict[str, Any], Callable[[dict[str, GemmaCache]], dict[str, GemmaCache]]]:
    """The tokens and arguments of gemma's model, and what completes its caches.

    The positions are those of the text, and the mask has one column: which tokens are no padding.
    last_only: the logits of the last token alone are asked for, as for the prompt of a sampler.
    """
    if images is not None:
        raise UserError("images attend to what comes after them; a model with a policy reads text")
    if cache is None:
        if attention_mask is not None or positions is not None:
            raise UserError(
                "without a cache the mask of a policy is causal and positions count tokens; leave "
                "positions and attention_mask out"
            )
        valid, start, complete = tokens != PADDING, np.int32(0), lambda caches: caches
    else:
        before = _first(cache)
        if not isinstance(before, PolicyCache):
            raise UserError("the cache is of a model without a policy; give one of init_cache")
        width = tokens.shape[-1]
        if last_only and attention_mask is not None and attention_mask.shape[-1] != width:
            raise UserError(
                "between turns the columns of masks would grow with the text; give the sampler "
                "last_state=next_turn(state), or use the ChatSampler of jaxkv.adapters.gemma"
            )
        if tokens.shape[1] > 1 and attention_mask is not None:
            _check_causal(attention_mask, tokens)
        chunk = _prompt if last_only else _step
        tokens, valid, newest = chunk(before, tokens, positions)
        count = before.count + jnp.sum(valid, axis=1, dtype=jnp.int32)
        _check_room(layers, before, count + np.int32(last_only), tokens if last_only else None)
        start, complete = before.count[:, None], partial(_completed, layers, count, newest)
    positions = start + jnp.maximum(jnp.cumsum(valid, axis=-1, dtype=jnp.int32) - 1, 0)
    arguments = {"positions": positions, "attention_mask": valid[..., None], "cache": cache}
    return tokens, rest | arguments, complete


def _check_causal(mask: Bool[Array, "B T S"], tokens: Int32[Array, "B T"]) -> None:
    """Raise UserError for a mask in which tokens see later ones, or not all earlier ones.

    Compiled calls are not checked.
    """
    if isinstance(mask, jax.core.Tracer) or isinstance(tokens, jax.core.Tracer):
        return
    seen = np.asarray(mask)[:, :, : tokens.shape[1]]
    valid = np.asarray(tokens) != PADDING
    causal = np.tril(valid[:, None, :] & np.ones((tokens.shape[1], 1), bool))
    if np.any((seen != causal) & valid[:, :, None]):
        raise UserError(
            "a policy attends to all earlier tokens and to no later ones, got another "
            "attention_mask; leave it out"
        )


def _prompt(
    before: PolicyCache, tokens: Int32[Array, "B T"], positions: Int32[Array, "B T"] | None
) -> tuple[Int32[Array, "B T"], Bool[Array, "B T"], Int32[Array, " B"]]:
    """Tokens, which of them enter the cache, and gemma's position of the newest that does.

    The last token of each prompt stays out, because samplers compute it again.
    """
    count = jnp.sum(tokens != PADDING, axis=1, keepdims=True, dtype=jnp.int32)
    if positions is None:
        newest = before.newest + count[:, 0] - 1
    else:
        last = jnp.maximum(count - 1, 0)
        newest = jnp.take_along_axis(positions, last, axis=1)[:, 0].astype(jnp.int32) - 1
    if before.pending is not None:
        tokens = _after_pending(before.pending, tokens)
        count += (before.pending != PADDING).astype(jnp.int32)[:, None]
    valid = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < count - 1
    return tokens, valid, newest


def _step(
    before: PolicyCache, tokens: Int32[Array, "B T"], positions: Int32[Array, "B T"] | None
) -> tuple[Int32[Array, "B T"], Bool[Array, "B T"], Int32[Array, " B"]]:
    """The same of new tokens. A sampler repeats the end of a sequence at one position."""
    if positions is None or tokens.shape[1] > 1:
        return tokens, tokens != PADDING, before.newest
    newest = positions[:, 0].astype(jnp.int32)
    return tokens, positions > before.newest[:, None], jnp.maximum(before.newest, newest)


def _after_pending(pending: Int32[Array, " B"], tokens: Int32[Array, "B T"]) -> Int32[Array, "B T"]:
    """The tokens after the pending one of each sequence that has one."""
    after = jnp.concatenate([pending[:, None], tokens], axis=1)
    alone = jnp.pad(tokens, ((0, 0), (0, 1)), constant_values=PADDING)
    return jnp.where((pending != PADDING)[:, None], after, alone)


def _check_room(
    layers: Sequence[PolicyLayer],
    before: PolicyCache,
    count: Int32[Array, " B"],
    prompt: Int32[Array, "B T"] | None,
) -> None:
    """Raise UserError for a prompt beyond cache_length, and for a growing cache without room.

    count: tokens of the text. Compiled calls are not checked: a growing cache gives NaN there.
    """
    if isinstance(count, jax.core.Tracer):
        return
    length = before.columns - 1
    if prompt is not None and (size := jnp.max(jnp.sum(prompt != PADDING, axis=1))) > length:
        raise UserError(
            f"a prompt may have cache_length={length} tokens, got {size}; give a larger one"
        )
    growing = [layer.policy for layer in layers if layer.policy.grows]
    if growing and jnp.max(count) > length:
        raise UserError(
            f"{type(growing[0]).__name__} grows and has room for {length} tokens, got "
            f"{jnp.max(count)}; give a larger cache_length, or a policy that is bounded"
        )


def _completed(
    layers: Sequence[PolicyLayer],
    count: Int32[Array, " B"],
    newest: Int32[Array, " B"],
    caches: dict[str, GemmaCache],
) -> dict[str, GemmaCache]:
    """The caches after a call. Samplers stop where end_index reaches the number of columns."""
    grows = any(layer.policy.grows for layer in layers)
    end_index = jnp.full_like(count, jnp.max(count)) if grows else jnp.zeros_like(count)
    return {
        name: layer
        | {
            "k": layer["k"].replace(count=count, newest=newest, pending=None),
            "end_index": end_index,
        }
        for name, layer in caches.items()
    }


def _attend(
    layers: Sequence[PolicyLayer], next_method: Any, args: Any, kwargs: Any, context: Any
) -> Any:
    """The attention of a layer, in place of gemma's."""
    attn = context.module
    if not isinstance(attn, _modules.Attention) or context.method_name != "__call__":
        return next_method(*args, **kwargs)
    x, positions, before, valid = args
    if attn.use_qkv_einsum:
        q, k, v = attn.qkv_einsum("BTD,SNDH->SBTNH", x)
    else:
        q = attn.q_einsum("BTD,NDH->BTNH", x)
        k, v = attn.kv_einsum("BSD,CKDH->CBSKH", x)
    if attn.use_qk_norm:
        q, k = attn._query_norm(q), attn._key_norm(k)
    number = int(attn.path[-2].removeprefix("layer_"))
    layer = _with_dtype(layers[number], k.dtype)
    chunk = Chunk(q, k, v, positions.astype(jnp.uint32), valid[:, :, 0])
    if before is None:
        out, after = layer.attend(chunk), None
    else:
        stored = before["k"]
        out, state = layer.extend(stored.state, chunk, stored.columns - 1)
        after = before | {"k": stored.replace(state=state)}
    return after, attn.attn_vec_einsum("BTNH,NHD->BTD", out.astype(v.dtype))


def next_turn(state: Any) -> Any:
    """The state of a sampler as the last_state of its next turn, with no column of its masks used.

    The newest sampled token, such as the end of the turn, was never computed: it comes before the
    next prompt. (gemma leaves it out, and attends to the column that it reserved for it.)
    """
    before = _first(state.cache)
    if not isinstance(before, PolicyCache):
        raise UserError("the state is of a model without a policy; give one of with_policy")
    computed = state.last_token_pos <= before.newest
    pending = jnp.where(computed, PADDING, state.last_token)
    caches = {
        name: layer | {"k": layer["k"].replace(pending=pending)}
        for name, layer in state.cache.items()
    }
    return state.replace(
        cache=caches, step=jnp.zeros_like(state.step), init_cache_length=jnp.asarray(-1)
    )


def _first(caches: dict[str, GemmaCache]) -> PolicyCache:
    """The cache of the first layer: the counts of all layers are equal."""
    return next(iter(caches.values()))["k"]


class ChatSampler(gm.text.ChatSampler):
    """gemma's ChatSampler for unbounded chats: cache_length bounds one prompt, not the chat."""

    def _sample(self, *args: Any, last_state: Any, **kwargs: Any) -> Any:
        turn = None if last_state is None else next_turn(last_state)
        return super()._sample(*args, last_state=turn, **kwargs)
