"""Rows that follow from the model: contexts scored by KVzip or KVzap, and calibrated head budgets.

KVzip scores a context while the model repeats it. KVzap predicts these scores; it is fitted to the
beginning of the novel from which head budgets are calibrated. Neither sees the question. The KV
heads of all layers compete for the budget, as in KVzip's published code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import per_head, per_layer
from jaxkv.cache.per_head import PerHeadTokens
from jaxkv.errors import UserError
from jaxkv.evals.tasks.budgets import (
    CALIBRATED,
    CALIBRATED_HALF_WINDOW,
    SCORED,
    budget_of,
)
from jaxkv.models.generation.context_scores import (
    around_context,
    context_scores,
    repeatable_tokens,
)
from jaxkv.models.generation.kvzap import FIT_TOKENS, KVzap, fit_kvzap, kvzap_scores
from jaxkv.models.generation.streams import Stream
from jaxkv.models.loading.llm import Llm
from jaxkv.models.tools.passage import PASSAGE
from jaxkv.policies.prompt_compression import base, head_shares
from jaxkv.policies.prompt_compression.base import Chosen, CompressedState, ExactEnds
from jaxkv.policies.prompt_compression.scored import Scored
from jaxkv.state.batch import nbytes
from jaxkv.typing import Array, Bool, Float32

CHARACTERS = 6000  # of the novel: a passage of FIT_TOKENS, as `jaxkv calibrate` reads, and a rest
ROWS = 256  # a multiple of the rows of a layer, so that few programs are compiled
NEWEST = 128  # tokens that KVzap's published code keeps; here at most a quarter of the budget


def check(llm: Llm, policies: Sequence[str], query_aware: bool = False) -> None:
    """Raise UserError for rows that the model, or a question in the prefill, rules out."""
    scored = [name for name in policies if name in SCORED]
    if scored and query_aware:
        raise UserError(
            f"{' and '.join(scored)} score a context before its question is known, got "
            "--query-aware; leave one out"
        )
    calibrated = [name for name in policies if name in (CALIBRATED, CALIBRATED_HALF_WINDOW)]
    if calibrated and calibration_of(llm) is None:
        raise UserError(
            f"{' and '.join(calibrated)} needs head shares in the package, which has those of "
            f"{' and '.join(head_shares.shipped())}, got {llm.name}; name other --policies"
        )


def calibration_of(llm: Llm) -> str | None:
    """The name of the model's head shares in the package."""
    prints = {head_shares.read(name).fingerprint: name for name in head_shares.shipped()}
    return prints.get(llm.source_fingerprint)


def settings(llm: Llm, length: int, ratio: float, slots: int, retrieval: str) -> dict[str, str]:
    """The string of each row. retrieval: that of `retrieval`. Others: as in `budgets.settings`."""
    budget = budget_of(length, ratio)
    scored = f"capacity={budget},start={slots}"
    return {
        "kvzip": f"kvzip:{scored}",
        "kvzap": f"kvzap:{scored},window={min(NEWEST, budget // 4)}",
        CALIBRATED: f"{retrieval},budgets=calibrated,calibration={calibration_of(llm)}",
    }


def policy_of(text: str) -> str | Scored:
    """The policy of a row before `compress`: `Scored`, which no string names, or the string."""
    name, _, fields = text.partition(":")
    if name not in SCORED:
        return text
    values = (field.split("=") for field in fields.split(","))
    return Scored(budgets="adaptive", **{field: int(value) for field, value in values})


@lru_cache(maxsize=64)  # for all ratios of a batch
def scores(llm: Llm, method: str, context: tuple[int, ...]) -> Float32[np.ndarray, "L K S"]:
    """The scores of the tokens of a context. method: of SCORED."""
    if method == "kvzap":
        return kvzap_scores(llm, kvzap(llm), context)
    front, _ = around_context(llm)
    return context_scores(llm, context, len(front))


def compress(stream: Stream, of_contexts: Sequence[Float32[np.ndarray, "L K S"]]) -> None:
    """Finish a prefill under `Scored`: the best tokens of all KV heads of all layers stay.

    They are those of `kvzip_stream` with budgets=global. But all layers get the same number of
    rows, some of them empty, so that no context compiles programs of its own.
    """
    (policy,), states = set(stream.policies), stream.decoding.states
    batch, kv_heads, slots, _ = states[0].dense.k.shape
    size, count = slots - policy.sinks - policy.window, policy.budget * len(states) * kv_heads
    best = np.zeros((len(states), batch, kv_heads, size), bool)
    for number, of_context in enumerate(of_contexts):
        between = of_context[:, :, policy.sinks : of_context.shape[2] - policy.window]
        places = np.argsort(-between, axis=None, kind="stable")[:count]
        layer, head, token = np.unravel_index(places, between.shape)
        best[layer, number, head, token] = True
    rows = -(-int(best.sum(axis=(2, 3)).max()) // ROWS) * ROWS
    layers = zip(states, best, strict=True)
    states = tuple(keep(policy.ends, rows, *of_layer) for of_layer in layers)
    stream.decoding = stream.decoding._replace(states=states)
    stream.prompt_lengths, stream.prefill_finished = stream.lengths, True


@partial(jax.jit, static_argnums=(0, 1))
def keep(
    ends: ExactEnds, rows: int, state: CompressedState, best: Bool[Array, "B K S"]
) -> CompressedState:
    """A compressed prompt of one layer. best: the tokens between the ends that stay."""
    slots = best[0].size
    place = jnp.where(best.reshape(len(best), -1), jnp.arange(slots), slots)
    place = jnp.sort(place, axis=1)[:, None, :rows]

    def choose(tokens: PerHeadTokens, _: Array) -> Chosen:
        chosen = per_head.pick(per_layer.flat(tokens), jnp.minimum(place, slots - 1))
        return chosen, jnp.where(place < slots, jnp.float32(0), -jnp.inf)

    return base.compress(state, ends, choose)


def empty_bytes(stream: Stream) -> int:
    """Bytes of the empty rows that `compress` makes, 0 for other policies."""
    if not isinstance(stream.policies[0], Scored):
        return 0
    return sum(
        int(jnp.isneginf(weight).sum()) * nbytes((sample, weight)) // weight.size
        for _, sample, weight, *_ in stream.decoding.states
    )


@cache
def kvzap(llm: Llm) -> KVzap:
    """The weights of KVzap, fitted once in a run."""
    return fit_kvzap(llm, novel())


def fitted_tokens(llm: Llm) -> int:
    """The number of tokens to which KVzap is fitted."""
    count = len(llm.tokenizer.encode(novel(), bos=False, start=False))
    return count - count % repeatable_tokens(llm, FIT_TOKENS)


def novel() -> str:
    return PASSAGE.read_text("utf-8")[:CHARACTERS]
