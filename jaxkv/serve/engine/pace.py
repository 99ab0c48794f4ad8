"""How much of a prompt is prefilled between two tokens of the running answers."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from typing import NamedTuple

from jaxkv.errors import check_positive

SHARE = 1 / 3  # of the time of a token: prefills may take it although it exceeds the limit
MAX_SHARE = 3.0  # of the time of a token: prefills beside several answers take it at most
MAX_TIMES = 5  # of a token alone that are kept; the second shortest is its time: some come late
MIN_TIMES = 3  # of these times, before prefills are taken
REFRESH = 16  # tokens after prefills, after which one comes alone
CHANGE = 2.0  # an estimate grows or shrinks by its square root in one step, at most
SHORTEST = 1e-6  # seconds of a piece


class Piece(NamedTuple):
    """A kind of work. name: of what a program does. size: of its chunk or batch."""

    name: str
    size: int = 0


class StepWork(NamedTuple):
    """What the device does for one token of the running answers.

    step: the token itself. pieces: of prefills, between the last token and this one. follows:
    whether the last token was still awaited, so that the device was busy since then.
    """

    step: Piece
    pieces: Mapping[Piece, int]
    follows: bool


class PrefillPace:
    """Divides prefills, so that running answers wait about `seconds` for them between two tokens.

    A piece is one program, such as a layer of a chunk, so a prefill has the same bits however it is
    divided. The seconds of each piece are estimated from the times at which tokens come. So no
    measurement makes the device wait. Where a token alone takes more than three times `seconds`,
    answers wait a third of that time, because prompts would wait for too long. Where several
    answers run, they wait at least the time of a token, and up to three times that while more
    prompts wait than answers run: a small batch uses the device badly, and its answers delay all
    prompts. A piece of unknown time comes alone. seconds: None for no limit. Raises UserError
    unless it is a number above 0.
    """

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None:
            check_positive("max_stall", seconds, "give seconds, or None for no limit")
        self._limit = seconds
        self._alone: dict[Piece, deque[float]] = {}  # times of tokens without prefills
        self._seconds: dict[Piece, float] = {}  # estimates of the pieces of prefills
        self._largest: Counter[Piece] = Counter()  # counts that a step with a limit took
        self._pieces: Counter[Piece] = Counter()  # since the last token
        self._left: float | None = None  # seconds of this step; None for no limit
        self._first = True  # whether this step takes its next piece however long that takes
        self._last, self._since_alone = -math.inf, 0

    def begin(self, waiting: Piece | None, answers: int, prompts: int) -> None:
        """Begin the prefills of a step.

        waiting: the step of the answers that wait; None if none. answers: that run. prompts: that
        wait or are in prefill. A token comes alone until its time is known, and from time to time
        later.
        """
        if self._limit is None or waiting is None:
            self._left, self._first = None, True
            return
        times = self._alone.get(waiting, ())
        if len(times) < MIN_TIMES or self._since_alone >= REFRESH:
            self._left, self._first = 0.0, False
            return
        share = min(max(prompts / answers, 1.0), MAX_SHARE) if answers > 1 else SHARE
        self._left = max(self._limit, share * sorted(times)[1])
        self._first = True

    @property
    def limited(self) -> bool:
        """Whether this step has a limit."""
        return self._left is not None

    def take(self, piece: Piece, count: int = 1) -> int:
        """How many of `count` equal pieces this step has time for."""
        if self._left is not None:
            seconds = self._seconds.get(piece, math.inf)
            # A wrong estimate must not become one long wait.
            doubled = 2 * self._largest[piece] - self._pieces[piece]
            fitting = min(int(self._left / max(seconds, SHORTEST)), doubled)
            count = min(count, max(fitting, int(self._first)))
            if count:
                self._first = False
                self._left = max(0.0, self._left - count * seconds)
                self._largest[piece] = max(self._largest[piece], self._pieces[piece] + count)
        self._pieces[piece] += count
        return count

    def dispatched(self, step: Piece, follows: bool) -> StepWork:
        """The work for the token that is dispatched now."""
        pieces, self._pieces = +self._pieces, Counter()
        self._since_alone = self._since_alone + 1 if pieces else 0
        return StepWork(step, pieces, follows)

    def delivered(self, work: StepWork, now: float) -> None:
        """Learn from the time at which a token came."""
        elapsed, self._last = now - self._last, now
        if not work.follows:
            return
        times = self._alone.setdefault(work.step, deque(maxlen=MAX_TIMES))
        if not work.pieces:
            times.append(elapsed)
            return
        if len(times) < MIN_TIMES:
            return
        rest = max(0.0, elapsed - sorted(times)[1])
        unknown = [piece for piece in work.pieces if piece not in self._seconds]
        if not unknown:
            expected = sum(self._seconds[piece] * n for piece, n in work.pieces.items())
            factor = rest / max(expected, SHORTEST)
            factor = min(max(factor, 1 / CHANGE), CHANGE) ** 0.5
            for piece in work.pieces:
                self._seconds[piece] = max(self._seconds[piece] * factor, SHORTEST)
        elif len(work.pieces) == 1:
            self._seconds[unknown[0]] = max(rest / work.pieces[unknown[0]], SHORTEST)
