"""Losses of cache policies on the same tokens: what `perplexity`, `compare` and `advise` measure.

A text is cut into stretches of equal length. The beginning of each is a prompt; the tokens after it
are predicted one by one, each from the true tokens before it. Policies that evict do so while the
prompt is read, and policies that act on a prompt do so at its end. All read the same tokens, so
their differences have a far smaller spread than their losses.

Policies that attend exactly within a prompt share one reading of it (`shared_prompt`). Programs are
compiled in other threads, in the order in which they are needed, while earlier ones run. In the end
policies decode in turns, where the time of a token is measured too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.errors import UserError
from jaxkv.models.generation import shared_prompt
from jaxkv.models.generation.decoding import BLOCK as DECODED
from jaxkv.models.generation.decoding import compiled_decode_block, prefill_programs
from jaxkv.models.generation.score import Score, check_scorable, compare_chunk, hidden_by_chunk
from jaxkv.models.generation.streams import Stream, not_finite, widths
from jaxkv.models.loading.compilation import Ahead, Stopwatch
from jaxkv.models.loading.llm import Llm
from jaxkv.policy_spec import state_bytes
from jaxkv.sampling import Sampling
from jaxkv.state import memory
from jaxkv.typing import Bool, Float, Float32, Int32

ROUNDS, ROUND = 5, 8  # decoded pieces whose times are taken, and tokens of each

# Shows progress: takes a label, the units in all and their name; yields a function of those done.
WatchTask = Callable[[str, int, str], AbstractContextManager[Callable[[int], None]]]


class Stretches(NamedTuple):
    """Parts of a text. prompt: the number of first tokens that are the prompt, 0 for none.

    The first token after a prompt is fed and not scored, because policies that act on the prompt
    predict it by full attention. So each stretch has N - 1 - prompt scored tokens.
    """

    tokens: Int32[np.ndarray, "S N"]
    prompt: int

    @property
    def fed(self) -> int:
        """Tokens of a stretch that the model reads: all but the last."""
        return self.tokens.shape[1] - 1

    @property
    def scored(self) -> int:
        return self.fed - self.prompt

    def is_complete(self, score: Score) -> bool:
        return score.by_stretch.shape == (len(self.tokens), self.scored)


def cut(
    llm: Llm, ids: Sequence[int], prompt: int, scored: int, count: int | None, default: int
) -> Stretches:
    """Consecutive stretches of a text, each with the BOS and sinks in front.

    ids: the text, with these in front. prompt, scored: tokens of each part of a stretch. count:
    of stretches; None takes as many as the text has, up to `default`.
    Raises UserError where the text has fewer.
    """
    front, size = list(llm.tokenizer.front), prompt + scored + 1
    body = np.asarray(ids[len(front) :], np.int32)
    step = size - len(front)
    room = len(body) // step if step > 0 else 0
    if room < 1:
        raise UserError(
            f"a stretch has {prompt} tokens of prompt and {scored} that are scored, so the text "
            f"must have at least {size} tokens, got {len(ids)}; give a longer text or more "
            f"--max-tokens, or lower --prompt-tokens{'' if scored == 1 else ' or --score-tokens'}"
        )
    if count is not None and count > room:
        raise UserError(
            f"the text has {room} stretches of {size} tokens, got --stretches {count}; give a "
            "longer text, or a lower --stretches"
        )
    count = count or min(room, default)
    parts = body[: count * step].reshape(count, step)
    before = np.tile(np.asarray(front, np.int32), (count, 1))
    return Stretches(np.concatenate([before, parts], axis=1), prompt)


@dataclass(eq=False)
class _Run:
    """One policy: its predictions by stretch and chunk so far, and its last stream."""

    parts: list[list[np.ndarray]] = field(default_factory=list)
    stream: Stream | None = None
    state_bytes: int = 0
    chunk: int = 0
    watch: Stopwatch = field(default_factory=Stopwatch)
    milliseconds: tuple[float, ...] = ()

    def score(self, policy: str, prompt: int) -> Score:
        rows = [np.concatenate(parts) for parts in self.parts if parts]
        rows = [row for row in rows if len(row) == len(rows[0])]
        losses, kl, agreement = np.moveaxis(np.stack(rows).astype(np.float64), 2, 0)
        return Score(
            policy,
            losses,
            self.state_bytes,
            self.watch.seconds,
            self.watch.compile_seconds,
            self.chunk,
            prompt,
            kl,
            agreement,
            self.milliseconds,
        )


def measure(
    llm: Llm,
    text: Stretches,
    policies: Sequence[str],
    seed: int,
    watch: WatchTask,
    stopped: Callable[[], bool] = lambda: False,
    full: str | None = None,
    chunk: int | None = None,
    decode: bool = False,
    after: Callable[[str, Stream], object] | None = None,
) -> list[Score]:
    """The scores of policies, in their order.

    seed: the seed of the first stretch; each later one adds 1. stopped: asked after every chunk
    whether to end there. full: the policy with which predictions are compared. chunk: tokens per
    chunk; None chooses by policy. decode: measure the time of a decoded token, too. after: called
    with each policy and its stream after the last stretch, in which one more token has room.
    Raises UserError before anything runs if any policy cannot run.
    """
    groups = grouped(llm, text, policies, full)
    final = text.fed + (ROUNDS + 1) * ROUND * decode + (after is not None)
    # Those that read a prompt together are in memory at once, and all whose streams are kept.
    for names in [tuple(policies)] if final > text.fed else [group.names for group in groups]:
        needed = sum(state_bytes(llm.policies(name), llm.spec, 1, final) for name in names)
        caches = f"the caches of {len(names)} policies for {final} tokens"
        caches = caches if len(names) > 1 else f"the cache of {names[0]} for {final} tokens"
        memory.check(needed, caches, fewer="policies or tokens, or a smaller budget")
    ahead = Ahead(stopped)
    runs = {name: _Run() for name in policies}
    label = f"measuring {len(policies)} policies" if len(policies) > 1 else policies[0]
    try:
        if llm.mesh is None and text.prompt:
            _compile_ahead(llm, text, groups, chunk, full, final, ahead, decode)
        with watch(label, tokens_fed(text, groups), "tokens") as progress:
            done = 0
            for count in _run(llm, text, groups, runs, seed, full, final, chunk, ahead):
                done += count
                progress(done)
                if stopped():
                    break
        if decode and not stopped():
            _time_decoding(runs, int(text.tokens[-1, -1]), ahead, watch, stopped)
        if after is not None and not stopped():
            for name, run in runs.items():
                after(name, run.stream)
    finally:
        ahead.cancel()
    return [run.score(name, text.prompt) for name, run in runs.items() if any(run.parts)]


class Group(NamedTuple):
    """Policies that read a stretch together. exact: they share one reading of the prompt."""

    names: tuple[str, ...]
    exact: bool


def grouped(
    llm: Llm, text: Stretches, policies: Sequence[str], full: str | None = None
) -> list[Group]:
    """The policies in the order in which they run: those that share a prompt first, `full` ahead.

    Raises UserError for a policy that acts on a prompt where the text has none, or too short a one.
    """
    for name in policies:
        check_scorable(llm.policies(name), text.prompt)
    shares = text.prompt and llm.mesh is None
    exact = [n for n in policies if shares and shared_prompt.attends_exactly(llm.policies(n))]
    exact.sort(key=lambda name: name != full)  # stable
    rest = sorted((n for n in policies if n not in exact), key=lambda name: name != full)
    together = [Group(tuple(exact), True)] if exact else []
    return [*together, *(Group((name,), False) for name in rest)]


def tokens_fed(text: Stretches, groups: Sequence[Group]) -> int:
    """The tokens that the model reads, over all policies."""
    per_stretch = sum(text.prompt + len(group.names) * text.scored for group in groups)
    return len(text.tokens) * per_stretch


def _run(
    llm: Llm,
    text: Stretches,
    groups: Sequence[Group],
    runs: dict[str, _Run],
    seed: int,
    full: str | None,
    final: int,
    chunk: int | None,
    ahead: Ahead,
) -> Iterator[int]:
    """Read all stretches under all policies; yields the tokens read since the last time."""
    references: list[np.ndarray | None] = [None] * len(text.tokens)
    for group in groups:
        for number, ids in enumerate(text.tokens):
            numbered = (seed + number) % 2**32
            streams = [Stream(llm, n, seed=numbered, tokens=final) for n in group.names]
            with runs[group.names[0]].watch.running():
                if not ahead.wait(_prompt(group)):
                    return
                yield from _read_prompt(llm, text, group, streams, ids, chunk)
                if text.prompt:
                    for stream in streams:  # once, so that one program reads the rest
                        stream.reserve(0, room=final)
            for name, stream in zip(group.names, streams, strict=True):
                run = runs[name]
                run.stream, run.chunk = stream if final > text.fed else None, stream.chunk_of(chunk)
                run.parts.append([])
                hidden: list[np.ndarray] = []
                with run.watch.running():
                    if not ahead.wait(name):
                        return
                    parts = _predictions(
                        llm,
                        stream,
                        ids[text.prompt :],
                        stream.chunk_of(chunk),
                        references[number],
                        hidden.append if name == full else None,
                    )
                    for part in parts:
                        run.parts[-1].append(part)
                        run.state_bytes = stream.state_bytes
                        yield len(part)
                predicted = ids[text.prompt + 1 :] < llm.config.vocab  # all but sink tokens
                if not np.isfinite(np.concatenate(run.parts[-1])[predicted, 0]).all():
                    raise not_finite(llm)
                if name == full:
                    references[number] = np.concatenate(hidden)


def _read_prompt(
    llm: Llm,
    text: Stretches,
    group: Group,
    streams: Sequence[Stream],
    ids: np.ndarray,
    chunk: int | None,
) -> Iterator[int]:
    """Finish prefill of the prompt of one stretch; yields the tokens read since the last time."""
    size = text.prompt
    if group.exact:
        layers = llm.config.layers
        for layer in shared_prompt.prefill(streams, ids[:size]):
            yield size * (layer + 1) // layers - size * layer // layers
    elif size:
        (stream,) = streams
        fed = hidden_by_chunk(llm, stream, ids[: size + 1], stream.chunk_of(chunk))
        for _, _, count in fed:
            yield count
        stream.finish_prefill()


def _predictions(
    llm: Llm,
    stream: Stream,
    ids: Int32[np.ndarray, " N"],
    chunk: int,
    reference: Float[np.ndarray, "N D"] | None,
    keep: Callable[[np.ndarray], None] | None,
) -> Iterator[Float32[np.ndarray, "T 3"]]:
    """By chunk: loss, KL and agreement. keep: called with the outputs of the last layer."""
    at = 0
    for x, targets, size in hidden_by_chunk(llm, stream, ids, chunk):
        if keep is not None:
            keep(np.asarray(x)[0, :size])
        full = None
        if reference is not None:
            full = np.zeros(x.shape, reference.dtype)
            full[0, :size] = reference[at : at + size]
        part = np.array(compare_chunk(stream.static.of_model, llm.weights, x, targets, full))[:size]
        if keep is not None:
            part[:, 1:] = 0, 1  # full attention against itself
        at += size
        yield part


def _prompt(group: Group) -> str:
    """The name under which programs of the prompt are compiled."""
    return f"prompt of {group.names}"


def _compile_ahead(
    llm: Llm,
    text: Stretches,
    groups: Sequence[Group],
    chunk: int | None,
    full: str | None,
    final: int,
    ahead: Ahead,
    decode: bool,
) -> None:
    """Begin to compile all programs, in the order in which they are called."""
    ended: dict[str, Stream] = {}
    for group in groups:
        streams = [Stream(llm, name, tokens=final) for name in group.names]
        if group.exact:
            for program, arguments in shared_prompt.programs(streams, text.prompt):
                ahead.compile(_prompt(group), program, *arguments)
        for name, stream in zip(group.names, streams, strict=True):
            before, after = stream.states_for(text.prompt)
            size = stream.chunk_of(chunk)
            if not group.exact:
                shapes = stream.decoding._replace(states=before)
                for width in widths(text.prompt, size):
                    *layers, _ = prefill_programs(stream.static, llm.weights, shapes, width)
                    for program, *arguments in layers:
                        ahead.compile(_prompt(group), program, *arguments)
            stream.decoding = stream.decoding._replace(states=after)
            for width in widths(text.scored, size):
                *layers, _ = prefill_programs(stream.static, llm.weights, stream.decoding, width)
                for program, *arguments in layers:
                    ahead.compile(name, program, *arguments)
                x = layers[-1][4 + 1]
                targets = jax.ShapeDtypeStruct((1, width), jnp.int32)
                of_full = None if full is None or name == full else x
                ahead.compile(
                    name, compare_chunk, stream.static.of_model, llm.weights, x, targets, of_full
                )
            ended[name] = stream
    for name, stream in ended.items() if decode else ():
        arguments = stream.decode_arguments(stream.decoding, Sampling(), (), DECODED)
        ahead.compile(f"decode {name}", compiled_decode_block(), *arguments)


def _time_decoding(
    runs: dict[str, _Run],
    last: int,
    ahead: Ahead,
    watch: WatchTask,
    stopped: Callable[[], bool],
) -> None:
    """Measure the time per token of greedy decoding, by policy and round, from the token `last` on.

    The policies alternate, so that other work of the machine disturbs all of them alike, after a
    round that compiles. No times where it is interrupted.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    with watch("compiling", len(runs), "policies") as progress:
        for number, (name, run) in enumerate(runs.items(), start=1):
            if not ahead.wait(f"decode {name}"):
                return
            decoding = run.stream.decoding
            logits = jnp.zeros_like(decoding.logits).at[:, last].set(1)
            done = jnp.zeros_like(decoding.done)
            run.stream.decoding = decoding._replace(logits=logits, done=done)
            run.stream.decode(Sampling(), ROUND, ())
            progress(number)
    with watch("decoding", len(runs) * ROUNDS * ROUND, "tokens") as progress:
        for number in range(ROUNDS * len(runs)):
            if stopped():
                return
            name = list(runs)[number % len(runs)]
            start = time.perf_counter()
            runs[name].stream.decode(Sampling(), ROUND, ())
            times[name].append(1e3 * (time.perf_counter() - start) / ROUND)
            progress((number + 1) * ROUND)
    for name, run in runs.items():
        run.milliseconds = tuple(times[name])


