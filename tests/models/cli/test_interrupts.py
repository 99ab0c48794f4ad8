"""Ctrl-C ends what waits for input, also if it comes just before the wait."""

from __future__ import annotations

import ctypes
import signal
import threading
import time

import pytest

from jaxkv.cli.interrupts import on_interrupt, send_again, stop

pytestmark = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals as on POSIX")


def wait_for_input(seconds: float) -> None:
    """Wait in C, where no handler of Python runs, until a signal or the end of the time."""
    ctypes.CDLL(None, use_errno=True).poll(None, 0, int(1000 * seconds))


@pytest.fixture
def missed():
    """Sends a Ctrl-C that does not end the main thread's wait: another thread receives it."""
    over = threading.Event()
    waiter = threading.Thread(target=over.wait)
    waiter.start()
    yield lambda: signal.pthread_kill(waiter.ident, signal.SIGINT)
    over.set()
    waiter.join()


def pressed_during_a_wait(missed, seconds: float) -> float:
    """Seconds until KeyboardInterrupt."""
    presses = threading.Timer(0.2, missed)
    presses.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), on_interrupt(stop), send_again():
        wait_for_input(seconds)
        raise AssertionError("the wait ended, and no handler ran")
    presses.join()
    return time.monotonic() - start


def test_a_missed_ctrl_c_is_sent_again(missed):
    threads = threading.active_count()
    for _ in range(2):
        assert pressed_during_a_wait(missed, 20) < 10
    assert threading.active_count() == threads and signal.set_wakeup_fd(-1) == -1


def test_the_control_waits_to_the_end(missed):
    """Without sending again, the wait lasts to its end."""
    presses, start = threading.Timer(0.2, missed), time.monotonic()
    presses.start()
    with pytest.raises(KeyboardInterrupt), on_interrupt(stop):
        wait_for_input(1.5)
    assert time.monotonic() - start > 1.4


def test_a_ctrl_c_that_was_handled_is_not_sent_again():
    calls = []
    with on_interrupt(lambda: calls.append("outer")):
        with pytest.raises(KeyboardInterrupt), on_interrupt(stop), send_again(0.05):
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.3)
    assert not calls
