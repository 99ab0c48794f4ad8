"""Continuous batching: answers that share slots and know nothing of each other.

A turn of the engine lets all rows write one token, then reads some prompt tokens of the oldest who
wait. What a turn has sent to the device is told a turn later, so that the device need not wait for
the host: an answer that ends by its tokens has then written one more, which is dropped.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from typing import Any

import jax
import numpy as np

from jaxkv.engine.figures import Figures, of_prefixes
from jaxkv.engine.programs import Lane, Model, Programs, Told, compilations
from jaxkv.engine.queue import Queue
from jaxkv.engine.request import Listener, Outcome, Overloaded, Request, Scored
from jaxkv.engine.store import Hit, Prefixes, Store, store_of
from jaxkv.engine.ticket import Flight, Reading, Ticket, asked_of, check, salt_of, scored_of, widths
from jaxkv.errors import whole
from jaxkv.prefix.counts import Counts

LONGEST = 4096  # tokens of a chunk: a prompt's last piece may be padded to nearly a whole one
SMALL = 32  # tokens: what a prompt costs besides its own, so that many small ones are no free ride
LOG = logging.getLogger(__name__)


class Engine:
    """Slots that write, a lane that reads, and a queue.

    model: what runs. slots: rows that write at once. room: tokens of a row, prompt and answer; only
    where a policy grows do they take memory. chunk: tokens of a prompt read at a
    time, the grid on which prefixes can be taken up. turn: prompt tokens read in a turn, at least
    a chunk. queue, queue_tokens: how many requests and tokens of prompts may wait.
    prefixes: what is kept of prompts that were read, None for nothing. seed: of what policies draw,
    which is the same for all requests of one salt.
    Raises UserError for settings that are no whole numbers or do not fit into memory.
    """

    def __init__(
        self,
        model: Model,
        slots: int = 16,
        room: int = 4096,
        chunk: int = 128,
        turn: int = 512,
        queue: int = 256,
        queue_tokens: int = 2**20,
        prefixes: Prefixes | None = None,
        seed: int = 0,
    ) -> None:
        for name, value in (("slots", slots), ("room", room), ("turn", turn), ("queue", queue),
                            ("queue_tokens", queue_tokens)):  # fmt: skip
            whole(name, value, most=2**31 - 1)
        whole("chunk", chunk, most=LONGEST)
        whole("seed", seed, 0, 2**32 - 1)
        self.slots, self.room, self.chunk, self.vocab = slots, room, chunk, model.vocab
        self._counts = Figures()
        self._turn, self._seed = max(turn, chunk), seed
        self._queue = Queue(queue, queue_tokens)
        self._programs = Programs(model, slots, room, widths(chunk))
        self._slots = self._programs.empty()
        self._store: Store | None = None
        if prefixes is not None:
            self._store = store_of(prefixes, model, self._programs, chunk, seed)
        self._compiled = compilations()["all"]
        self.bytes_of_prefixes = 0 if self._store is None else self._store.bytes
        self._owners: list[Ticket | None] = [None] * slots
        self._reading: Reading | None = None
        self._flights: deque[Flight] = deque()
        self._live: dict[Ticket, None] = {}  # all that are not over, wherever they are
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.failure = ""

    @property
    def healthy(self) -> bool:
        """Whether it answers."""
        return not self.failure and not self._stopping

    @property
    def compilations(self) -> int:
        """Programs it was made with, and whatever the process compiled since: nothing, of ours."""
        return self._programs.made + compilations()["all"] - self._compiled

    @property
    def started(self) -> bool:
        """Whether it takes turns by itself."""
        return self._thread is not None

    @property
    def running(self) -> int:
        """Answers that are being read for or written."""
        return sum(owner is not None for owner in self._owners) + (self._reading is not None)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Put a request into the queue; from any thread.

        Raises UserError for what no slot can hold, Overloaded where the queue is full.
        """
        check(request, self.room, self.vocab)
        with self._news:
            if not self.healthy:
                why = self.failure.splitlines()[-1] if self.failure else "it stops"
                raise Overloaded(f"the engine does not answer: {why}", 60.0)
            free = self.slots - self.running  # those who will take one do not wait
            if self._queue.is_full(len(request.tokens), free):
                waiting = self._queue.tokens
                raise Overloaded(
                    f"{len(self._queue)} requests with {waiting} tokens wait",
                    self._counts.seconds_for(waiting, self.slots),
                )
            ticket = Ticket(request, listener, time.monotonic())
            self._queue.put(ticket)
            self._live[ticket] = None
            self._news.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End an answer, whoever has it; from any thread, as often as one likes."""
        with self._news:
            ticket.cancelled = True
            self._news.notify()

    def figures(self) -> dict[str, Any]:
        """What was counted so far, and how things stand; from any thread."""
        store = self._store
        return {
            "running": self.running, "waiting": self.waiting,
            "waiting_tokens": self._queue.tokens,
            "cache_usage": sum(owner is not None for owner in self._owners) / self.slots,
            "compilations": self.compilations, **self._counts.told(),
            **(of_prefixes(Counts()) if store is None else store.figures()),
        }  # fmt: skip

    def forget(self) -> bool:
        """Drop all prefixes that are kept; False, and nothing is done, while one is in use.

        Call it from a listener, or while the engine takes no turns by itself: it raises
        RuntimeError where a thread of the engine's own might be in the middle of one.
        """
        self._check_turn()
        return self._store is None or self._store.reset()

    def pin(self, tokens: tuple[int, ...], salt: str | None = None) -> Hit | None:
        """Keep what there is of a prompt from being evicted, until `unpin`; its `at` is how much.

        None where no prefixes are kept. Call it as `forget`, which does nothing meanwhile.
        """
        self._check_turn()
        return None if self._store is None else self._store.pin(tokens, salt)

    def unpin(self, hit: Hit | None) -> None:
        """Let go of what `pin` keeps, called as it. Raises RuntimeError the second time."""
        self._check_turn()
        self._release(hit)

    def _check_turn(self) -> None:
        if self._thread not in (None, threading.current_thread()):
            raise RuntimeError("the engine's own thread uses its prefixes; call this before start")

    def start(self) -> None:
        """Take turns in a thread of its own until `stop`. Raises RuntimeError the second time."""
        if self.started or self._stopping:
            raise RuntimeError("an engine starts once; make another one")
        self._thread = threading.Thread(target=self._run, name="jaxkv-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End everything that is on its way as cancelled, and the thread.

        Raises RuntimeError where a listener calls it: the thread cannot wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("a listener cannot stop the engine that calls it; let another do so")
        with self._news:
            self._stopping = True
            self._news.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._give_up("cancelled")

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._stopping or self._busy())
                if self._stopping:
                    return
            self.step()

    def _busy(self) -> bool:
        return bool(self._queue or self._flights or self._reading or any(self._owners))

    def step(self) -> bool:
        """Take a turn; whether there was anything to do."""
        if not self._busy():
            return False
        try:
            self._leave()
            old = len(self._flights)
            self._counts.turn(self._write() + self._read())
            new = len(self._flights) > old
            for _ in range(old if new else len(self._flights)):
                self._tell(self._flights.popleft())
        except Exception:
            self.failure = traceback.format_exc()
            self._give_up("error", self.failure.splitlines()[-1])
            raise
        return True

    def _leave(self) -> None:
        """Whoever cancelled is out."""
        with self._news:
            gone = self._queue.drop_cancelled()
        for ticket in [*gone, *self._owners, self._reading and self._reading.ticket]:
            if ticket is not None and ticket.cancelled and not ticket.over:
                self._end(ticket, "cancelled")

    def _write(self) -> int:
        """Send one token of every row that has one more to come; how many."""
        rows = [
            (slot, owner) for slot, owner in enumerate(self._owners)
            if owner is not None and owner.sent < owner.request.max_new_tokens
        ]  # fmt: skip
        if not rows:
            return 0
        active = np.zeros(self.slots, bool)
        active[[slot for slot, _ in rows]] = True
        scored = any(owner.request.logprobs is not None for _, owner in rows)
        self._slots, told = self._programs.decode(
            self._programs.weights, self._slots, active, np.bool_(scored)
        )
        for _, owner in rows:
            owner.sent += 1
        self._flights.append(Flight(told, rows))
        return len(rows)

    def _read(self) -> int:
        """Send a turn's worth of prompt tokens, of the oldest first; how many."""
        if self._reading is not None:
            # Not further ahead of the device than a turn, or nobody could be cancelled.
            jax.block_until_ready(self._reading.lane.logits)
        left, tokens = self._turn, 0
        while left > 0 and (self._reading is not None or self._begin()):
            count, cost = self._read_chunk(self._reading)
            tokens += count
            left -= cost
        return tokens

    def _begin(self) -> bool:
        """Take up the oldest who waits, where a slot is free."""
        free = next((slot for slot, owner in enumerate(self._owners) if owner is None), None)
        with self._news:
            if free is None or not self._queue:
                return False
            ticket = self._queue.take()
        request = ticket.request
        ticket.slot, ticket.begun = free, time.monotonic() - ticket.came
        salt = salt_of(self._seed, request.salt)
        hit = None
        if self._store is not None and not request.echo:  # which is scored from the beginning
            hit = self._store.find(request.tokens, request.salt)
        ticket.cached = 0 if hit is None else hit.at
        lane = self._store.load(hit) if ticket.cached else self._programs.begin(salt)
        self._reading = Reading(ticket, lane, ticket.cached, hit)
        return True

    def _read_chunk(self, reading: Reading) -> tuple[int, int]:
        """The next piece of a prompt, up to the grid; its tokens, and those it takes as long as."""
        ticket, at = reading.ticket, reading.at
        tokens, echo = ticket.request.tokens, ticket.request.echo
        count = min(self.chunk, len(tokens) - at)
        width = next(width for width in self._programs.chunks if count <= width)
        padded = np.zeros((1, width), np.int32)
        padded[0, :count] = tokens[at : at + count]
        lane, told = self._programs.reads[width, echo](
            self._programs.weights, reading.lane, padded, np.uint32(at), np.int32(count)
        )
        if echo:
            self._flights.append(Flight(told, [(n, ticket) for n in range(count)], at))
        at += count
        ticket.read += count
        if reading.hit is not None:
            self._store.save(reading.hit, lane, at)
        if at < len(tokens):
            self._reading = Reading(ticket, lane, at, reading.hit)
            return count, width
        self._reading = None
        self._release(reading.hit)
        self._place(ticket, lane)
        return count, width + SMALL

    def _place(self, ticket: Ticket, lane: Lane) -> None:
        request = ticket.request
        if request.max_new_tokens == 0:
            told = Told(*(np.zeros(1, "i4"),) * 4, sound=np.ones(1, bool))
            self._flights.append(Flight(told, [(0, ticket)]))
            return
        self._slots, told = self._programs.place(
            self._slots, np.int32(ticket.slot), lane, asked_of(request, self.vocab)
        )
        self._owners[ticket.slot] = ticket
        ticket.sent = 1
        self._flights.append(Flight(told, [(0, ticket)]))

    def _tell(self, flight: Flight) -> None:
        """What has come from the device, to those who asked for it."""
        told = Told(*map(np.asarray, flight.told))
        now = time.monotonic()
        for row, ticket in flight.tickets:
            if ticket.over:
                continue
            if not told.sound[row]:
                self._end(ticket, "error", "the model gives logits that are not finite numbers")
            elif ticket.request.max_new_tokens == 0 and flight.prompt is None:
                self._tell_prompt(ticket)
                self._end(ticket, "length")
            else:
                scored = scored_of(ticket.request, told, row)
                if flight.prompt is not None:
                    first = flight.prompt + row == 0
                    ticket.scored.append(Scored(scored.token) if first else scored)
                else:
                    self._tell_token(ticket, scored, now)

    def _tell_token(self, ticket: Ticket, scored: Scored, now: float) -> None:
        request = ticket.request
        ticket.new += 1
        self._counts.written += 1
        if ticket.first is None:
            ticket.first = now - ticket.came
            self._tell_prompt(ticket)
            if ticket.over:
                return
        stop = self._call(ticket, "token", scored)
        if ticket.over:
            return
        if scored.token in request.eos:
            self._end(ticket, "eos")
        elif stop:
            self._end(ticket, "stop")
        elif ticket.new == request.max_new_tokens:
            self._end(ticket, "length")

    def _tell_prompt(self, ticket: Ticket) -> None:
        if ticket.request.echo:
            self._call(ticket, "prompt", ticket.scored)

    def _call(self, ticket: Ticket, name: str, what: Any) -> bool:
        """Whether a listener says to stop; one that fails loses its answer and no other."""
        try:
            return bool(getattr(ticket.listener, name)(what))
        except Exception:
            LOG.exception("a listener failed")
            self._end(ticket, "error", traceback.format_exc().splitlines()[-1])
            return False

    def _end(self, ticket: Ticket, reason: str, error: str = "") -> None:
        """Free what an answer holds and tell that it is over, once."""
        if ticket.over:
            return
        ticket.over = True
        with self._news:
            self._live.pop(ticket, None)
        if self._reading is not None and self._reading.ticket is ticket:
            self._release(self._reading.hit)
            self._reading = None
        if ticket.slot is not None and self._owners[ticket.slot] is ticket:
            self._owners[ticket.slot] = None
        outcome = Outcome(
            reason, len(ticket.request.tokens), ticket.cached, ticket.new, ticket.begun,
            ticket.first, time.monotonic() - ticket.came, ticket.read, error,
        )  # fmt: skip
        self._counts.add(outcome)
        self._call(ticket, "done", outcome)

    def _release(self, hit: Hit | None) -> None:
        if hit is not None:
            self._store.release(hit)

    def _give_up(self, reason: str, error: str = "") -> None:
        with self._news:
            live = list(self._live)
            self._queue.clear()
        self._flights.clear()
        for ticket in live:
            self._end(ticket, reason, error)
