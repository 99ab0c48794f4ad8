"""The decode batch and the requests in it. Its size follows their number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxkv.sampling import Knobs, knobs_of_sequence
from jaxkv.serve.engine.model import StepOutput
from jaxkv.serve.engine.pace import Piece, StepWork
from jaxkv.serve.engine.prefill import PrefillState
from jaxkv.serve.engine.programs import DecodeBatch, Programs, SequenceParams
from jaxkv.serve.engine.request import RequestHandle
from jaxkv.typing import Bool, Float32

SHRINK_AFTER = 64  # steps that need fewer entries, before the batch shrinks


class InFlightStep(NamedTuple):
    """A step that the device has not returned yet; handles: (index into `output`, handle).

    prompt_start: the tokens belong to the prompt, from this position on; None for new tokens.
    work: of a step of the whole batch.
    """

    output: StepOutput
    handles: Sequence[tuple[int, RequestHandle]]
    prompt_start: int | None = None
    work: StepWork | None = None


class RunningBatch:
    """The requests in decode, each in an entry of the batch; `handles` has None for a free entry.

    size: sequences that a step computes. A finished request's entry is free at once. Moving
    requests to a batch of another size copies their states. So the batch shrinks only after
    SHRINK_AFTER steps, or when a request arrives and no other runs.
    """

    def __init__(self, programs: Programs, vocab: int) -> None:
        self._programs, self._vocab = programs, vocab
        self._batches = programs.empty_batches()  # of all sizes, so that growing needs no memory
        self.size = programs.sizes[0]
        self.handles: list[RequestHandle | None] = [None] * self.size
        self._needed: list[int] = []  # sizes that the last steps needed, all below `size`

    @property
    def _batch(self) -> DecodeBatch:
        return self._batches[self.size]

    @_batch.setter
    def _batch(self, batch: DecodeBatch) -> None:
        self._batches[self.size] = batch

    @property
    def running(self) -> list[RequestHandle]:
        return [handle for handle in self.handles if handle is not None]

    @property
    def step(self) -> Piece:
        """What one step of the batch computes."""
        return Piece("step", self.size)

    @property
    def waiting_step(self) -> Piece | None:
        """The next step, or None if no request wants it."""
        return self.step if self._wanting() else None

    def insert(self, handle: RequestHandle, state: PrefillState) -> InFlightStep:
        """Insert a finished prefill and sample its first token."""
        if None not in self.handles or not any(self.handles):
            self._resize(self._programs.size_for(len(self.running) + 1))
        index = self.handles.index(None)
        self._batch, output = self._programs.insert(
            self._batch, index, state, sequence_params(handle, self._vocab)
        )
        self.handles[index] = handle
        handle.dispatched = 1
        return InFlightStep(output, [(0, handle)])

    def remove(self, handle: RequestHandle) -> None:
        """Free the entry of a request, if it has one."""
        for index, occupant in enumerate(self.handles):
            if occupant is handle:
                self.handles[index] = None

    def decode(self, in_flight: Iterable[InFlightStep]) -> InFlightStep | None:
        """Dispatch one token of every request that wants more; None if none does.

        in_flight: the steps that are not delivered. Matchers wait for their tokens, and then
        compute their masks, while the device feeds the batch.
        """
        if not (handles := self._wanting()):
            match_tokens(in_flight)  # the last token of an answer may end its grammar
            return None
        self._batch, logits = self._programs.feed(self._batch, self._active(handles))
        match_tokens(in_flight)
        for index, handle in self._wanting():
            request = handle.request
            ends = 0 < request.min_new_tokens == handle.dispatched
            if ends or request.matcher is not None:
                bias = bias_row(handle, self._vocab, may_end=True)
                self._batch = self._programs.set_bias(self._batch, index, bias)
        if not (handles := self._wanting()):  # the last grammars have ended
            return None
        scored = any(handle.request.logprobs is not None for _, handle in handles)
        self._batch, output = self._programs.sample(
            self._batch, logits, self._active(handles), scored
        )
        for _, handle in handles:
            handle.dispatched += 1
        return InFlightStep(output, handles)

    def _wanting(self) -> list[tuple[int, RequestHandle]]:
        """The requests that want another token, each with its entry."""
        return [
            (index, handle)
            for index, handle in enumerate(self.handles)
            if handle is not None and handle.wants_more
        ]

    def _active(self, handles: Sequence[tuple[int, RequestHandle]]) -> Bool[np.ndarray, " B"]:
        active = np.zeros(self.size, bool)
        active[[index for index, _ in handles]] = True
        return active

    def shrink(self, joining: int) -> None:
        """Count a step; after SHRINK_AFTER steps that needed a smaller batch, shrink.

        The new size is the largest that one of these steps needed. joining: requests in prefill.
        """
        needed = self._programs.size_for(max(1, len(self.running) + joining))
        if needed == self.size:
            self._needed.clear()
            return
        self._needed.append(needed)
        if len(self._needed) == SHRINK_AFTER:
            self._resize(max(self._needed))

    def _resize(self, size: int) -> None:
        """Move the requests to the first entries of a batch of this size."""
        self._needed.clear()
        if size == self.size:
            return
        entries = [index for index, handle in enumerate(self.handles) if handle is not None]
        old, new = self._batches[self.size], self._batches[size]
        self._batches[size], self.size = self._programs.move(old, entries, new), size
        self.handles = [self.handles[index] for index in entries]
        self.handles += [None] * (size - len(entries))


def match_tokens(in_flight: Iterable[InFlightStep]) -> None:
    """Tell the matchers of requests their tokens in steps that are not delivered, in order."""
    tokens: Counter[RequestHandle] = Counter()
    for step in in_flight:
        for index, handle in step.handles if step.prompt_start is None else ():
            if handle.request.matcher is None or not handle.dispatched or handle.finished:
                continue
            tokens[handle] += 1
            finite = np.asarray(step.output.finite)[index]  # else the answer ends by that
            if finite and handle.generated + tokens[handle] > handle.matched:
                handle.match(int(np.asarray(step.output.token)[index]))


def sequence_params(handle: RequestHandle, vocab: int) -> SequenceParams:
    """The parameters of a request for its batch entry."""
    request = handle.request
    seen = np.zeros((1, vocab), bool)
    seen[0, list(request.tokens)] = True
    return SequenceParams(
        position=np.array([len(request.tokens)], np.uint32),
        seed=np.array([request.seed], np.uint32),
        knobs=Knobs(*(np.asarray(knob)[None] for knob in knobs_of_sequence(request.sampling))),
        seen=seen,
        penalties=np.array([[request.presence_penalty, request.frequency_penalty]], np.float32),
        bias=bias_row(handle, vocab, may_end=request.min_new_tokens == 0),
    )


def bias_row(handle: RequestHandle, vocab: int, may_end: bool) -> Float32[np.ndarray, "1 V"]:
    """The numbers that are added to the logits. may_end: whether the next token may be an eos."""
    request = handle.request
    bias = np.zeros((1, vocab), np.float32)
    for token, value in request.bias:
        bias[0, token] += value
    if not may_end:
        bias[0, [token for token in request.eos if 0 <= token < vocab]] = -np.inf
    if (allowed := handle.allowed()) is not None:
        bias[0, ~allowed] = -np.inf
    return bias
