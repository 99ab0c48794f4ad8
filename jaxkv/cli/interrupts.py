"""Ctrl-C, which ends a command with exit code 130 and keeps what was made so far.

An exception that strikes in the middle of an import, of jax or of a destructor is lost there or
does harm; so Ctrl-C calls a function instead, which each stage of a command chooses.
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
    """Inside, Ctrl-C, or another signal, calls `act`; a second one does what it did before."""
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
    """End at once, while there is nothing to keep yet."""
    if sys.stderr.isatty():
        os.write(2, b"\r\x1b[K")  # the progress
    os._exit(INTERRUPTED)


def close_ears() -> None:
    """Nothing is left to interrupt: Python takes itself down, and keeps the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def stop() -> None:
    raise KeyboardInterrupt
