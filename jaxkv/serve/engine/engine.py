"""Continuous batching: requests share one decode batch, and none can see another's text.

A step decodes one token of every running request, then prefills some tokens of a prompt.
Outputs are delivered one step after dispatch, so that the device does not wait for the host. When
an eos or a stop string ends a request, one more token of it is in flight; it is dropped.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxkv.defaults import MAX_CHUNK
from jaxkv.errors import check_int
from jaxkv.serve.engine.delivery import Delivery, EngineMetrics
from jaxkv.serve.engine.model import Model, StepOutput
from jaxkv.serve.engine.pace import Piece, PrefillPace
from jaxkv.serve.engine.plan import resolve_max_len
from jaxkv.serve.engine.prefill import ChunkPrefill, PrefillState, policy_seed
from jaxkv.serve.engine.programs import Programs, batch_sizes, compilations, padded_widths
from jaxkv.serve.engine.queue import RequestQueue
from jaxkv.serve.engine.request import (
    Listener,
    Outcome,
    Overloaded,
    Request,
    RequestHandle,
    ScoredToken,
    check_request,
)
from jaxkv.serve.engine.running import InFlightStep, RunningBatch
from jaxkv.serve.engine.store import (
    PrefixConfig,
    PrefixStore,
    check_prefixes,
    prefix_metrics,
)
from jaxkv.serve.prefix.index import Lease
from jaxkv.state import memory
from jaxkv.state.sharding import bytes_per_device

PROMPT_COST = 32  # tokens of a step's budget that the insertion of a prompt counts as
CREATION, LOADING = Piece("creation"), Piece("loading")  # of the state of a prompt
PREFILLS_AHEAD = 2  # steps whose prefills may be in flight: cancelling waits for no more of them
SMALLER = "a smaller --chunk, --max-batch or --prefix-memory"
# What lowers the bytes of each part of the memory.
MEMORY_ADVICE = {
    "weights": "--weights int8, --mesh model=N, or a smaller model",
    "sequences": "a smaller --max-batch, or a smaller policy such as streaming:sinks=4,window=252",
    "prefixes": "a smaller --prefix-memory",
}
LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class ActivePrefill:
    """A prefill in progress. lease: its cached prefix.

    state: has its first `position` tokens; None before it starts. chunk: the one in progress.
    """

    handle: RequestHandle
    lease: Lease | None
    position: int
    state: PrefillState | None = None
    chunk: ChunkPrefill | None = None

    @property
    def is_complete(self) -> bool:
        return self.position == len(self.handle.request.tokens)

    def next_size(self, chunk: int) -> int:
        """The tokens of its next chunk."""
        return min(chunk, len(self.handle.request.tokens) - self.position)


class StepWatch:
    """A context around each step, which notices a step that hangs, for example on a broken device.

    seconds: the longest time that a step may take.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._latest = seconds, math.inf

    def __enter__(self) -> None:
        self._latest = time.monotonic() + self._seconds

    def __exit__(self, *_: object) -> None:
        self._latest = math.inf

    @property
    def stalled(self) -> str:
        """The message that a step takes too long; empty if none does. From any thread."""
        late = time.monotonic() > self._latest
        return f"a step has taken more than {self._seconds:g} s" if late else ""


