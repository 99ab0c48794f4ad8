"""Measures cache policies at equal budgets on stretches of a text, against full attention.

Every stretch has a prompt, which is longer than the caches, and tokens after it that are scored
(`measurement`). So policies that evict and policies that act on a prompt are compared on the same
tokens. Errors are those of means over stretches, because the tokens of one stretch share a cache.
A text of fewer than eight stretches has several blocks in each, which are taken as independent.

The recall of distant text is measured where the text repeats itself: at the last of REPEAT tokens
that occurred before in this order, the latest time at some distance. A cache that evicted the
earlier occurrence predicts them worse than full attention does.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Policy
from jaxkv.errors import UserError
from jaxkv.models.generation.decoding import BLOCK as DECODED
from jaxkv.models.generation.decoding import compiled_decode_block
from jaxkv.models.generation.streams import Stream
from jaxkv.models.loading.compilation import Ahead
from jaxkv.models.loading.llm import Llm
from jaxkv.models.tools import budgets, measurement
from jaxkv.models.tools.measurement import Reading, Stretches, WatchTask
from jaxkv.models.tools.paired import is_noise, paired
from jaxkv.policies import Full
from jaxkv.policy_spec import format_policy, max_lookback
from jaxkv.sampling import Sampling
from jaxkv.typing import Float, Int32

FULL = "full"
SCORED, STRETCHES = 64, 8  # scored tokens of a stretch, and stretches, unless chosen
STRETCH = 512  # tokens of a stretch that the model reads, unless its trained context is shorter
BLOCK = 16  # the shortest block, in tokens
LEAST_BLOCKS = 8  # fewer give no useful error
REPEAT = 3  # tokens of a repeated sequence
ROUNDS, ROUND = 5, 8  # decoded pieces whose times are taken, and tokens of each
NO_TIMES = np.zeros(0)


@dataclass(frozen=True, eq=False)
class TimedReading:
    """A reading, and what it costs.

    state_bytes: bytes of the caches after the last scored token. prompt_bytes: their bytes before
    the end of prefill. milliseconds: time per decoded token in each round; empty if interrupted.
    """

    reading: Reading
    state_bytes: int
    prompt_bytes: int
    milliseconds: Float[np.ndarray, " R"] = field(default_factory=lambda: NO_TIMES)

    @property
    def policy(self) -> str:
        return self.reading.policy


def check_not_full(llm: Llm, policy: str) -> None:
    """Raise UserError for full attention, which is the baseline and exceeds every budget."""
    if set(map(_without_start, llm.policies(policy))) == {Full()}:
        raise UserError(f"full is always measured, got --policy {policy}; leave it out")


def _without_start(policy: Policy) -> Policy:
    """Full attention with its default slots: their number changes no result."""
    return replace(policy, max=Full.max, start=Full.start) if isinstance(policy, Full) else policy


def cut(
    llm: Llm, ids: Sequence[int], prompt: int | None, scored: int | None, stretches: int | None
) -> Stretches:
    """The stretches of a text; None chooses each size. ids: with the BOS and sinks in front.

    Raises UserError where the text is too short, or a stretch longer than the trained context.
    """
    context = llm.config.context
    scored = scored or min(SCORED, context // 8)
    prompt = prompt or min(STRETCH, context) - scored
    if prompt + scored > context:
        raise UserError(
            f"a stretch must fit the trained context of {context} tokens, because full attention "
            f"is measured too, got {prompt} of prompt and {scored} scored; lower --prompt-tokens "
            "or --score-tokens"
        )
    return measurement.cut(llm, ids, prompt, scored, stretches, STRETCHES)


def block_of(text: Stretches, block: int | None) -> int:
    """Tokens per block, from which errors are computed: those of a stretch, unless these are few.

    Blocks divide the scored tokens of a stretch, because a shorter rest would count as a block too.
    Raises UserError where they do not, or are too few.
    """
    stretches, scored = len(text.tokens), text.scored
    needed = -(-LEAST_BLOCKS // stretches)
    divisors = [size for size in range(1, scored // needed + 1) if scored % size == 0]
    longest = max(divisors, default=0)
    if block is None and longest < BLOCK:
        raise UserError(
            f"errors need at least {LEAST_BLOCKS} equal blocks of {BLOCK} scored tokens or more, "
            f"and the text has {stretches} stretches with {scored}; give a longer text, a lower "
            "--prompt-tokens or other --score-tokens"
        )
    if block is not None and block not in divisors:
        remedy = f"a divisor of {scored} up to {longest}" if longest else "a longer text"
        raise UserError(
            f"errors need at least {LEAST_BLOCKS} equal blocks, and {stretches} stretches have "
            f"{scored} scored tokens each, got --block {block}; give {remedy}"
        )
    return block or longest


def check_evicts(llm: Llm, policies: Sequence[str], text: Stretches) -> None:
    """Raise UserError for a cache that the prompt does not fill: it would be full attention."""
    for policy in policies:
        slots = budgets.slots_of(llm, llm.policies(policy))
        if slots > text.prompt:
            raise UserError(
                f"the prompt must fill every cache: {policy} caches {slots} tokens, got a prompt "
                f"of {text.prompt}; raise --prompt-tokens, or lower --budget"
            )


def measure(
    llm: Llm,
    text: Stretches,
    policies: Sequence[str],
    seed: int,
    watch: WatchTask,
    stopped: Callable[[], bool] = lambda: False,
    overlap: bool = True,
) -> list[TimedReading]:
    """The results of full attention and of the policies.

    stopped: asked after every chunk and round whether to end; what was complete is returned.
    overlap: compile programs while others run. Raises UserError before the first reading if any
    policy cannot run.
    """
    ahead = Ahead(stopped)
    readings, streams = measurement.measure(
        llm, text, [FULL, *policies], seed, watch, stopped, full=FULL,
        ahead=ahead if overlap else None, later=_compile_decoding, room=(ROUNDS + 1) * ROUND,
    )  # fmt: skip
    complete = [reading for reading in readings if reading.is_complete(text)]
    streams = {reading.policy: streams[reading.policy] for reading in complete}
    last = int(text.tokens[-1, -1])
    times = {} if stopped() else _decode_times(streams, last, ahead, watch, stopped)
    ahead.cancel()
    return [
        TimedReading(
            reading,
            budgets.bytes_of(llm, reading.policy, text.prompt, text.scored),
            budgets.prompt_bytes_of(llm, reading.policy, text.prompt),
            times.get(reading.policy, NO_TIMES),
        )
        for reading in complete
    ]


def _compile_decoding(ahead: Ahead, name: str, stream: Stream) -> None:
    """Begin to compile the decoding of a stream; its caches are shapes."""
    arguments = stream.decode_arguments(stream.decoding, Sampling(), (), DECODED)
    ahead.compile(f"decode {name}", compiled_decode_block(), *arguments)


def _decode_times(
    streams: Mapping[str, Stream], last: int, ahead: Ahead, watch: WatchTask,
    stopped: Callable[[], bool],
) -> dict[str, Float[np.ndarray, " R"]]:  # fmt: skip
    """Milliseconds per token of greedy decoding by policy and round, from the token `last` on.

    The policies alternate, so that other work of the machine disturbs all of them alike, after a
    round that compiles. Empty if interrupted.
    """
    times: dict[str, list[float]] = {name: [] for name in streams}
    with watch("compiling", len(streams), "policies") as progress:
        for number, (name, stream) in enumerate(streams.items(), start=1):
            if not ahead.wait(f"decode {name}"):
                return {}
            logits = jnp.zeros_like(stream.decoding.logits).at[:, last].set(1)
            done = jnp.zeros_like(stream.decoding.done)
            stream.decoding = stream.decoding._replace(logits=logits, done=done)
            stream.decode(Sampling(), ROUND, ())
            progress(number)
    with watch("decoding", len(streams) * ROUNDS * ROUND, "tokens") as progress:
        for number in range(ROUNDS * len(streams)):
            if stopped():
                return {}
            name = list(streams)[number % len(streams)]
            start = time.perf_counter()
            streams[name].decode(Sampling(), ROUND, ())
            times[name].append(1e3 * (time.perf_counter() - start) / ROUND)
            progress((number + 1) * ROUND)
    return {name: np.array(of_rounds) for name, of_rounds in times.items()}


def repeat_distances(ids: Sequence[int]) -> Int32[np.ndarray, " N"]:
    """By token 1, 2, ...: the tokens back to the latest earlier end of the same REPEAT tokens.

    0 where these tokens did not occur before.
    """
    latest: dict[tuple[int, ...], int] = {}
    distances = np.zeros(len(ids) - 1, np.int32)
    for end in range(REPEAT - 1, len(ids)):
        words = tuple(int(token) for token in ids[end - REPEAT + 1 : end + 1])
        if words in latest:
            distances[end - 1] = end - latest[words]
        latest[words] = end
    return distances


def rank(
    llm: Llm, text: Stretches, results: Sequence[TimedReading], budget: int, block: int
) -> dict[str, Any]:
    """The report: full attention, then the policies within the budget by their loss, then others.

    budget: bytes. block: tokens per block, from which errors are computed.
    """
    losses = {result.policy: result.reading.losses for result in results}
    predicted = text.tokens[:, text.prompt + 1 :] < llm.config.vocab  # all but sink tokens
    mean = partial(paired, block=block)
    full = [result for result in results if result.policy == FULL]
    by_loss = sorted((result for result in results if result.policy != FULL),
                     key=lambda result: losses[result.policy][predicted].mean())  # fmt: skip
    within = [result for result in by_loss if result.state_bytes <= budget]
    beyond = [result for result in by_loss if result.state_bytes > budget]
    best = (within or by_loss or full)[0].policy if results else None
    distances = np.stack([repeat_distances(ids) for ids in text.tokens])[:, text.prompt :]
    slots = [budgets.slots_of(llm, llm.policies(result.policy)) for result in within
             if not budgets.acts_on_prompt(llm.policies(result.policy))]  # fmt: skip
    min_slots = min(slots, default=0) or text.scored
    ends = _ends(min_slots, text.fed)
    rows = []
    for result in [*full, *within, *beyond]:
        values, policies = losses[result.policy], llm.policies(result.policy)
        over = values - losses[FULL] if full else np.full_like(values, np.nan)
        rows.append({
            "policy": result.policy,
            "policy_string": format_policy(policies),
            "loss": float(values[predicted].mean()),
            "perplexity": float(np.exp(values[predicted].mean())),
            "over_full": mean(over, counted=predicted),
            "over_best": mean(values - losses[best], counted=predicted),
            "kl": mean(result.reading.kl, counted=predicted),
            "agreement": float(result.reading.agreement[predicted].mean()),
            "recall": [
                {"from": start, "to": end}
                | mean(over, counted=predicted & (distances >= start) & (distances < end))
                for start, end in ends
            ],
            "far_recall": mean(over, counted=predicted & (distances >= min_slots)),
            "milliseconds_per_token": _times(result.milliseconds),
            "state_bytes": result.state_bytes,
            "prompt_bytes": result.prompt_bytes,
            "within_budget": result.state_bytes <= budget,
            "acts_on_prompt": budgets.acts_on_prompt(policies),
            "endless": _is_endless(llm, result.policy),
            "seconds": result.reading.seconds,
            "compile_seconds": result.reading.compile_seconds,
        })  # fmt: skip
    names = [result.policy for result in within or by_loss]
    return {
        "budget": budget, "stretches": len(text.tokens), "prompt": text.prompt,
        "scored": text.scored, "block": block, "counted": int(predicted.sum()), "near": min_slots,
        "levels": _levels(names, losses, predicted, block), "policies": rows,
    }  # fmt: skip


def _ends(min_slots: int, tokens: int) -> list[tuple[int, int]]:
    """Distances: within the smallest cache, and then by powers of two of its size."""
    edges = [1, min_slots]
    while edges[-1] < tokens:
        edges.append(2 * edges[-1])
    return list(itertools.pairwise(edges))


def _levels(
    policies: Sequence[str], losses: Mapping[str, np.ndarray], predicted: np.ndarray, block: int
) -> list[list[str]]:
    """Groups of policies by their loss; the others of a group are within noise of its first."""
    unranked, levels = list(policies), []
    while unranked:
        first = losses[unranked[0]]
        levels.append([
            name for name in unranked if is_noise(paired(losses[name] - first, block, predicted))
        ])  # fmt: skip
        unranked = [name for name in unranked if name not in levels[-1]]
    return levels


def _is_endless(llm: Llm, policy: str) -> bool:
    """Whether no distance exceeds the trained context, however long the text is."""
    return max(map(max_lookback, llm.policies(policy))) <= llm.config.context


def _times(milliseconds: np.ndarray) -> Mapping[str, float] | None:
    if not len(milliseconds):
        return None
    return {"median": float(np.median(milliseconds)), "least": float(milliseconds.min()),
            "most": float(milliseconds.max())}  # fmt: skip
