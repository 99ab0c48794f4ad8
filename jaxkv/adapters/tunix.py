"""A cache policy in the models of google-tunix: in its sampler, its rollouts and its trainers.

    from jaxkv.adapters.tunix import with_policy
    model = with_policy(model, "streaming:sinks=4,window=1020")

Called without a cache, as in training, the model computes the attention of the policy too. Each
query sees what it saw in the sampler, so the learner's log probabilities are those of the rollout.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.adapters.layer import PolicyLayer
from jaxkv.contract import Chunk, Policy, Spec, State
from jaxkv.errors import UserError, check_int
from jaxkv.policy_spec import by_layer
from jaxkv.rotary import rotary
from jaxkv.typing import Array, Bool, Float, Int32

VERSION = "0.1.7"  # of google-tunix


class LayerCache(NamedTuple):
    """The cache of a layer. seen: columns of the attention mask before the next token's."""

    state: State
    positions: Int32[Array, " B"]
    seen: Int32[Array, " B"]


class TunixFamily(NamedTuple):
    """How the models of a class of tunix attend.

    module, model: where the class is. project: attention and input to queries, keys and values
    before rotation. output: the name of the last projection. rope: attention to theta and the
    factor of a linear scaling. scale: attention to the scale. window: attention to its window, None
    for full.
    """

    module: str
    model: str
    project: Callable[[Any, Array], tuple[Array, ...]]
    output: str
    rope: Callable[[Any], tuple[float, float]]
    scale: Callable[[Any], float]
    window: Callable[[Any], int | None]


def with_policy(
    model: nnx.Module,
    policy: str | Policy | Sequence[Policy | str],
    *,
    prompt: int | None = None,
    seed: int = 0,
) -> nnx.Module:
    """A model with a cache policy: the same parts, names of weights and signature.

    model: a Llama3, Qwen2, Qwen3 or Gemma3 of google-tunix, with or without LoRA. policy: as for
    `jaxkv.by_layer`; layers of Gemma3 with a sliding window keep it, unless
    a policy is named for them.
    prompt: the number of tokens, with padding, that are the prompt where the model is called
    without a cache, max_prompt_length of tunix. Policies that compress a finished prompt need it.
    seed: of policies that draw. All sequences have the same seed, so that a sequence gets the same
    random draws in the sampler and in every batch of the trainer.

    The sampler's cache_size bounds the text and not the cache; a growing cache has room for it. A
    token that is padding in the attention mask has output 0, also if it was generated: forbid it.
    Raises UserError for another model or version of tunix; the model does for packed sequences and
    for a cache of a model without a policy.
    """
    family = _family_of(model)
    if prompt is not None:
        check_int("prompt", prompt)
    check_int("seed", seed, 0)
    model = nnx.merge(*nnx.split(model))
    windows = [family.window(layer.attn) for layer in model.layers]
    policies = by_layer(policy, len(windows), windows)
    for number, (layer, layer_policy) in enumerate(zip(model.layers, policies, strict=True)):
        spec = _spec(family, model.config, layer.attn)
        attn = layer.attn = _as_class(layer.attn, _attention_class(type(layer.attn), family))
        attn.policy_layer = PolicyLayer(layer_policy, spec, number, seed, prompt)
    return _as_class(model, _model_class(type(model)))


def _family_of(model: nnx.Module) -> TunixFamily:
    """The family of the model's class; raises UserError where there is none."""
    try:
        version = importlib.metadata.version("google-tunix")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "google-tunix is not installed; pip install -e '.[tunix]' in the clone of jaxkv"
        ) from None
    if version != VERSION:
        raise UserError(
            f"policies were tried in google-tunix {VERSION}, got {version}; "
            f"pip install google-tunix=={VERSION}"
        )
    if isinstance(model, PolicyModel):
        raise UserError("the model has a policy already; give the model that it was made from")
    # LoRA derives a class from that of tunix.
    kinds = [(kind.__module__, kind.__name__) for kind in type(model).__mro__]
    family = next((each for each in FAMILIES if (each.module, each.model) in kinds), None)
    if family is None:
        names = ", ".join(each.model for each in FAMILIES)
        raise UserError(
            f"models of google-tunix that take a policy are {names}, got "
            f"{type(model).__module__}.{type(model).__name__}; for other decoders call jaxkv.step "
            "(docs/integration.md)"
        )
    return family