class Engine:
    """A queue, prompts in prefill (one, or those of two owners in turn), and a decode batch.

    model: the model that runs.
    max_batch: sequences that decode together.
    max_len: tokens of a sequence, prompt and answer; None: GROWING_LEN if a cache grows, else no
      limit.
    chunk: prompt tokens per prefill call; prefixes are shared at its multiples.
    max_prefill_tokens: prompt tokens prefilled in one step, at least a chunk; running sequences
      wait for them. None: a chunk.
    max_stall: about how many seconds running sequences wait for prefills in one step, see
      `PrefillPace`. None: no limit, and a schedule that no clock changes.
    queue, queue_tokens: requests and prompt tokens that may wait.
    prefix_cache: the prefix cache; None for none.
    seed: start of the policies' random draws, which are equal for all requests of one salt.
    step_seconds: a step that takes longer makes the engine unhealthy until it ends.
    max_per_owner: sequences of one owner that run together; with a limit, the prompts of two owners
      are prefilled in turn. None: no limit, and one prompt at a time.
    fixed_batch: every step computes max_batch sequences, however few run, so that no bit of an
      answer depends on their number. Otherwise the batch grows with load, so that fewer sequences
      take less time.
    progress: called with (programs compiled, all programs).
    The attribute `bytes` has its memory on the device by use.
    Raises UserError for settings that are not whole numbers or do not fit into memory.
    """

    _thread: threading.Thread | None

    def __init__(
        self,
        model: Model,
        max_batch: int = 16,
        max_len: int | None = None,
        chunk: int = 128,
        max_prefill_tokens: int | None = None,
        max_stall: float | None = None,
        queue: int = 256,
        queue_tokens: int = 2**20,
        prefix_cache: PrefixConfig | None = None,
        seed: int = 0,
        step_seconds: float = 300.0,
        max_per_owner: int | None = None,
        fixed_batch: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        check_int("chunk", chunk, maximum=MAX_CHUNK)
        budget = chunk if max_prefill_tokens is None else max_prefill_tokens
        max_len = resolve_max_len(model.policies, max_len)
        per_owner = max_batch if max_per_owner is None else max_per_owner
        counts = {
            "max_batch": max_batch,
            "max_prefill_tokens": budget,
            "queue": queue,
            "queue_tokens": queue_tokens,
            "max_per_owner": per_owner,
        }
        for name, value in counts.items():
            check_int(name, value, maximum=2**31 - 1)
        check_int("seed", seed, 0, 2**32 - 1)
        self._pace = PrefillPace(max_stall)
        self.max_batch, self.max_len, self.max_per_owner = max_batch, max_len, per_owner
        self.chunk, self.vocab = chunk, model.vocab
        self._metrics = EngineMetrics()
        self._delivery = Delivery(self._finish, self._metrics)
        self._max_prefill_tokens, self._seed = max(budget, chunk), seed
        self._queue = RequestQueue(queue, queue_tokens)
        self._max_prefills, widths = 1 if max_per_owner is None else 2, padded_widths(chunk)
        if prefix_cache is not None:
            check_prefixes(prefix_cache, model, max_len, chunk)  # before minutes of compilation
        sizes = (max_batch,) if fixed_batch else batch_sizes(max_batch)
        self._programs = Programs(model, sizes, max_len, widths, self._max_prefills + 1, progress)
        self._running = RunningBatch(self._programs, model.vocab)
        self._store: PrefixStore | None = None
        if prefix_cache is not None:
            self._store = PrefixStore(prefix_cache, model, self._programs, chunk, seed)
        self._compiled = compilations()["all"]
        self.bytes = {
            "weights": bytes_per_device(model.weights),
            "sequences": self._programs.bytes,
            "prefixes": 0 if self._store is None else self._store.bytes,
        }
        self._prefills: deque[ActivePrefill] = deque()  # of different owners, who take turns
        self._in_flight: deque[InFlightStep] = deque()
        self._prefilled: deque[jax.Array] = deque()  # logits of the last dispatched prefills
        self._unfinished: dict[RequestHandle, None] = {}  # waiting or running
        self._changed, self._thread = threading.Condition(), None
        self._stopping, self.failure = False, ""
        self._watch = StepWatch(step_seconds)

    @property
    def healthy(self) -> bool:
        """Whether the engine accepts requests: no step has failed or takes too long."""
        return not (self.failure or self._stopping or self._watch.stalled)

    @property
    def compilations(self) -> int:
        """Programs compiled by the engine at its creation and by the process since then."""
        return self._programs.num_compiled + compilations()["all"] - self._compiled

    @property
    def started(self) -> bool:
        """Whether a thread of the engine runs its steps."""
        return self._thread is not None

    @property
    def running(self) -> int:
        """Requests in prefill or decode."""
        return len(self._running.running) + len(self._prefills)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def submit(self, request: Request, listener: Listener) -> RequestHandle:
        """Queue a request; from any thread.

        Raises UserError for a request that exceeds max_len or the vocabulary, Overloaded if the
        queue is full.
        """
        check_request(request, self.max_len, self.vocab)
        with self._changed:
            if not self.healthy:
                why = self.failure or self._watch.stalled or "it is stopping"
                raise Overloaded(f"the engine does not answer: {why.splitlines()[-1]}", 60.0)
            free = self.max_batch - self.running  # requests that take a free entry do not wait
            if self._queue.is_full(len(request.tokens), free):
                waiting = self._queue.tokens
                seconds = self._metrics.estimate_wait(waiting, self.max_batch)
                message = f"{len(self._queue)} requests with {waiting} tokens wait"
                raise Overloaded(message, seconds)
            handle = RequestHandle(request, listener, time.monotonic())
            self._queue.put(handle)
            self._unfinished[handle] = None
            self._changed.notify()
        return handle

    def cancel(self, handle: RequestHandle) -> None:
        """Cancel a request, waiting or running; from any thread, also repeatedly."""
        with self._changed:
            handle.cancelled = True
            self._changed.notify()

    def metrics(self) -> dict[str, Any]:
        """Counters and current state by name; from any thread."""
        store = self._store
        return {
            "running": self.running,
            "waiting": self.waiting,
            "waiting_tokens": self._queue.tokens,
            "batch_size": self._running.size,
            "cache_usage": len(self._running.running) / self.max_batch,
            "compilations": self.compilations,
            **self._metrics.export(),
            **{f"bytes_of_{use}": count for use, count in self.bytes.items()},
            **(prefix_metrics(None) if store is None else store.metrics()),
        }

    def reset_prefix_cache(self) -> bool:
        """Remove all cached prefixes; returns False, and does nothing, if one is in use.

        Call it from a listener, or while no thread of the engine runs: otherwise it raises
        RuntimeError, because that thread might be in the middle of a step.
        """
        if self._thread not in (None, threading.current_thread()):
            raise RuntimeError("the engine's own thread uses its prefixes; call this before start")
        return self._store is None or self._store.reset()

    def start(self) -> None:
        """Run steps in a thread until `stop`. Raises RuntimeError the second time."""
        if self.started or self._stopping:
            raise RuntimeError("an engine starts once; make another one")
        self._thread = threading.Thread(target=self._run, name="jaxkv-engine", daemon=True)
        self._thread.start()

    def stop(self, seconds: float | None = None) -> bool:
        """Cancel all requests, end the thread and write the prefixes that wait for the disk.

        Returns whether the thread has ended. seconds: to wait for a running step and for the disk;
        None for as long as they take.
        Raises RuntimeError in a listener: the thread cannot wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("a listener cannot stop the engine that calls it; let another do so")
        until = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            self._stopping = True
            self._changed.notify()
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        ended = thread is None or not thread.is_alive()
        if ended:
            self._thread = None
        self._finish_all("cancelled")
        if ended and self._store is not None:
            seconds_left = None if until is None else max(0.0, until - time.monotonic())
            self._store.disk.close(seconds_left, keep=not self.failure)
        return ended

    def _run(self) -> None:
        while True:
            with self._changed:
                seconds = None if self._store is None else self._store.disk.idle_seconds
                self._changed.wait_for(lambda: self._stopping or self._has_work(), seconds)
                if self._stopping:
                    return
            try:
                self.step()
            except memory.OutOfMemory as error:
                LOG.critical("the engine failed, and answers no more requests: %s", error)
                return
            except Exception:
                LOG.critical("the engine failed, and answers no more requests", exc_info=True)
                return

    def _has_work(self) -> bool:
        return bool(self._queue or self._in_flight or self.running)

    def step(self) -> bool:
        """Run one step; returns whether there was anything to do."""
        with self._changed:
            busy = self._has_work()
        try:
            with (
                self._watch,
                memory.explained(self._memory_uses, SMALLER),
            ):
                if busy:
                    self._step()
                if self._store is not None:
                    self._store.disk.write()
        except Exception as error:
            self.failure = traceback.format_exc()
            out_of_memory = isinstance(error, memory.OutOfMemory)
            last = "the device is out of memory" if out_of_memory else self.failure.splitlines()[-1]
            self._finish_all("error", last)
            raise
        return busy

    def _memory_uses(self) -> list[memory.MemoryUse]:
        advice = MEMORY_ADVICE.items()
        return [memory.MemoryUse(name, self.bytes[name], text) for name, text in advice]

    def _step(self) -> None:
        self._finish_cancelled()
        self._running.shrink(joining=len(self._prefills))
        old = len(self._in_flight)
        self._metrics.add_step(self._dispatch_decode() + self._dispatch_prefill())
        new = len(self._in_flight) > old
        for _ in range(old if new else len(self._in_flight)):
            step = self._in_flight.popleft()
            arrival = self._delivery.deliver(step)
            if step.work is not None:
                self._pace.delivered(step.work, arrival)

    def _finish_cancelled(self) -> None:
        """Finish all cancelled requests."""
        with self._changed:
            gone = self._queue.drop_cancelled()
        running = [*self._running.running, *(prefill.handle for prefill in self._prefills)]
        for handle in [*gone, *running]:
            if handle.cancelled and not handle.finished:
                self._finish(handle, "cancelled")

    def _dispatch_decode(self) -> int:
        """Dispatch one token of every running request that wants more; returns their number."""
        step = self._running.decode(self._in_flight)
        for handle in self._running.running:
            if handle.failure:
                self._finish(handle, "refused", handle.failure)
        if step is None:
            return 0
        follows = any(last.work is not None for last in self._in_flight)
        work = self._pace.dispatched(self._running.step, follows)
        self._in_flight.append(step._replace(work=work))
        return len(step.handles)

    def _dispatch_prefill(self) -> int:
        """Dispatch one step's prefill work, of two owners in turn; returns the tokens that it ends.

        The work pauses where the running answers would wait for too long.
        """
        if len(self._prefilled) == PREFILLS_AHEAD:
            jax.block_until_ready(self._prefilled.popleft())
        budget, tokens = self._max_prefill_tokens, 0
        self._begin_pace()
        while budget > 0:
            self._take_request()
            if not self._prefills:
                break
            if not self._pace.limited:  # an answer may have begun in this step
                self._begin_pace()
            prefill = self._prefills[0]
            if not prefill.is_complete:
                width = self._programs.padded(prefill.next_size(self.chunk))
                if tokens and width > budget:
                    break
                if not (self._start(prefill) and self._run_chunk(prefill, width)):
                    break
                tokens += self._end_chunk(prefill)
                budget -= width
                logits = prefill.state.logits
            if prefill.is_complete:
                generates = prefill.handle.request.max_new_tokens > 0
                if generates and not self._pace.take(Piece("insertion", self._running.size)):
                    break
                self._prefills.remove(prefill)
                self._release(prefill.lease)
                self._insert(prefill.handle, prefill.state)
                budget -= PROMPT_COST
        if tokens:
            self._prefilled.append(logits)
        return tokens

    def _begin_pace(self) -> None:
        with self._changed:
            waiting = len(self._queue)
        # Only prompts for which the batch has room.
        prompts = len(self._prefills) + min(waiting, self.max_batch - self.running)
        self._pace.begin(self._running.waiting_step, len(self._running.running), prompts)

    def _take_request(self) -> None:
        """Take the next request of an owner who has none in prefill, if an entry is free."""
        if len(self._prefills) == self._max_prefills or self.running == self.max_batch:
            return
        started = [prefill.handle.request.owner for prefill in self._prefills]
        owners = Counter([*started, *(handle.request.owner for handle in self._running.running)])
        blocked = [owner for owner, count in owners.items() if count >= self.max_per_owner]
        blocked += started
        with self._changed:
            if (handle := self._queue.take(blocked)) is None:
                return
        handle.queue_seconds = time.monotonic() - handle.arrival
        lease = None
        if self._store is not None and not handle.request.echo:  # an echo scores the whole prompt
            lease = self._store.find(handle.request)
        handle.cached = 0 if lease is None else lease.start
        self._prefills.append(ActivePrefill(handle, lease, handle.cached))

    def _start(self, prefill: ActivePrefill) -> bool:
        """Make the state of a prompt, or load its cached prefix; returns whether it has one."""
        if prefill.state is None and self._pace.take(LOADING if prefill.position else CREATION):
            if prefill.position:
                prefill.state = self._store.load(prefill.lease)
            else:
                seed = policy_seed(self._seed, prefill.handle.request.salt)
                prefill.state = self._programs.init_prefill(seed)
        return prefill.state is not None

    def _run_chunk(self, prefill: ActivePrefill, width: int) -> bool:
        """Dispatch as many layers of a chunk as there is time for; returns whether it is done."""
        if prefill.chunk is None:
            request, start = prefill.handle.request, prefill.position
            count = prefill.next_size(self.chunk)
            padded = np.zeros((1, width), np.int32)
            padded[0, :count] = request.tokens[start : start + count]
            prefill.chunk = self._programs.prefill(
                request.echo, prefill.state, padded, start, count
            )
        chunk = prefill.chunk
        if chunk.layers_left:
            chunk.run(self._pace.take(Piece("layer", width), chunk.layers_left))
        if chunk.layers_left:
            return False
        # The scores of all tokens take as long as several layers.
        return not prefill.handle.request.echo or self._pace.take(Piece("scores", width)) > 0

    def _end_chunk(self, prefill: ActivePrefill) -> int:
        """End a chunk, after which the other owner's prompt continues; returns its tokens."""
        handle, start, count = prefill.handle, prefill.position, prefill.chunk.count
        prefill.state, output = prefill.chunk.end()
        prefill.chunk, prefill.position = None, start + count
        if handle.request.echo:
            self._in_flight.append(InFlightStep(output, [(n, handle) for n in range(count)], start))
        handle.computed += count
        if prefill.lease is not None:
            self._store.save(prefill.lease, prefill.state, prefill.position)
        if not prefill.is_complete:
            self._prefills.rotate(-1)
        return count

    def _insert(self, handle: RequestHandle, state: PrefillState) -> None:
        """Move a finished prefill into the decode batch."""
        request = handle.request
        if request.max_new_tokens == 0:
            output = StepOutput(*(np.zeros(1, "i4"),) * 4, finite=np.ones(1, bool))
            self._in_flight.append(InFlightStep(output, [(0, handle)]))
            return
        self._in_flight.append(self._running.insert(handle, state))

    def _finish(self, handle: RequestHandle, reason: str, error: str = "") -> None:
        """Free a request's resources and report its outcome, once."""
        if handle.finished:
            return
        handle.finished = True
        try:
            with self._changed:
                self._unfinished.pop(handle, None)
            self._running.remove(handle)
            for prefill in [prefill for prefill in self._prefills if prefill.handle is handle]:
                self._prefills.remove(prefill)
                self._release(prefill.lease)
        finally:  # also if the prefix store is broken, because someone waits for the answer
            outcome = handle.outcome(reason, error)
            self._metrics.add(outcome)
            self._delivery.call(handle, "done", outcome)

    def _release(self, lease: Lease | None) -> None:
        if lease is not None:
            self._store.release(lease)

    def _finish_all(self, reason: str, error: str = "") -> None:
        with self._changed:
            unfinished = list(self._unfinished)
            self._queue.clear()
        self._in_flight.clear()
        for handle in unfinished:
            try:
                self._finish(handle, reason, error)
            except Exception:  # a second failure must not leave the others without an end
                LOG.exception("freeing the memory of a request failed")


class Collected:
    """A listener that stores a whole answer. finished: set at its end."""

    def __init__(self) -> None:
        self.echoed: list[ScoredToken] = []
        self.scored: list[ScoredToken] = []
        self.outcome: Outcome | None = None
        self.finished = threading.Event()

    @property
    def tokens(self) -> list[int]:
        """The new tokens."""
        return [scored.token for scored in self.scored]

    def prompt(self, scored: list[ScoredToken]) -> None:
        self.echoed = list(scored)

    def token(self, scored: ScoredToken) -> bool:
        self.scored.append(scored)
        return False

    def done(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.finished.set()


def answer(engine: Engine, requests: Iterable[Request]) -> list[Collected]:
    """Answer all requests, as many at once as the engine's queue takes.

    Steps the engine itself if it has no thread. Raises the errors of `Engine.submit` except a full
    queue, and then cancels the requests submitted before.
    """
    collected, handles = [], []
    try:
        for request in requests:
            collected.append(Collected())
            handles.append(_submit(engine, request, collected[-1]))
    except BaseException:
        for handle in handles:
            engine.cancel(handle)
        raise
    while not all(entry.finished.is_set() for entry in collected):
        _advance(engine)
    return collected


def _submit(engine: Engine, request: Request, listener: Collected) -> RequestHandle:
    while True:
        try:
            return engine.submit(request, listener)
        except Overloaded:
            if not engine.healthy:
                raise
            _advance(engine)


def _advance(engine: Engine) -> None:
    if engine.started:
        time.sleep(0.001)
    else:
        engine.step()
