"""Measures cache policies at equal budgets on one text, against full attention.

All policies read the same tokens, so their differences have a far smaller spread than their losses.
Only tokens that come after all caches are full are scored. Each is predicted from the tokens before
it, and errors are those of means over blocks of consecutive tokens.

The recall of distant text is measured where the text repeats itself: at the last of REPEAT tokens
that occurred before in this order, the latest time at some distance. A cache that evicted the
earlier occurrence predicts them worse than full attention does.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Policy
from jaxkv.errors import UserError
from jaxkv.models import budgets
from jaxkv.models.decoder import Decoder, Weights
from jaxkv.models.decoding import Static
from jaxkv.models.divergence import divergence
from jaxkv.models.llm import Llm
from jaxkv.models.score import TOKENS_OF_LOGITS, check_scorable, gather, hidden_by_chunk
from jaxkv.models.streams import Stream, not_finite
from jaxkv.policies import Full
from jaxkv.policy_spec import format_policy, max_lookback, state_bytes
from jaxkv.sampling import Sampling
from jaxkv.state import memory
from jaxkv.typing import Array, Float, Float32, Int32

FULL = "full"
BLOCKS, BLOCK = 30, 16  # blocks of the default length, and the shortest block
LEAST_BLOCKS = 8  # fewer give no useful error
REPEAT = 3  # tokens of a repeated sequence
ROUNDS, ROUND = 5, 16  # decoded pieces whose times are taken, and tokens of each
NO_TIMES = np.zeros(0)
# Shows progress: takes a label, the units in all and their name; yields a function of those done.
WatchTask = Callable[[str, int, str], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True, eq=False)
class Reading:
    """What one policy gives: for tokens 1, 2, ... of the text, and per decoded token.

    losses: NaN for sink tokens, which no head predicts. kl, same: of the prediction against that of
    full attention, NaN where it was not measured. milliseconds: per decoded token, of each round;
    empty if interrupted before.
    """

    policy: str
    losses: Float[np.ndarray, " N"]
    kl: Float[np.ndarray, " N"]
    same: Float[np.ndarray, " N"]
    state_bytes: int
    seconds: float
    compile_seconds: float
    milliseconds: Float[np.ndarray, " R"] = field(default_factory=lambda: NO_TIMES)


def check_not_full(llm: Llm, policy: str) -> None:
    """Raise UserError for full attention, which is the baseline and exceeds every budget."""
    if set(map(_without_start, llm.policies(policy))) == {Full()}:
        raise UserError(
            f"full is always measured where the text fits the trained context, got --policy "
            f"{policy}; leave it out"
        )


def _without_start(policy: Policy) -> Policy:
    """Full attention with its default slots: their number changes no result."""
    return replace(policy, max=Full.max, start=Full.start) if isinstance(policy, Full) else policy


def first_counted(llm: Llm, policies: Sequence[str], tokens: int, block: int | None = None) -> int:
    """The first token that comes after the caches of all policies are full.

    It also comes after the sink tokens, which no head predicts. block: as for `rank`.
    Raises UserError where too few tokens follow it.
    """
    slots = {policy: budgets.slots_of(llm, llm.policies(policy)) for policy in policies}
    policy = max(slots, key=slots.get)
    first = max(slots[policy] + 1, len(llm.tokenizer.front))
    needed = first + LEAST_BLOCKS * BLOCK
    if tokens < needed:
        raise UserError(
            f"the text must be longer than a cache: {policy} caches {slots[policy]} tokens, so at "
            f"least {needed} tokens are needed, got {tokens}; give a longer text, raise "
            "--max-tokens, or lower --budget"
        )
    if block is not None and LEAST_BLOCKS * block > tokens - first:
        raise UserError(
            f"errors need at least {LEAST_BLOCKS} blocks, and {tokens - first} tokens are scored "
            f"once every cache is full, got --block {block}; give at most "
            f"{(tokens - first) // LEAST_BLOCKS}, or a longer text"
        )
    return first


def measure(
    llm: Llm,
    tokens: Sequence[int],
    policies: Sequence[str],
    seed: int,
    watch: WatchTask,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Reading]:
    """The readings of full attention, if the text fits the trained context, and of the policies.

    stopped: asked after every chunk and round whether to end; what was complete is returned.
    Raises UserError before the first reading if any policy cannot run.
    """
    inside = len(tokens) <= llm.config.context
    names = [FULL, *policies] if inside else list(policies)
    final = len(tokens) + (ROUNDS + 1) * ROUND
    for name in names:
        check_scorable(llm.policies(name))
    # Decoding alternates between the policies, so the caches of all of them are in memory at once.
    needed = sum(state_bytes(llm.policies(name), llm.spec, 1, final) for name in names)
    what = f"the caches of {len(names)} policies for {final} tokens"
    memory.check(needed, what, fewer="policies or tokens, or a smaller budget")
    ids, readings, reference = np.asarray(tokens, np.int32), [], None
    streams: dict[str, Stream] = {}
    for name in names:
        if stopped():
            break
        hidden: list[np.ndarray] = []
        keep = hidden.append if name == FULL else None
        stream = Stream(llm, name, seed=seed, tokens=final)
        with watch(name, len(ids) - 1, "tokens") as progress:
            parts = _predictions(llm, ids, stream, reference, keep)
            found, seconds, compiling = gather(parts, progress, stopped)
        if len(found) < len(ids) - 1:
            break
        predicted = ids[1:] < llm.config.vocab  # all but sink tokens
        if not np.isfinite(found[predicted, 0]).all():
            raise not_finite(llm)
        reference = np.concatenate(hidden, axis=1) if keep else reference
        loss, kl, same = found.T.astype(np.float64)
        readings.append(Reading(name, loss, kl, same, stream.state_bytes, seconds, compiling))
        streams[name] = stream
    times = {} if stopped() else _decode_times(streams, int(ids[-1]), watch, stopped)
    return [replace(one, milliseconds=times.get(one.policy, NO_TIMES)) for one in readings]


def _predictions(
    llm: Llm,
    ids: Int32[np.ndarray, " N"],
    stream: Stream,
    reference: Float[np.ndarray, "D N"] | None,
    keep: Callable[[np.ndarray], None] | None,
) -> Iterator[Float32[np.ndarray, "T 3"]]:
    """By chunk: loss, KL and agreement. keep: called with the outputs of the last layer."""
    at = 0
    for x, targets, size in hidden_by_chunk(llm, stream, ids, stream.chunk_of(None)):
        if keep is not None:
            keep(np.asarray(x)[:, 0, :size])
        full = None
        if reference is not None:
            full = np.zeros(x.shape, reference.dtype)
            full[:, 0, :size] = reference[:, at : at + size]
        found = np.array(_compare(stream.static, llm.weights, x, targets, full))[:size]
        if keep is not None:
            found[:, 1:] = 0, 1  # full attention against itself
        at += size
        yield found


@partial(jax.jit, static_argnums=0)
def _compare(
    static: Static,
    weights: Weights,
    x: Float[Array, "D 1 T"],
    targets: Int32[Array, "1 T"],
    full: Float[Array, "D 1 T"] | None,
) -> Float32[Array, "T 3"]:
    """Losses of the targets, KL from full attention and agreement (NaN where `full` is None)."""
    decoder, parts = Decoder(static.config, weights, static.mesh), []
    for start in range(0, x.shape[2], TOKENS_OF_LOGITS):
        block = slice(start, start + TOKENS_OF_LOGITS)
        logits = decoder.logits(decoder.normed(x[:, :, block]))
        picked = jnp.take_along_axis(logits, targets[None, :, block], axis=0)[0]
        losses = jax.nn.logsumexp(logits, axis=0) - picked
        if full is None:
            kl, same = jnp.full_like(losses, jnp.nan), jnp.full_like(losses, jnp.nan)
        else:
            of_full = decoder.logits(decoder.normed(full[:, :, block].astype(x.dtype)))
            kl, same = divergence(of_full, logits)
        parts.append(jnp.stack([losses[0], kl[0], same[0].astype(jnp.float32)], axis=1))
    return jnp.concatenate(parts)


def _decode_times(
    streams: Mapping[str, Stream], last: int, watch: WatchTask, stopped: Callable[[], bool]
) -> dict[str, Float[np.ndarray, " R"]]:
    """Milliseconds per token of greedy decoding by policy and round, after the token `last`.

    The policies alternate, so that other work of the machine disturbs all of them alike, after a
    round that compiles. Empty if interrupted.
    """
    times: dict[str, list[float]] = {name: [] for name in streams}
    with watch("compiling", len(streams), "policies") as progress:
        for number, stream in enumerate(streams.values(), start=1):
            if stopped():
                return {}
            stream.prefill([[last]], 1)
            stream.decode(Sampling(), ROUND, ())
            progress(number)
    with watch("decoding", len(streams) * ROUNDS * ROUND, "tokens") as progress:
        for number in range(ROUNDS * len(streams)):
            if stopped():
                return {}
            name = list(streams)[number % len(streams)]
            begun = time.perf_counter()
            streams[name].decode(Sampling(), ROUND, ())
            times[name].append(1e3 * (time.perf_counter() - begun) / ROUND)
            progress((number + 1) * ROUND)
    return {name: np.array(found) for name, found in times.items()}


def repeat_distances(ids: Sequence[int]) -> Int32[np.ndarray, " N"]:
    """By token 1, 2, ...: the tokens back to the latest earlier end of the same REPEAT tokens.

    0 where these tokens did not occur before.
    """
    latest: dict[tuple[int, ...], int] = {}
    found = np.zeros(len(ids) - 1, np.int32)
    for end in range(REPEAT - 1, len(ids)):
        words = tuple(ids[end - REPEAT + 1 : end + 1])
        if words in latest:
            found[end - 1] = end - latest[words]
        latest[words] = end
    return found


def ratio(values: Float[np.ndarray, " N"], block: int, counted: np.ndarray | None = None) -> dict:
    """The mean of the counted values, with two standard errors from blocks of tokens.

    It is a ratio of block sums, so blocks may count unequally many values (Cochran 1977, 6.3).
    """
    counted = np.ones(len(values), bool) if counted is None else counted
    starts = np.arange(0, len(values), block)
    sums = np.add.reduceat(np.where(counted, values, 0.0), starts)
    counts = np.add.reduceat(counted.astype(np.float64), starts)
    total = int(counts.sum())
    if not total:
        return {"mean": None, "two_errors": None, "count": 0}
    mean, used = sums.sum() / total, int((counts > 0).sum())
    error = None
    if used > 1:
        spread = np.sum((sums - mean * counts) ** 2) * used / (used - 1)
        error = float(2 * np.sqrt(spread) / total)
    return {"mean": float(mean), "two_errors": error, "count": total}


def rank(
    llm: Llm, ids: Sequence[int], readings: Sequence[Reading], first: int, block: int | None
) -> dict[str, Any]:
    """The results: full attention, if it was measured, and then the policies by their loss.

    first: the first token that counts. block: tokens per block (None: BLOCKS blocks).
    """
    counted = slice(first - 1, None)
    losses = {one.policy: one.losses[counted] for one in readings}
    block = block or max(BLOCK, -(-(len(ids) - first) // BLOCKS))
    measured = sorted(
        (one for one in readings if one.policy != FULL), key=lambda one: one.losses[counted].mean()
    )
    full = [one for one in readings if one.policy == FULL]
    distances = repeat_distances(ids)[counted]
    near = min((budgets.slots_of(llm, llm.policies(one.policy)) for one in measured), default=0)
    ends = _ends(near, len(ids)) if near else []
    rows = []
    for one in [*full, *measured]:
        mine = losses[one.policy]
        over = {
            name: ratio(mine - losses[base.policy], block)
            for name, base in (("full", full[0] if full else None),
                               ("best", measured[0] if measured else None)) if base is not None
        }  # fmt: skip
        base = losses[FULL] if full else losses[measured[0].policy]
        bins = [(start, end, (distances >= start) & (distances < end)) for start, end in ends]
        rows.append({
            "policy": one.policy,
            "policy_string": format_policy(llm.policies(one.policy)),
            "loss": float(mine.mean()),
            "perplexity": float(np.exp(mine.mean())),
            "over_full": over.get("full"),
            "over_best": None if one.policy == FULL else over["best"],
            "kl": ratio(one.kl[counted], block) if full else None,
            "agreement": float(one.same[counted].mean()) if full else None,
            "recall": [
                {"from": start, "to": end} | ratio(mine - base, block, some)
                for start, end, some in bins
            ],
            "far_recall": ratio(mine - base, block, distances >= near) if near else None,
            "milliseconds_per_token": _times(one.milliseconds),
            "state_bytes": one.state_bytes,
            "endless": _is_endless(llm, one.policy),
            "seconds": one.seconds,
            "compile_seconds": one.compile_seconds,
        })  # fmt: skip
    return {"block": block, "first_counted": first, "counted": len(ids) - first,
            "levels": _levels([one.policy for one in measured], losses, block),
            "recall_base": FULL if full else measured[0].policy if measured else None,
            "near": near, "policies": rows}  # fmt: skip


def _ends(near: int, tokens: int) -> list[tuple[int, int]]:
    """Distances: within the smallest cache, and then by powers of two of its size."""
    edges = [1, near]
    while edges[-1] < tokens:
        edges.append(2 * edges[-1])
    return list(itertools.pairwise(edges))


def _levels(
    policies: Sequence[str], losses: Mapping[str, np.ndarray], block: int
) -> list[list[str]]:
    """Groups of policies by their loss; the others of a group are within noise of its first."""
    left, levels = list(policies), []
    while left:
        first = losses[left[0]]
        levels.append([name for name in left if is_noise(ratio(losses[name] - first, block))])
        left = [name for name in left if name not in levels[-1]]
    return levels


def _is_endless(llm: Llm, policy: str) -> bool:
    """Whether no distance exceeds the trained context, however long the text is."""
    return max(map(max_lookback, llm.policies(policy))) <= llm.config.context


def _times(milliseconds: np.ndarray) -> Mapping[str, float] | None:
    if not len(milliseconds):
        return None
    return {"median": float(np.median(milliseconds)), "least": float(milliseconds.min()),
            "most": float(milliseconds.max())}  # fmt: skip


def is_noise(difference: Mapping[str, Any]) -> bool:
    """Whether a paired difference is within two standard errors of 0."""
    error = difference["two_errors"]
    return error is None or abs(difference["mean"]) <= error
