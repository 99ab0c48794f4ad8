"""Ctrl-C ends a command with exit code 130 and preserves the results so far.

An exception that is raised during an import, inside jax or in a destructor may be lost or break
that code. So Ctrl-C calls a function instead, which each stage of a command chooses.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

from jaxkv.cli.progress import say

INTERRUPTED = 130
TERMINATED = 143


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


@contextlib.contextmanager
def note_interrupt() -> Iterator[threading.Event]:
    """Inside, Ctrl-C sets the event."""
    pressed = threading.Event()
    with on_interrupt(pressed.set):
        yield pressed


def interrupted(results: str) -> int:
    """Say what a command has done at Ctrl-C; returns its exit code."""
    say(f"interrupted: {results}")
    return INTERRUPTED


@contextlib.contextmanager
def disregard(number: signal.Signals) -> Iterator[None]:
    """Inside, a signal does nothing, unless `on_interrupt` handles it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextlib.contextmanager
def send_again(seconds: float = 0.1) -> Iterator[None]:
    """Inside, a Ctrl-C that did not end the block after some seconds is sent once more.

    A Ctrl-C that comes just before the main thread waits for input does not end that wait, and
    Python runs its handler only after the wait.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not (in_main and hasattr(signal, "pthread_kill")):  # absent on Windows
        yield
        return
    main, over = threading.main_thread().ident, threading.Event()
    # Python writes each signal to `writer`, in the signal handler.
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def resend() -> None:
        while number := reader.recv(1):
            if ord(number) == signal.SIGINT and not over.wait(seconds):
                signal.pthread_kill(main, signal.SIGINT)
                return

    thread = threading.Thread(target=resend, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        writer.close()
        thread.join()
        reader.close()


def terminable() -> contextlib.AbstractContextManager[None]:
    """Inside, SIGTERM ends the process, also the first one of a container.

    The system ends every other process itself, but ignores the signal for the first one unless
    Python handles it.
    """
    if os.getpid() != 1:
        return contextlib.nullcontext()
    return on_interrupt(partial(os._exit, TERMINATED), signal.SIGTERM)


def leave() -> None:
    """Exit at once, while there are no results yet."""
    if sys.stderr.isatty():
        os.write(2, b"\r\x1b[K")  # erase the progress line
    os._exit(INTERRUPTED)


def ignore_interrupts() -> None:
    """Ignore Ctrl-C and SIGTERM while Python exits, so that they do not change the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def stop() -> None:
    """Raise KeyboardInterrupt."""
    raise KeyboardInterrupt
