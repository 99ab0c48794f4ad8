"""Ctrl-C ends a command with exit code 130 and preserves the results so far.

An exception that is raised during an import, inside jax or in a destructor may be lost or break
that code. So Ctrl-C calls a function instead, which each stage of a command chooses.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

INTERRUPTED = 130


@contextlib.contextmanager
def on_interrupt(
    act: Callable[[], object], number: signal.Signals = signal.SIGINT
) -> Iterator[None]:
    """Inside, Ctrl-C (or another signal) calls `act` once; the earlier handler is then restored."""
    before = signal.getsignal(number)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or before in (signal.SIG_IGN, None):
        yield
        return

    def handle(*_: object) -> None:
        signal.signal(number, before)
        act()

    signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, before)


def leave() -> None:
    """Exit at once, while there are no results yet."""
    if sys.stderr.isatty():
        os.write(2, b"\r\x1b[K")  # erase the progress line
    os._exit(INTERRUPTED)


def ignore_interrupts() -> None:
    """Ignore Ctrl-C while Python exits, so that it does not change the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def stop() -> None:
    """Raise KeyboardInterrupt."""
    raise KeyboardInterrupt
