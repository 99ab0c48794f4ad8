"""What is compared with kvpress: the policies here, its presses, and the tokens that both keep.

kvpress keeps the whole part of prompt x (1 - ratio) tokens in each KV head. Its defaults apply to
both sides: an observation window of 64, mean pooling over 5 neighbours, 4 sinks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.cache import per_head
from jaxkv.cache.per_head import PerHeadTokens
from jaxkv.contract import Policy, Spec
from jaxkv.evals.tasks import model_rows
from jaxkv.models.generation import shared_prompt
from jaxkv.models.generation.decoding import Static
from jaxkv.models.generation.kvzip import compress, while_reading
from jaxkv.models.generation.score import hidden_by_chunk
from jaxkv.models.loading.llm import Llm
from jaxkv.models.network.cross_entropy import target_losses
from jaxkv.models.network.decoder import Decoder, Weights
from jaxkv.policies import (
    TOVA,
    Balance,
    ExpectedAttention,
    KeyDiff,
    PyramidKV,
    SnapKV,
    Streaming,
    Uniform,
)
from jaxkv.policies.prompt_compression import base
from jaxkv.policies.prompt_compression.base import CompressionPolicy, ExactEnds
from jaxkv.policies.prompt_compression.scored import Scored
from jaxkv.rows import Storage
from jaxkv.typing import Array, Bool, Float, Int32, UInt8

RATIOS = (0.25, 0.5, 0.75, 0.875)  # removed
WINDOW, KERNEL, SINKS, BETA = 64, 5, 4, 20
ENDS, BUDGETS = "ends of the prompt", "pyramidkv, kvpress's budgets"
ADAPTIVE = "keydiff, adaptive budgets"  # the two parts of `retrieval` that kvpress has
ADAPTIVE_SNAPKV = "snapkv, adaptive budgets"


class PressNames(NamedTuple):
    """Names of kvpress's classes: a press, and one that shares the budget of a layer, around it."""

    name: str
    around: str = ""


PRESSES = {
    "snapkv": PressNames("SnapKVPress"),
    "pyramidkv": PressNames("PyramidKVPress"),
    BUDGETS: PressNames("PyramidKVPress"),
    ENDS: PressNames("StreamingLLMPress"),
    "streaming": PressNames("StreamingLLMPress"),
    "expected-attention": PressNames("ExpectedAttentionPress"),
    "keydiff": PressNames("KeyDiffPress"),
    ADAPTIVE: PressNames("KeyDiffPress", "AdaKVPress"),
    ADAPTIVE_SNAPKV: PressNames("SnapKVPress", "AdaKVPress"),
    "tova": PressNames("TOVAPress"),
    "kvzip": PressNames("KVzipPress"),
}
HALVED = {"balance": Balance, "uniform": Uniform}  # kvpress has neither
KVZAP = "kvzap"  # of which kvpress has weights for other models


@dataclass(frozen=True)
class PromptEnds(CompressionPolicy):
    """Keep the first `sinks` tokens of a finished prompt and its last `window`.

    This is kvpress's StreamingLLM: the prompt is read with full attention, and later tokens evict
    nothing. start: slots before the prompt, doubled as they fill.
    """

    sinks: int = SINKS
    window: int = 252
    start: int = 512

    storage: ClassVar[Storage] = "float"

    @property
    def ends(self) -> ExactEnds:
        return ExactEnds(self.sinks, self.window)

    def choose(
        self, spec: Spec, state: base.CompressedState, tokens: PerHeadTokens, count: Array
    ) -> base.Chosen:
        none = per_head.init(spec, tokens.k.shape[0], 1)
        return base.weighted_sample(none, jnp.zeros_like(count), 0.0)


def budget(prompt: int, ratio: float) -> int:
    """The number of tokens that kvpress caches of a prompt, per KV head."""
    return max(1, int(prompt * (1 - ratio)))