def _spec(family: TunixFamily, config: Any, attn: Any) -> Spec:
    theta, factor = family.rope(attn)
    scaling = {"kind": "linear", "factor": factor} if factor != 1 else None
    return Spec(
        kv_heads=attn.num_kv_heads,
        head_dim=attn.head_dim,
        scale=family.scale(attn),
        encoding=rotary(attn.head_dim, theta, scaling),
        dtype=getattr(config, "dtype", None) or getattr(config, "param_dtype", jnp.float32),
        # attn.num_heads of some models is the width of the model.
        group=config.num_heads // attn.num_kv_heads,
    )


def _as_class(module: nnx.Module, kind: type) -> nnx.Module:
    """The module as one of a subclass of its own, with the same parts."""
    copy = object.__new__(kind)
    vars(copy).update(vars(module))
    return copy


@cache
def _model_class(base: type) -> type:
    return type(base.__name__, (PolicyModel, base), {"__module__": __name__})


@cache
def _attention_class(base: type, family: TunixFamily) -> type:
    members = {"family": family, "signature": inspect.signature(base.block)}
    return type(base.__name__, (PolicyAttention, base), members)


class PolicyModel:
    """A model of tunix whose caches are states of policies."""

    def init_cache(
        self, batch_size: int, cache_size: int, dtype: jnp.dtype
    ) -> dict[str, LayerCache]:
        """Empty caches. cache_size: tokens for which growing caches have room."""
        caches = (layer.attn.empty(batch_size, cache_size) for layer in self.layers)
        return {f"layer_{number}": cache for number, cache in enumerate(caches)}


class PolicyAttention:
    """An attention of tunix whose cache is the state of a policy."""

    def empty(self, batch: int, tokens: int) -> LayerCache:
        """The cache before the first token, with room for `tokens` if it grows."""
        state = self.policy_layer.empty(batch, tokens)
        return LayerCache(state, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32))

    def block(self, *args: Any, **kwargs: Any) -> tuple[LayerCache | None, Float[Array, "B T D"]]:
        """The block of tunix, with its arguments."""
        arguments = self.signature.bind(self, *args, **kwargs).arguments
        x, mask, before = (arguments[name] for name in ("x", "attn_mask", "cache"))
        if before is not None and not isinstance(before, LayerCache):
            raise UserError("the cache is of a model without a policy; give one of init_cache")
        if mask is None and arguments.get("segment_ids") is not None:
            raise UserError("packed sequences would share a cache; turn packing off")
        _check_causal(mask, x.shape[1], before is None)
        batch, tokens, _ = x.shape
        start = (jnp.zeros(batch, jnp.int32),) * 2 if before is None else before[1:]
        positions, valid = _tokens(mask, *start, tokens)
        q, k, v = self.family.project(self, x)
        chunk = Chunk(q, k, v, positions.astype(jnp.uint32), valid)
        if before is None:
            out, after = self.policy_layer.attend(chunk), None
        else:
            layer = self.policy_layer
            if layer.prompt not in (None, tokens) and layer.is_prompt(before.state):
                raise UserError(
                    f"prompt={layer.prompt} was given to with_policy, got a prompt of {tokens} "
                    "tokens; give both the same max_prompt_length"
                )
            out, state = layer.extend(before.state, chunk, mask.shape[2] - tokens)
            count = jnp.sum(valid, axis=1, dtype=jnp.int32)
            after = LayerCache(state, before.positions + count, before.seen + np.int32(tokens))
        return after, getattr(self, self.family.output)(out.astype(v.dtype))


