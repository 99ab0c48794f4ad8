"""How much of a prompt is prefilled between two tokens of the running answers."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from jaxkv.errors import check_positive

KEPT = 0.7  # of an estimate, when a new measurement comes
SHORTEST = 1e-6  # seconds of a piece


class Piece(NamedTuple):
    """A kind of work. name: of what one program does. size: of its chunk or batch."""

    name: str
    size: int


class StepWork(NamedTuple):
    """What the device does for one token of the running answers.

    step: the token itself. pieces: of prefills, between the last token and this one. follows:
    whether the last token was still awaited, so that the device was busy since then.
    """

    step: Piece
    pieces: Counter[Piece]
    follows: bool


class PrefillPace:
    """Divides prefills so that running answers wait at most `seconds` for them, or for one piece.

    A piece is one program, such as a layer of a chunk, so a prefill has the same bits however it is
    divided. The seconds of each piece are estimated from the times at which tokens come. So no
    measurement makes the device wait. seconds: None for no limit. Raises UserError unless it is a
    number above 0.
    """

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None:
            check_positive("max_stall", seconds, "give seconds, or None for no limit")
        self._limit = seconds
        self._seconds: dict[Piece, float] = {}  # estimates
        self._largest: Counter[Piece] = Counter()  # counts that one step took
        self._pieces: Counter[Piece] = Counter()  # since the last token
        self._left: float | None = None  # seconds of this step; None for no limit
        self._first = True  # whether this step takes its next piece however long that takes
        self._last = -math.inf

    def begin(self, waiting: Piece | None) -> None:
        """Begin the prefills of a step. waiting: the step of the answers that wait; None if none.

        The first steps of a batch size have no prefills, because its own time must be known.
        """
        self._left = None if waiting is None else self._limit
        self._first = self._left is None or waiting in self._seconds
        if not self._first:
            self._left = 0.0

    def take(self, piece: Piece, count: int = 1) -> int:
        """How many of `count` equal pieces fit into this step; its first piece always does."""
        if self._left is not None:
            seconds = self._seconds.get(piece, self._left)
            fitting = 0
            if piece in self._seconds:
                # A wrong estimate must not become one long wait.
                most = 2 * self._largest[piece] - self._pieces[piece]
                fitting = min(int(self._left / max(seconds, SHORTEST)), most)
            count = min(count, max(fitting, int(self._first)))
            self._left = max(0.0, self._left - count * seconds)
            self._first &= count == 0
        if count:
            self._pieces[piece] += count
            self._largest[piece] = max(self._largest[piece], self._pieces[piece])
        return count

    def dispatched(self, step: Piece, follows: bool) -> StepWork:
        """The work for the token that is dispatched now."""
        work, self._pieces = StepWork(step, self._pieces, follows), Counter()
        return work

    def delivered(self, work: StepWork, now: float) -> None:
        """Learn from the time at which a token came."""
        elapsed, self._last = now - self._last, now
        if not work.follows:
            return
        unknown = [piece for piece in work.pieces if piece not in self._seconds]
        if not work.pieces:
            self._learn(work.step, elapsed)
        elif work.step in self._seconds and len(unknown or work.pieces) == 1:
            (piece,) = unknown or work.pieces
            others = sum(n * self._seconds[p] for p, n in work.pieces.items() if p != piece)
            rest = elapsed - self._seconds[work.step] - others
            self._learn(piece, max(0.0, rest) / work.pieces[piece])

    def _learn(self, piece: Piece, seconds: float) -> None:
        old = self._seconds.get(piece, seconds)
        self._seconds[piece] = KEPT * old + (1 - KEPT) * seconds
