"""Progress of long work on standard error: the fraction done, the rate, and the time left."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

DELAY = 0.5  # seconds before the first display
REDRAW, REPEAT = 0.2, 5.0  # seconds between redraws in a terminal, between lines elsewhere
SILENCE = 15.0  # seconds without a line, after which one is printed elsewhere; then twice as many


def say(text: str) -> None:
    """Print lines to standard error."""
    for line in text.splitlines():
        print(f"jaxkv: {line}", file=sys.stderr, flush=True)


class Progress:
    """One line that is redrawn in a terminal and erased at the end.

    Elsewhere it prints a line every five seconds if the total is known, and one after 15, 45, 105
    seconds and so on without a line: compiling reports nothing for minutes. steady: units
    take about equal times, so a rate and the time left are shown; else the count and the time.
    logged: elsewhere it also prints a line at the first report.
    """

    def __init__(
        self,
        label: str,
        total: int | None = None,
        unit: str = "tokens",
        steady: bool = True,
        logged: bool = False,
    ):
        self._label, self._total, self._unit, self.done = label, total, unit, 0
        self._steady, self._logged = steady, logged
        self._begun = self._printed = time.monotonic()
        self._first: tuple[float, int] | None = None
        self._terminal = sys.stderr.isatty()
        self._over = threading.Event()
        work = self._redraw if self._terminal else self._break_silence
        self._thread = threading.Thread(target=work, daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def at(self, done: int, total: int | None = None) -> None:
        """Report how much is done."""
        self.done, self._total = done, total or self._total
        now = time.monotonic()
        if self._logged and not (self._terminal or self._first):
            print(f"{self._label} ...", file=sys.stderr, flush=True)
        self._first = self._first or (now, done)
        log = not self._terminal and self._total and done < self._total
        if log and now - self._printed > REPEAT:
            self._printed = now
            print(self._line(), file=sys.stderr, flush=True)

    def _redraw(self) -> None:
        """Redraw in a separate thread: compiling reports nothing for many seconds."""
        if self._over.wait(DELAY):
            return
        while not self._over.wait(REDRAW):
            print(f"\r\x1b[K{self._line()}", end="", file=sys.stderr, flush=True)
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _break_silence(self) -> None:
        seconds = SILENCE
        while not self._over.wait(max(0.0, self._printed + seconds - time.monotonic())):
            if time.monotonic() - self._printed >= seconds:
                self._printed, seconds = time.monotonic(), 2 * seconds
                print(self._line(), file=sys.stderr, flush=True)

    def _line(self) -> str:
        now = time.monotonic()
        # The rate counts from the first report: the time before it is mostly compilation.
        since, before = self._first or (now, 0)
        if self._total and not self._steady:
            done = f"{self.done} of {self._total} {self._unit}"
            return f"{self._label}: {done}, {now - self._begun:.0f} s"
        if self.done == before or not self._total:
            return f"{self._label} ... {now - self._begun:.0f} s"
        rate = (self.done - before) / max(now - since, 1e-9)
        seconds_left = (self._total - self.done) / rate
        return (
            f"{self._label}: {self.done / self._total:.0%}, {_short(rate)} {self._unit}/s, "
            f"{duration(seconds_left)} left"
        )


@contextlib.contextmanager
def show_progress(label: str, total: int, unit: str = "tokens") -> Iterator[Callable[[int], None]]:
    """Inside, the progress of work of `total` units; the function takes the units done."""
    with Progress(label, total, unit) as progress:
        yield progress.at


@contextlib.contextmanager
def show_phases(unit: str) -> Iterator[Callable[[str, int, int], None]]:
    """Inside, the progress of work in phases, each with its own rate.

    The function takes the phase, what is done of it, and all of it.
    """
    with contextlib.ExitStack() as stack:
        shown: dict[str, Progress] = {}

        def at(phase: str, done: int, total: int) -> None:
            if phase not in shown:
                stack.close()  # erases the line of the phase before
                shown[phase] = stack.enter_context(Progress(phase, unit=unit))
            shown[phase].at(done, total)

        yield at


def _short(count: float) -> str:
    """A count with three digits and k, M or G."""
    for unit in ("", "k", "M"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}G"


def duration(seconds: float) -> str:
    """A time in minutes and seconds, or in hours and minutes."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
