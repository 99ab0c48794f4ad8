"""Text generation: `generate` returns an answer with measurements, `stream` yields its text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import defaults
from jaxkv.contract import Policy
from jaxkv.errors import UserError, check_int, warn
from jaxkv.models.generation.decoding import BLOCK
from jaxkv.models.generation.grammar import Grammar, Matcher, matcher_of
from jaxkv.models.generation.streams import Stream
from jaxkv.models.loading.compilation import Stopwatch
from jaxkv.models.loading.llm import Llm
from jaxkv.models.loading.tokenizer import Pieces
from jaxkv.policy_spec import format_policy, max_lookback
from jaxkv.sampling import Sampling
from jaxkv.typing import Int32

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Answer:
    """The text of one sequence, and measurements.

    finish_reason: length, eos or stop. tokens: the new ids, including an eos. prefill_seconds and
    decode_seconds exclude compile_seconds. tokens_per_second and state_bytes count the whole batch.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    policy: str
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    tokens_per_second: float
    state_bytes: int


class OutputText:
    """The text of one sequence as its tokens come; an eos, a stop string or `end` ends it.

    keep: store all tokens and text; False for unbounded generation in constant memory.
    min_new_tokens: stop strings are ignored in the text of so many first tokens. shown: special
    tokens that are written out.
    """

    def __init__(
        self,
        llm: Llm,
        eos: Sequence[int],
        stops: str | Sequence[str],
        keep: bool = True,
        min_new_tokens: int = 0,
        shown: frozenset[int] = frozenset(),
    ):
        stops = [stops] if isinstance(stops, str) else stops
        if not isinstance(stops, Sequence) or not all(isinstance(stop, str) for stop in stops):
            raise UserError(
                f"stop must be a text or a list of texts, got {stops!r}; leave it out for none"
            )
        if not all(stops):
            raise UserError("a stop string must not be empty; leave it out")
        self.tokens: list[int] = []
        self.count, self.reason, self.keep = 0, "", keep
        self._min_new_tokens = min_new_tokens
        self._shown: list[str] = []
        self._pieces = Pieces(llm.tokenizer, start=False, shown=shown)
        self._eos, self.stops, self._pending = frozenset(eos), tuple(stops), ""

    @property
    def text(self) -> str:
        """The text shown so far."""
        return "".join(self._shown)

    def push(self, token: int) -> str:
        """Add a token. Returns the text that is certain now, empty after the sequence's end."""
        if self.reason or token < 0:
            return ""
        self.count += 1
        if self.keep:
            self.tokens.append(token)
        if token in self._eos:
            return self.end("eos")
        return self._release(self._pieces.push(token))

    def end(self, reason: str) -> str:
        """End the sequence. Returns the text withheld as the possible start of a stop string."""
        if self.reason:
            return ""
        piece = self._release(self._pieces.end(), last=True)
        self.reason = self.reason or reason
        return piece

    def _release(self, new: str, last: bool = False) -> str:
        text = self._pending + new
        stops = self.stops if self.count > self._min_new_tokens else ()
        stop_positions = [at for stop in stops if (at := text.find(stop)) >= 0]
        if stop_positions:
            self.reason, cut = "stop", min(stop_positions)
        else:
            cut = len(text) if last or not stops else len(text) - self._possible_stop(text)
        piece, self._pending = text[:cut], "" if stop_positions else text[cut:]
        if self.keep and piece:
            self._shown.append(piece)
        return piece

    def _possible_stop(self, text: str) -> int:
        """The number of last characters that may begin a stop string."""
        longest = max(map(len, self.stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self.stops):
                return size
        return 0


def generate(
    llm: Llm,
    prompt: Prompt | Sequence[Prompt],
    policy: str | Policy | Sequence[Policy | str] = defaults.POLICY,
    max_new_tokens: int = 256,
    *,
    sampling: Sampling | None = None,
    seed: int | Sequence[int] = 0,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    schema: Mapping[str, Any] | Grammar | None = None,
    chunk: int | None = None,
    **knobs: float,
) -> Answer | list[Answer]:
    """Continue a prompt, or a batch of prompts of any lengths.

    prompt: a text or a list of token ids; for a batch a list of these, which returns a list of
    answers. policy: the cache policy, a string or a value, for all layers or one per layer.
    sampling: how tokens are drawn; None takes the model's own settings (`Llm.sampling`). Its fields
    are also keywords (temperature=0, top_k=40, ...), which replace single settings of the model.
    seed: one for all sequences or one per sequence. stop: strings that end a sequence; its text
    leaves them out. schema: a JSON schema that each answer obeys unless max_new_tokens ends it, or
    a `Grammar`. chunk: prompt tokens per prefill chunk, None chooses by policy.
    Raises UserError for anything that the caller can correct.
    """
    single = _is_one(prompt)
    prompts = encode(llm, [prompt] if single else prompt)
    run = Generation(
        llm, prompts, policy, max_new_tokens, sampling, knobs, seed, stop, ignore_eos, schema, chunk
    )
    # Nothing is shown before the whole answer is complete, so use full blocks from the start.
    run.stream.limit = 1 if stop else BLOCK
    for _ in run.blocks():
        pass
    answers = run.answers()
    return answers[0] if single else answers


def stream(
    llm: Llm,
    prompt: Prompt,
    policy: str | Policy | Sequence[Policy | str] = defaults.POLICY,
    max_new_tokens: int | None = None,
    *,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    schema: Mapping[str, Any] | Grammar | None = None,
    chunk: int | None = None,
    **knobs: float,
) -> Iterator[str]:
    """Yield the continuation of a prompt as it is generated; the same text as `generate` returns.

    max_new_tokens: None continues until an eos, or until the caller stops iterating. The other
    arguments are those of `generate`.
    """
    prompts = encode(llm, [prompt])
    run = Generation(
        llm, prompts, policy, max_new_tokens, sampling, knobs, seed, stop, ignore_eos, schema, chunk
    )
    run.outputs[0].keep = False
    # `Generation` has raised for bad arguments by now, before the first `next`.
    return (text for (text,) in run.blocks() if text)


def _is_one(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is one prompt and not a batch."""
    if isinstance(prompt, np.ndarray | jax.Array):
        return prompt.ndim == 1
    return isinstance(prompt, str | bytes) or (
        isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Real)
    )


def encode(llm: Llm, prompts: Sequence[Prompt]) -> list[list[int]]:
    """The token ids of each prompt, with the BOS that the model expects before a text.

    Raises UserError for an empty prompt, unknown ids, or another type.
    """
    if not isinstance(llm, Llm):
        raise UserError(f"the model must come from models.load, got {llm!r:.60}; load it first")
    if not isinstance(prompts, Sequence | np.ndarray | jax.Array) or len(prompts) == 0:
        raise UserError(f"no prompt is given, got {prompts!r:.60}; give a text or a list of texts")
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            if not prompt:
                raise UserError("the prompt is empty; give at least one character")
            ids = llm.tokenizer.encode(prompt)
        else:
            ids = llm.checked_ids(prompt).tolist()
        if not ids:
            raise UserError("the prompt is empty; give at least one token")
        encoded.append(ids)
    return encoded


class Generation:
    """One call of `generate` or `stream`: its `blocks` of text as they come, then its `answers`."""

    def __init__(
        self,
        llm: Llm,
        prompts: Sequence[Sequence[int]],
        policy: str | Policy | Sequence[Policy | str] = defaults.POLICY,
        max_new_tokens: int | None = 256,
        sampling: Sampling | None = None,
        knobs: Mapping[str, float] | None = None,
        seed: int | Sequence[int] = 0,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        schema: Mapping[str, Any] | Grammar | None = None,
        chunk: int | None = None,
    ):
        if max_new_tokens is not None:
            check_int("max_new_tokens", max_new_tokens)
        self.sampling = sampling_for(llm, sampling, knobs)
        self.prompts = prompts
        self.tokens = 2**62 if max_new_tokens is None else max_new_tokens
        self.eos = () if ignore_eos else llm.eos
        self.matchers = matchers_of(llm, schema, len(prompts), ignore_eos)
        self.outputs = [OutputText(llm, self.eos, stop) for _ in prompts]
        longest = max(map(len, prompts))
        self.stream = Stream(llm, policy, len(prompts), seed, longest + (max_new_tokens or 0))
        self.chunk = self.stream.chunk_of(chunk)
        check_prompt_within_context(llm, self.stream.policies, longest)
        # Whether growing caches may exceed the trained context: without a limit they may.
        self._may_exceed = max_new_tokens is None
        length = None if self._may_exceed else longest + max_new_tokens
        warn_beyond_context(llm, self.stream.policies, length)
        self.prefill, self.decode = Stopwatch(), Stopwatch()
        self.stream.compile_ahead(list(map(len, prompts)), self.sampling, self.eos)

    def blocks(self, progress: Callable[[int, int], None] | None = None) -> Iterator[list[str]]:
        """Yield the new text of every sequence, block by block, until all have ended.

        progress: called with (prompt tokens done, all prompt tokens).
        """
        with self.prefill.running():
            self.stream.prefill(self.prompts, self.chunk, progress)
            self.stream.finish_prefill()
            jax.block_until_ready(self.stream.decoding.logits)
        if self.matchers:
            blocks = self._matching_blocks()
        else:
            blocks = self.stream.decode_blocks(self.sampling, self.tokens, self.eos)
        while not all(output.reason for output in self.outputs):
            with self.decode.running():
                block = next(blocks, None)
            if block is None:
                yield [output.end("length") for output in self.outputs]
                return
            if self._may_exceed and warn_if_grown_beyond_context(self.stream):
                self._may_exceed = False
            yield [
                "".join(map(output.push, map(int, ids)))
                for output, ids in zip(self.outputs, block, strict=True)
            ]

    def _matching_blocks(self) -> Iterator[Int32[np.ndarray, "B 1"]]:
        """Yield blocks of one token, which obey the grammar."""
        everything = np.ones(self.stream.llm.config.vocab, bool)
        for _ in range(self.tokens):
            allowed = [
                everything if output.reason else matcher.allowed()
                for matcher, output in zip(self.matchers, self.outputs, strict=True)
            ]
            decoding = self.stream.decoding
            logits = jnp.where(np.stack(allowed), decoding.logits, -jnp.inf)
            self.stream.decoding = decoding._replace(logits=logits)
            block, done = self.stream.decode(self.sampling, 1, self.eos)
            answers = zip(self.matchers, self.outputs, block[:, 0].tolist(), strict=True)
            for matcher, output, token in answers:
                if token >= 0 and not output.reason:
                    matcher.advance(token)
            yield block
            if done.all():
                return

    def answers(self) -> list[Answer]:
        """One answer per sequence, once `blocks` is exhausted or the sequences have ended."""
        tokens = sum(output.count for output in self.outputs)
        return [
            Answer(
                text=output.text,
                tokens=output.tokens,
                finish_reason=output.reason,
                prompt_tokens=len(prompt),
                policy=format_policy(self.stream.policies),
                prefill_seconds=self.prefill.seconds,
                decode_seconds=self.decode.seconds,
                compile_seconds=self.prefill.compile_seconds + self.decode.compile_seconds,
                tokens_per_second=tokens / max(self.decode.seconds, 1e-9),
                state_bytes=self.stream.state_bytes,
            )
            for output, prompt in zip(self.outputs, self.prompts, strict=True)
        ]


def matchers_of(
    llm: Llm, schema: Mapping[str, Any] | Grammar | None, answers: int, ignore_eos: bool
) -> list[Matcher]:
    """A matcher for each answer; none without a schema."""
    if schema is None:
        return []
    if ignore_eos:
        raise UserError("an answer that obeys a schema ends; leave ignore_eos out")
    grammar = schema if isinstance(schema, Grammar) else Grammar("json_schema", schema)
    matcher = matcher_of(llm, grammar)
    return [matcher.copy() for _ in range(answers)]


def sampling_for(
    llm: Llm, sampling: Sampling | None, knobs: Mapping[str, float] | None = None
) -> Sampling:
    """The given settings, or those of the model with some of its fields replaced."""
    knobs = knobs or {}
    if sampling is not None and knobs:
        raise UserError(f"give sampling= or its fields ({', '.join(knobs)}), not both")
    if sampling is not None:
        if not isinstance(sampling, Sampling):
            raise UserError(
                f"sampling must be a models.Sampling, got {sampling!r}; give its fields"
            )
        return sampling
    unknown = [name for name in knobs if name not in Sampling.__dataclass_fields__]
    if unknown:
        names = ", ".join(Sampling.__dataclass_fields__)
        raise UserError(f"unknown argument {unknown[0]!r}; sampling has {names}")
    return dataclasses.replace(llm.sampling, **knobs)


def check_prompt_within_context(llm: Llm, policies: Sequence[Policy], tokens: int) -> None:
    """Raise UserError for a prompt beyond the trained context under a growing cache.

    Positions would be outside those of training, so the answer would make no sense. Policies with a
    bounded lookback may grow. tokens: tokens of the prompt and of the conversation before it.
    """
    context = llm.config.context
    for policy in policies:
        if policy.grows and max_lookback(policy, tokens) > context:
            name = format_policy(policy).partition(":")[0]
            raise UserError(
                f"under {name} a prompt must fit the trained context of {context} tokens, got "
                f"{tokens}; choose a policy with bounded positions, such as streaming, or a "
                "shorter prompt"
            )


def warn_if_grown_beyond_context(stream: Stream) -> bool:
    """Warn if growing caches have more tokens than the trained context; returns whether they do.

    For texts of unknown length, whose growing caches need not reach their maximum.
    """
    length = int(stream.lengths.max())
    if length <= stream.llm.config.context:
        return False
    warn_beyond_context(stream.llm, [policy for policy in stream.policies if policy.grows], length)
    return True


def warn_beyond_context(llm: Llm, policies: Sequence[Policy], tokens: int | None) -> None:
    """Warn where a policy keeps tokens at distances beyond the trained context.

    tokens: the length of the text; None where it is unknown, which excludes growing caches
    (`warn_if_grown_beyond_context`).
    """
    furthest: dict[type, tuple[int | float, Policy]] = {}  # of each kind: layers may differ
    for policy in policies:
        lookback = 0 if policy.grows and tokens is None else max_lookback(policy, tokens)
        if lookback > max(llm.config.context, *furthest.get(type(policy), [0])[:1]):
            furthest[type(policy)] = lookback, policy
    for lookback, policy in furthest.values():
        distance = "without limit" if lookback == math.inf else f"{lookback} tokens"
        name = format_policy(policy)
        if policy.grows:  # its fields name a maximum, which is not what is used
            name = name.partition(":")[0]
        warn(
            f"{name} looks back {distance}, beyond the trained context of "
            f"{llm.config.context}: the text usually degrades there"
        )
