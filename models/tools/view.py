"""What is cached after every token of a text, and where full attention goes, as a web page.

The policy reads the text token by token, and its `cached` tells the cached tokens. The attention
shown is exact full attention: the keys that a query would attend to, and how many of them the cache
has lost. The page is one file with its data inside; it needs no network.

Arrays of the page are triangles: entry (n, t) of query n and token t <= n is at n (n + 1) / 2 + t.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Cached, Policy, Spec, State
from jaxkv.errors import UserError
from jaxkv.models.generation.decoding import Static
from jaxkv.models.generation.score import compare_chunk
from jaxkv.models.generation.streams import Stream
from jaxkv.models.loading.llm import Llm
from jaxkv.models.loading.tokenizer import Pieces
from jaxkv.models.network import uncached
from jaxkv.models.network.config import Config, of_layer
from jaxkv.models.network.decoder import Decoder, Weights, layer_weights
from jaxkv.models.tools import budgets, palette
from jaxkv.policies.magicpig.index import IndexState
from jaxkv.policies.sparse_attention.base import SparseState
from jaxkv.state import memory
from jaxkv.typing import Array, Float, Float32, UInt8

TEMPLATE = Path(__file__).with_name("view.html")
MAX_TOKENS = 2_000
MAX_BYTES = 32 << 20  # of all triangles, before compression
ONE = 128  # code of weight 1; OCTAVE codes more are twice the weight
OCTAVE = 16
TokenProgress = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class View:
    """X: n (n + 1) / 2 entries of n tokens.

    cached: 0 where a token is not cached, else ONE + OCTAVE log2(weight). attention: the code c of
    the probability (c / 255)^2. losses, full_losses: losses of tokens 1, 2, ... under the policy
    and under full attention, NaN for sink tokens that no head predicts. prompt: tokens before the
    end of prefill; None where it changes nothing.
    """

    policy: str
    ids: tuple[int, ...]
    layers: tuple[int, ...]
    prompt: int | None
    cached: UInt8[np.ndarray, "L K X"]
    attention: UInt8[np.ndarray, "L N X"]
    losses: Float[np.ndarray, " T"]
    full_losses: Float[np.ndarray, " T"]


def check(
    llm: Llm, policy: str, tokens: int, prompt: int, layers: Sequence[int] | None
) -> tuple[int, ...]:
    """The layers to show; raises UserError for what cannot be shown, before any work."""
    config, policies = llm.config, llm.policies(policy)
    shown = tuple(range(config.layers)) if layers is None else tuple(dict.fromkeys(layers))
    if shown and max(shown) >= config.layers:
        raise UserError(
            f"layer {max(shown)} does not exist: the model has layers 0 to {config.layers - 1}; "
            "name some of these in --layers"
        )
    if tokens > min(MAX_TOKENS, config.context):
        limit = min(MAX_TOKENS, config.context)
        why = ", the model's trained context" if limit == config.context else ""
        raise UserError(
            f"a page shows at most {limit} tokens{why}, got {tokens}; give --max-tokens {limit} or "
            "less"
        )
    size = len(shown) * (config.heads + config.kv_heads) * _triangle(tokens)
    if size > MAX_BYTES:
        raise UserError(
            f"{tokens} tokens in {len(shown)} layers are {memory.show(size)} of data, and a page "
            f"has room for {memory.show(MAX_BYTES)}; give fewer --max-tokens, or fewer --layers"
        )
    acting = [layer.min_prompt for layer in policies if layer.min_prompt is not None]
    if acting and prompt < min(acting):
        raise UserError(
            f"{policy} compresses or indexes prompts of at least {min(acting)} tokens, got a "
            f"prompt of {prompt}; raise --prompt-tokens, or make its cache smaller"
        )
    slots = budgets.slots_of(llm, policies)
    if not acting and slots >= tokens:
        raise UserError(
            f"the text must be longer than the cache: {policy} caches {slots} tokens, so at least "
            f"{slots + 1} tokens are needed, got {tokens}; give a longer text, raise --max-tokens, "
            "or make the cache smaller"
        )
    return shown


def record(
    llm: Llm,
    ids: Sequence[int],
    policy: str,
    prompt: int,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    progress: TokenProgress = lambda done: None,
    stopped: Callable[[], bool] = lambda: False,
) -> View:
    """The cache after every token, and the attention of every token.

    prompt: tokens after which prefill is finished. layers: those that are shown, None for all.
    stopped: asked after every token whether to end there; the view is then that of the tokens read.
    """
    layers = check(llm, policy, len(ids), prompt, layers)
    stream = Stream(llm, policy, seed=seed, tokens=len(ids))
    acts = any(chosen.min_prompt is not None for chosen in stream.policies)
    rows: list[list[np.ndarray]] = [[] for _ in layers]
    losses = []
    for number, token in enumerate(ids, start=1):
        if number - 1 == prompt:
            stream.reserve(0, room=len(ids))
        stream.prefill([[token]], 1)
        if number == prompt:
            stream.finish_prefill()
        for row, layer in zip(rows, layers, strict=True):
            chosen = stream.policies[layer]
            cached_tokens = _cached(chosen, llm.specs[layer], stream.decoding.states[layer])
            row.append(_codes_of_weights(weights_of_layer(*cached_tokens, number)))
        if number < len(ids):
            losses.append(_loss(stream, ids[number]))
        progress(number)
        if stopped() and number > 1:  # one token predicts nothing
            break
    ids = tuple(map(int, ids[:number]))
    attention, full = attention_of(llm, ids, layers)
    return View(
        policy=policy,
        ids=ids,
        layers=layers,
        prompt=prompt if acts else None,
        cached=np.stack([np.concatenate(row, axis=1) for row in rows]),
        attention=attention,
        losses=np.array(losses[: len(ids) - 1]),
        full_losses=full,
    )


def _loss(stream: Stream, target: int) -> float:
    """The loss of the next token; NaN for a sink token, which no head predicts."""
    if target >= stream.llm.config.vocab:
        return float("nan")
    logits = np.asarray(stream.decoding.logits[0], np.float64)
    return float(np.logaddexp.reduce(logits) - logits[target])


@partial(jax.jit, static_argnums=(0, 1))
def _cached(policy: Policy, spec: Spec, state: State) -> Cached:
    return policy.cached(spec, state)


def weights_of_layer(
    positions: np.ndarray, log_weight: np.ndarray, tokens: int
) -> Float32[np.ndarray, "K T"]:
    """Weights in a batch of one sequence; a token in two slots has the sum of both."""
    positions, weight = np.asarray(positions)[0], np.exp(np.asarray(log_weight)[0])
    token_weights = np.zeros((len(weight), tokens), np.float32)
    heads = np.arange(len(weight))[:, None]
    cached = weight > 0
    np.add.at(token_weights, (heads, np.where(cached, positions, 0)), np.where(cached, weight, 0))
    return token_weights


def _codes_of_weights(weights: Float32[np.ndarray, "K T"]) -> UInt8[np.ndarray, "K T"]:
    octaves = np.log2(np.where(weights > 0, weights, 1))
    codes = np.clip(np.round(ONE + OCTAVE * octaves), 1, 255)
    return np.where(weights > 0, codes, 0).astype(np.uint8)


def attention_of(
    llm: Llm, ids: Sequence[int], layers: Sequence[int]
) -> tuple[UInt8[np.ndarray, "L N X"], Float32[np.ndarray, " T"]]:
    """The attention of some layers under full attention, and the losses of tokens 1, 2, ...

    One layer at a time, because the probabilities of all of them are large.
    """
    config, codes_of_layers = llm.config, []
    tokens = jnp.asarray(ids, jnp.int32)[None]
    x = _embed(config, llm.weights, tokens)
    lower = np.tril_indices(len(ids))
    for layer in range(config.layers):
        weights = layer_weights(llm.weights, layer)
        x, codes = _run_layer(of_layer(config, layer), config.windows[layer], weights, x)
        if layer in layers:
            codes_of_layers.append((layer, np.asarray(codes)[:, *lower]))
    by_layer = dict(codes_of_layers)
    static = Static(config, llm.policies("full"), llm.mesh)
    compared = compare_chunk(static, llm.weights, x[:, :-1], tokens[:, 1:])
    return np.stack([by_layer[layer] for layer in layers]), np.asarray(compared)[:, 0]


@partial(jax.jit, static_argnums=0)
def _embed(config: Config, weights: Weights, tokens: Array) -> Float[Array, "1 T D"]:
    return Decoder(config, weights).embedded(tokens)


@partial(jax.jit, static_argnums=(0, 1))
def _run_layer(
    config: Config, window: int | None, weights: Weights, x: Float[Array, "1 T D"]
) -> tuple[Float[Array, "1 T D"], UInt8[Array, "N T T"]]:
    """One layer: its output, and the codes of its attention."""
    x, seen = uncached.run_layer(config, window, uncached.attend_with_probabilities, weights, x)
    return x, jnp.round(255 * jnp.sqrt(seen[0])).astype(jnp.uint8)


def _triangle(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def page(llm: Llm, view: View, model: str, text: str) -> str:
    """The web page; model, text: their names."""
    pieces = Pieces(llm.tokenizer, special=True)
    words = [pieces.push(token) for token in view.ids]
    words[-1] += pieces.end()
    data: dict[str, Any] = {
        "model": model,
        "text": text,
        "policy": view.policy,
        "words": words,
        "layers": view.layers,
        "heads": view.attention.shape[1],
        "kvHeads": view.cached.shape[1],
        "prompt": view.prompt,
        "selects": any(map(_selects, llm.policies(view.policy))),
        "losses": _rounded(view.losses),
        "fullLosses": _rounded(view.full_losses),
        "cached": _packed(view.cached),
        "attention": _packed(view.attention),
        "colours": {name: palette.COLOURS[name] for name in ("streaming", "window", "full")},
    }
    # Within a script element `<` could end it.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return TEMPLATE.read_text("utf-8").replace("__DATA__", text)


def _rounded(losses: Float[np.ndarray, " T"]) -> list[float | None]:
    """Losses with three decimals; None, null in JSON, for a token that no head predicts."""
    return [None if np.isnan(loss) else round(float(loss), 3) for loss in losses]


def _selects(policy: Policy) -> bool:
    """Whether it caches every token and attends to a selection, which no page shows."""
    return isinstance(policy.leaves, IndexState | SparseState)


def _packed(array: UInt8[np.ndarray, "..."]) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 9)).decode()