def _check_causal(mask: Bool[Array, "B T S"] | None, tokens: int, starts: bool) -> None:
    """Raise UserError for a mask in which tokens see later ones, or not all earlier ones.

    starts: there is no cache. Compiled calls are checked while their mask is known.
    """
    if mask is None and tokens > 1:
        raise UserError("without a mask tokens see later ones; give a causal attention_mask")
    if not starts or mask is None or isinstance(mask, jax.core.Tracer):
        return
    seen = np.asarray(mask)  # NumPy, as a call that is being compiled may have a known mask
    valid = np.diagonal(seen, axis1=1, axis2=2)
    causal = np.tril(np.ones((tokens, tokens), bool)) & valid[:, None, :]
    if np.any((seen != causal) & valid[:, :, None]):
        raise UserError(
            "a policy attends to all earlier tokens and to no later ones, got a mask that does not "
            "(of packed texts or images, for example); give a causal attention_mask"
        )


def _tokens(
    mask: Bool[Array, "B T S"] | None,
    first: Int32[Array, " B"],
    seen: Int32[Array, " B"],
    tokens: int,
) -> tuple[Int32[Array, "B T"], Bool[Array, "B T"]]:
    """Positions, and which tokens are no padding: those that see themselves in the mask.

    first: the position of the next token. seen: columns of the mask before it.
    """
    column = seen[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
    if mask is None:
        valid = jnp.ones(column.shape, bool)
    else:
        valid = jnp.take_along_axis(mask, column[:, :, None], axis=2)[:, :, 0].astype(bool)
    count = jnp.cumsum(valid, axis=1, dtype=jnp.int32)
    return first[:, None] + jnp.maximum(count - 1, 0), valid


def _project(attn: Any, x: Array) -> tuple[Array, ...]:
    """Of Llama3; Qwen2 adds biases, and Qwen3 normalises queries and keys."""
    parts = []
    for name in "qkv":
        part = getattr(attn, f"{name}_proj")(x)
        if hasattr(attn, f"{name}_bias"):
            bias = getattr(attn, f"{name}_bias")[...].astype(part.dtype)
            part = part + bias.reshape(1, 1, *part.shape[2:])
        if hasattr(attn, f"{name}_norm"):
            part = getattr(attn, f"{name}_norm")(part)
        parts.append(part)
    return tuple(parts)


def _project_gemma3(attn: Any, x: Array) -> tuple[Array, ...]:
    if attn.use_qkv_einsum:
        q, k, v = attn.qkv_einsum(x)
    else:
        q, (k, v) = attn.q_einsum(x), attn.kv_einsum(x)
    return attn._query_norm(q), attn._key_norm(k), v


def _default_rope(attn: Any) -> tuple[float, float]:
    """Llama3 and Qwen3 of tunix rotate by this default, whatever rope_theta of their config is."""
    module = importlib.import_module(type(attn).block.__module__)
    return inspect.signature(module.apply_rope).parameters["rope_theta"].default, 1.0


LLAMA3 = TunixFamily(
    "tunix.models.llama3.model",
    "Llama3",
    _project,
    "o_proj",
    _default_rope,
    lambda attn: attn.scale,
    lambda attn: None,
)
FAMILIES = (
    LLAMA3,
    LLAMA3._replace(
        module="tunix.models.qwen2.model",
        model="Qwen2",
        rope=lambda attn: (attn.config.rope_theta, 1.0),
    ),
    LLAMA3._replace(module="tunix.models.qwen3.model", model="Qwen3"),
    TunixFamily(
        "tunix.models.gemma3.model",
        "Gemma3",
        _project_gemma3,
        "attn_vec_einsum",
        lambda attn: (attn.rope_base_frequency, attn.rope_scale_factor),
        lambda attn: attn.query_pre_attn_scalar,
        lambda attn: attn.sliding_window_size if "LOCAL" in attn.attn_type.name else None,
    ),
)