def policies(prompt: int, ratio: float, layers: int) -> dict[str, Policy | tuple[Policy, ...]]:
    """The policies of one ratio, by case; a tuple has one per layer."""
    capacity = budget(prompt, ratio)
    snap = {"window": WINDOW, "kernel": KERNEL, "pool": "mean"}
    by_name: dict[str, Policy | tuple[Policy, ...]] = {
        "snapkv": SnapKV(capacity, **snap),
        "pyramidkv": PyramidKV(capacity, beta=BETA, **snap),
        ENDS: PromptEnds(SINKS, capacity - SINKS),
        "streaming": Streaming(SINKS, capacity - SINKS, "absolute"),
        "expected-attention": ExpectedAttention(capacity, SINKS),
        "keydiff": KeyDiff(capacity),
        ADAPTIVE: KeyDiff(capacity, budgets="adaptive"),
        ADAPTIVE_SNAPKV: SnapKV(capacity, budgets="adaptive", **snap),
        "tova": TOVA(capacity, every=None),  # kvpress's always keeps the newest token
        "kvzip": Scored(capacity, SINKS, budgets="global"),
        KVZAP: Scored(capacity, SINKS, min(model_rows.NEWEST, capacity // 4), "global"),
    }
    # Halved once more than to the budget, so that there is room for the ends.
    rounds = round(math.log2(2 * prompt / capacity))
    ends = (capacity * 2**rounds - prompt) // (2**rounds - 1)
    fields = {"sinks": SINKS, "window": ends - SINKS, "rounds": rounds}
    by_name |= {name: policy(**fields) for name, policy in HALVED.items()}
    budgets = pyramid_budgets(prompt, ratio, layers)
    if len(set(budgets)) > 1:
        by_name[BUDGETS] = tuple(SnapKV(max(budget, WINDOW + 1), **snap) for budget in budgets)
    return by_name


def pyramid_budgets(prompt: int, ratio: float, layers: int) -> list[int]:
    """The number of tokens that kvpress's PyramidKV caches in each layer.

    The first layer has at most the prompt without the window. Where the last layer would get less
    than a window, all layers have the same budget.
    """
    total = prompt * (1 - ratio)
    first = min(2 * total - total / BETA, prompt - WINDOW)
    last = 2 * total - first
    if 2 * total - total / BETA < prompt - WINDOW:
        last = total / BETA
    if not prompt >= first >= last >= WINDOW:
        return [max(1, round(total))] * layers
    return [round(first - layer * (first - last) / (layers - 1)) for layer in range(layers)]


def press_fields(name: str, ratio: float) -> dict[str, Any]:
    """The kvpress side of a case: the names of the presses and the fields of the inner one."""
    press, around = PRESSES[name]
    return {"press": press, "around": around, "fields": {"compression_ratio": ratio}}


def with_press(keys: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """The cases that kvpress has too."""
    return [key for key in keys if key[0] in PRESSES]


def keys(prompt: int, layers: int, skip: Sequence[str] = ()) -> list[tuple[str, float]]:
    """All cases: name and ratio."""
    return [
        (name, ratio)
        for ratio in RATIOS
        for name in policies(prompt, ratio, layers)
        if name not in skip
    ]


class CaseRow(NamedTuple):
    """One case on one text of P prompt tokens and N scored ones.

    cached: tokens of the prompt per KV head, a mean. hits: whether each scored token is the
    likeliest. kept: the tokens of the prompt that each layer and KV head caches, as packed bits.
    """

    cached: float
    losses: Float[np.ndarray, " N"]
    hits: Bool[np.ndarray, " N"]
    kept: UInt8[np.ndarray, "L K P8"]


def stored(rows: Sequence[CaseRow]) -> np.ndarray:
    """Rows of one text as an array with a field for each member."""
    _, losses, hits, kept = rows[0]
    dtype = [("cached", "f8"), ("losses", "f8", losses.shape), ("hits", "?", hits.shape),
             ("kept", "u1", kept.shape)]  # fmt: skip
    return np.array(list(map(tuple, rows)), dtype)


def rows_of(
    llm: Llm,
    named: Sequence[tuple[str, Policy | tuple[Policy, ...] | str]],
    prompt: Sequence[int],
    answer: Sequence[int],
) -> list[CaseRow]:
    """What policies keep of a prompt, and how answer tokens 1, 2, ... are predicted then.

    named: cases and their policies, one for all layers or one per layer. answer: the tokens after
    the prompt. Policies that attend exactly until the end of prefill share the reading.
    SystemExit where a loss is not finite.
    """
    size = len(prompt) + len(answer)
    streams = [models.Stream(llm, while_reading(policy), tokens=size) for _, policy in named]
    sharing = [
        stream for stream, (_, policy) in zip(streams, named, strict=True)
        if shared_prompt.attends_exactly(stream.policies) and not isinstance(policy, Scored)
    ]  # fmt: skip
    if sharing:
        for _ in shared_prompt.prefill(sharing, prompt):
            pass
    rows = []
    for stream, (name, policy) in zip(streams, named, strict=True):
        if not stream.lengths.any():
            stream.prefill([prompt])
        if isinstance(policy, Scored):
            compress(stream, policy, [model_rows.scores(llm, name, tuple(prompt))])
        stream.finish_prefill()
        rows.append(row_of(llm, name, stream, answer))
    return rows


def row_of(llm: Llm, name: str, stream: models.Stream, answer: Sequence[int]) -> CaseRow:
    """The row of a stream whose prefill is finished. name: of the case."""
    prompt = int(stream.lengths[0])
    kept = np.zeros((llm.config.layers, llm.spec.kv_heads, prompt), bool)
    for layer, of_layer, state in zip(stream.policies, kept, stream.decoding.states, strict=True):
        positions, weight = (np.asarray(x)[0] for x in layer.cached(llm.spec, state))
        head, slot = np.nonzero(np.isfinite(weight))
        of_layer[head, positions[head, slot]] = True
    ids = np.asarray(answer, np.int32)
    chunks = [
        [np.asarray(values)[:size] for values in predicted(static, llm.weights, x, targets)]
        for static in [stream.static.of_model]
        for x, targets, size in hidden_by_chunk(llm, stream, ids, stream.chunk_of(len(ids) - 1))
    ]
    losses, hits = map(np.concatenate, zip(*chunks, strict=True))
    if not np.isfinite(losses).all():
        raise SystemExit(f"{name} gives losses that are not finite")
    per_head = float(kept.sum(axis=2).mean())
    return CaseRow(per_head, losses.astype(np.float64), hits, np.packbits(kept, axis=-1))


@partial(jax.jit, static_argnums=0)
def predicted(
    static: Static, weights: Weights, x: Float[Array, "1 T D"], targets: Int32[Array, "1 T"]
) -> tuple[Float[Array, " T"], Bool[Array, " T"]]:
    """The loss of each target, and whether it is the likeliest token."""
    decoder = Decoder(static.config, weights, static.mesh)
    logits = decoder.logits(decoder.normed(x))
    return target_losses(logits, targets)[0], jnp.argmax(logits, axis=-1)[0] == targets[0]
