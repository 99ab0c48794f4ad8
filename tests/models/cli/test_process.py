"""Tests in a real process: Ctrl-C, closed streams, and the time of --help."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxkv.cli.interrupts import on_interrupt, send_again, stop

ROOT = Path(__file__).resolve().parents[3]
ENDLESS = ("--max-new-tokens", "1000000000", "--ignore-eos", "--policy", "window:window=16")
pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals as on POSIX")


def start(*words: str, before: Sequence[str] = (), **streams) -> subprocess.Popen:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.Popen(
        [*before, sys.executable, "-m", "jaxkv.cli", *words], cwd=ROOT, **streams
    )


@pytest.mark.parametrize("presses", [1, 4])
def test_ctrl_c_keeps_the_text_so_far(model, presses):
    """Pressed again, also while Python exits, it keeps the exit code."""
    with start("generate", "Hello", "--model", model, *ENDLESS) as process:
        first = process.stdout.read(1)
        for _ in range(presses):
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and first, err
    assert err.count(b"\n") <= 1 and b"Traceback" not in err  # at most the line about speed
    assert presses > 1 or (out.endswith(b"\n") and b"tokens (interrupted)" in err)


def test_ctrl_c_does_not_wait_for_a_program(model, tmp_path):
    """A program takes ten seconds to compile here, in another thread."""
    (tmp_path / "text").write_text("the cat sat on the mat " * 200)
    slow = (
        "import time; from jaxkv.models.loading import compilation as c; import jaxkv.cli as cli; "
        "real = c._threads(); submit = real.submit; "
        "real.submit = lambda f: submit(lambda: (print('slow', flush=True), time.sleep(10), f())); "
        "import sys; sys.exit(cli.program())"
    )
    command = [sys.executable, "-c", slow, "advise", "--model", model, "--text", tmp_path / "text"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, **streams) as process:
        assert process.stdout.readline() == b"slow\n", process.stderr.read()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        pressed = time.monotonic()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and time.monotonic() - pressed < 8, err
    assert b"interrupted: 0 of 7 policies" in err


@pytest.mark.parametrize("stream", [0, 2])
def test_a_closed_stream(model, stream):
    """Without standard error the text is printed; without standard input one line is the error."""
    words = ["generate", "-" if stream == 0 else "Hello", "--model", model]
    with start(*words, before=["sh", "-c", f'exec "$@" {stream}>&-', "sh"]) as process:
        out, err = process.communicate(timeout=60)
    if stream == 0:
        assert (process.returncode, out) == (2, b"") and err.count(b"\n") == 1 and b"closed" in err
    else:
        assert (process.returncode, err) == (0, b"") and out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("word", ["policies", "--help"])
def test_a_full_disk(word):
    with start(word, before=["sh", "-c", 'exec "$@" >/dev/full', "sh"]) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.count(b"\n") == 1 and b"standard output cannot be written" in err


def test_ctrl_c_while_loading(model):
    """Also during an import, where an exception may be lost or break the import."""
    with start("generate", "Hello", "--model", model, *ENDLESS) as process:
        time.sleep(0.4)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")
@pytest.mark.parametrize("command", ["generate", "pretrain"])
def test_a_platform_without_a_device(model, command, tmp_path):
    folder = str(tmp_path)
    words = {
        "generate": ["Hi"],
        "pretrain": ["--preset", "tiny", "--data", folder, "--out", folder],
    }
    with start(command, *words[command], env=os.environ | {"JAX_PLATFORMS": "cuda"}) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.count(b"\n")) == (2, b"", 1)
    assert err.startswith(b"jaxkv: error: JAX finds no device: ") and b"JAX_PLATFORMS=cpu" in err


def test_a_reader_that_closes_the_pipe(model):
    with start("generate", "Hello", "--model", model, *ENDLESS) as process:
        process.stdout.read(10)
        process.stdout.close()
        err = process.stderr.read()
    assert (process.returncode, err) == (141, b"")


def test_ctrl_c_ends_an_answer_and_at_the_prompt_the_chat(model):
    with start("chat", "--model", model, *ENDLESS, stdin=subprocess.PIPE) as process:
        process.stdin.write(b"Hello\n")
        process.stdin.flush()
        process.stdout.read(1)  # the answer has begun and is practically endless
        process.send_signal(signal.SIGINT)
        process.stdin.write(b"And?\n")
        process.stdin.flush()
        while process.stdout.read1(1 << 16)[-1:] != b"\n":
            pass  # until the first answer ends, or the second begins
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)  # ends the second
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)  # at the prompt
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in err


def test_help_does_not_import_jax():
    def seconds(*words: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start

    assert min(seconds("-m", "jaxkv.cli", "--help") for _ in range(5)) < 0.3
    assert min(seconds("-m", "jaxkv.cli", "generate", "--help") for _ in range(5)) < 0.3


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


def test_a_ctrl_c_that_was_handled_is_not_sent_again():
    calls = []
    with on_interrupt(lambda: calls.append("outer")):
        with pytest.raises(KeyboardInterrupt), on_interrupt(stop), send_again(0.05):
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.3)
    assert not calls
