"""The end of `jaxkv serve` in a real process: signals at any moment, and engines that fail."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from jaxkv.cli.serve import FAILED
from tests.seldom import seldom
from tests.serve.cli.test_serve_process import POLICY, ROOT, started
from tests.serve.http.conftest import eventually

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals as on POSIX")

# `jaxkv serve` whose device does something else than decode. It waits 1 s for its engine.
BROKEN = """
import sys, time
from jaxkv.cli import program, serve
from jaxkv.serve.engine.programs import Programs
init = Programs.__init__
def break_it(self, *given):
    init(self, *given)
    self.decode = lambda *_: {what}
Programs.__init__ = break_it
serve.STOP = 1
sys.exit(program())
"""


def broken(action: str) -> tuple[str, str]:
    return "-c", BROKEN.format(what=action)


def post(url: str, **fields) -> tuple[int, bytes]:
    """Status and body of a completion."""
    body = json.dumps({"model": "tiny", "prompt": "x", "ignore_eos": True} | fields).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)
    return fetch(request)


def fetch(request) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def launch(model: str, *words: str, before=()) -> subprocess.Popen:
    command = [*before, sys.executable, "-m", "jaxkv.cli", "serve", "--model", model,
               "--port", "0", "--policy", POLICY, *words]  # fmt: skip
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("seconds", [0.1, seldom(0.5), 1.5, seldom(2.0)])
def test_sigterm_while_loading_and_compiling(model, seconds):
    with launch(model) as process:
        time.sleep(seconds)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGTERM
    assert all(line.startswith("jaxkv: compiling") for line in err.splitlines())


@pytest.mark.parametrize("gap", [0.0, seldom(0.3)])
def test_two_sigterms_of_an_idle_server(model, gap):
    """The exit code is 0 from the line that says that the server is ready."""
    with launch(model) as process:
        assert any("serving" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        time.sleep(gap)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def in_container() -> list[str]:
    """The words before a command that make it the first process, or a skip."""
    for words in (["unshare", "-fp"], ["unshare", "-Ur", "-fp"]):
        unshared = shutil.which("unshare") and subprocess.run([*words, "true"], capture_output=True)
        if unshared and unshared.returncode == 0:
            return words
    pytest.skip("no unshare, which makes a process the first one of a container")


def handles_sigterm(process: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text()
    caught = int(re.search(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)[1], 16)
    return bool(caught & 1 << signal.SIGTERM - 1)


@pytest.mark.parametrize("seconds", [0, seldom(1.0), seldom(4.0)])
def test_sigterm_as_the_first_process(model, seconds):
    """Of a container: the system would ignore the signal. At once after Python's own start."""
    with launch(model, before=in_container()) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        eventually(lambda: children.read_text().split())
        first = int(children.read_text().split()[0])
        eventually(lambda: handles_sigterm(first))
        time.sleep(seconds)
        os.kill(first, signal.SIGTERM)
        process.wait(10)
        printed = process.stderr.read()
    assert process.returncode == (0 if "serving" in printed else 143)
    assert "Traceback" not in printed
    assert seconds or printed == ""  # later, it may be ready


def test_a_second_server_on_a_port_is_refused_before_it_loads(model):
    """Also while the first one still loads."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with launch(model, "--port", str(port)) as first:
        while not is_bound(port):
            time.sleep(0.2)  # seldom, because the attempt itself takes the port for a moment
        first.send_signal(signal.SIGSTOP)  # or a fast machine loads it before the second one starts
        second = subprocess.run(
            [sys.executable, "-m", "jaxkv.cli", "serve", "--model", "nowhere", "--port", str(port)],
            cwd=ROOT, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        loading = first.poll() is None and not is_open(port)
        first.kill()
        first.stderr.close()
    assert loading, "the first server was ready before it was stopped"
    assert second.returncode == 2 and f"port {port} is in use" in second.stderr


def is_bound(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_an_engine_that_fails_ends_the_process(model):
    with started(model, program=broken("1 / 0")) as (process, url):
        status, body = post(url)
        assert status == 500 and b"the engine failed" in body
        assert process.wait(20) == FAILED
        err = process.stderr.read()
    assert "the engine failed" in err and "ZeroDivisionError" in err


@pytest.mark.slow
def test_a_device_that_hangs_does_not_block_the_end(model):
    hangs = broken("time.sleep(10**6)")
    with started(model, "--step-timeout", "1", program=hangs) as (process, url):
        client = threading.Thread(target=post, args=(url,))
        client.start()
        eventually(lambda: fetch(f"{url}/health")[0] == 503, 20)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        client.join(20)
        assert not client.is_alive() and process.stderr.read() == ""


def test_sigterm_drains(model):
    """The running answer is complete, new requests get 503, and then the process ends."""
    with started(model, "--drain", "60") as (process, url):
        answers = []
        client = threading.Thread(target=lambda: answers.append(post(url, max_tokens=8_000)))
        client.start()
        eventually(lambda: b"num_requests_running 1.0" in fetch(f"{url}/metrics")[1])
        process.send_signal(signal.SIGTERM)
        eventually(lambda: fetch(f"{url}/health")[0] == 503)
        assert b"server_draining" in fetch(f"{url}/health")[1]
        assert post(url, max_tokens=1)[0] == 503 and not answers
        assert process.wait(60) == 0
        client.join(20)
        ((status, body),) = answers
        assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 8_000
        assert process.stderr.read() == ""