def paired(
    values: Float[np.ndarray, "S C"], block: int, counted: Bool[np.ndarray, "S C"] | None = None
) -> dict[str, Any]:
    """The mean of the counted values, with two standard errors from blocks within stretches.

    It is a ratio of block sums, so blocks may count unequally many values (Cochran 1977, 6.3).
    """
    counted = np.ones(values.shape, bool) if counted is None else counted
    starts = np.arange(0, values.shape[1], block)
    sums = np.add.reduceat(np.where(counted, values, 0.0), starts, axis=1).ravel()
    counts = np.add.reduceat(counted.astype(np.float64), starts, axis=1).ravel()
    total = int(counts.sum())
    if not total:
        return {"mean": None, "two_errors": None, "count": 0}
    mean, used = sums.sum() / total, int((counts > 0).sum())
    error = None
    if used > 1:
        spread = np.sum((sums - mean * counts) ** 2) * used / (used - 1)
        error = float(2 * np.sqrt(spread) / total)
    return {"mean": float(mean), "two_errors": error, "count": total}


def is_noise(difference: Mapping[str, Any]) -> bool:
    """Whether a paired difference is within two standard errors of 0."""
    error = difference["two_errors"]
    return error is None or abs(difference["mean"]) <= error


def show(difference: Mapping[str, Any] | None, sign: str = "+") -> str:
    """A paired difference with its two standard errors; a dash where there is none."""
    if difference is None or difference["mean"] is None:
        return "-"
    error = difference["two_errors"]
    return f"{difference['mean']:{sign}.3f}" + ("" if error is None else f" ± {error:.3f}")
