"""The end of `jaxkv serve` in a real process: signals, engines that fail, and later starts."""

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

import openai
import pytest

from jaxkv import models
from jaxkv.cli.serve import FAILED
from jaxkv.models.generation.serving import make_engine
from jaxkv.serve.engine import PrefixConfig, PrefixFolder, Request, answer
from tests.models.cli.test_bad_input import refused
from tests.serve.cli.test_serve import NO_MODEL
from tests.serve.cli.test_serve_process import POLICY, ROOT, started
from tests.serve.http.conftest import eventually
from tests.tiny import write_tiny

pytestmark = pytest.mark.skipif(os.name != "posix", reason="file locks and signals as on POSIX")

# `jaxkv serve` whose device does something else than decode. It waits 1 s for its engine.
BROKEN = """
import sys, time
from jaxkv.cli import program, serve
from jaxkv.serve.engine.programs import Programs
init = Programs.__init__
def break_it(self, *given):
    init(self, *given)
    self.feed = lambda *_: {what}
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
    port = () if "--port" in words else ("--port", "0")
    command = [*before, sys.executable, "-m", "jaxkv.cli", "serve", "--model", model,
               *port, "--policy", POLICY, *words]  # fmt: skip
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("seconds", [0.1, 1.5])
def test_sigterm_while_loading_and_compiling(model, seconds):
    with launch(model) as process:
        time.sleep(seconds)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGTERM
    assert all(line.startswith("jaxkv: compiling") for line in err.splitlines())


def test_two_sigterms_of_an_idle_server(model):
    """The exit code is 0 from the line that says that the server is ready."""
    with launch(model) as process:
        assert any("serving" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
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


def test_sigterm_as_the_first_process(model):
    """Of a container: the system would ignore the signal. At once after Python's own start."""
    with launch(model, before=in_container()) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        eventually(lambda: children.read_text().split())
        first = int(children.read_text().split()[0])
        eventually(lambda: handles_sigterm(first))
        os.kill(first, signal.SIGTERM)
        process.wait(10)
        printed = process.stderr.read()
    assert (process.returncode, printed) == (143, "")


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


PROMPT = "A long beginning that outlives its server, because a folder has it. "


def test_a_folder_in_use_is_refused_before_a_model_is_loaded(run, tmp_path):
    folder = PrefixFolder(tmp_path, 2**30)
    words = ("serve", *NO_MODEL, "--port", "0", "--prefix-dir", tmp_path)
    refused(run(*words), "--prefix-dir: a prefix folder belongs to one server", str(tmp_path))
    folder.close()
    assert "one server" not in run(*words).err


def ask(url: str, key: str, prompt: str = PROMPT) -> tuple[str, int]:
    """The text of an answer, and the cached tokens of its prompt."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=12, temperature=0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
    return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens


def metric(url: str, name: str) -> float:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="root", max_retries=0) as client:
        text = client.get("/../metrics", cast_to=str)
    return float(re.search(rf"^jaxkv:{name} (\S+)$", text, re.M)[1])


def end(process: subprocess.Popen) -> str:
    """End a server; returns what else it wrote."""
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=30)
    assert process.returncode == 0
    return rest


@pytest.mark.slow
def test_prefixes_survive_restarts_and_belong_to_their_key(model, tmp_path):
    keys, admins, folder = tmp_path / "keys", tmp_path / "admins", tmp_path / "prefixes"
    keys.write_text("first-key\nsecond-key\n")
    admins.write_text("root\n")
    words = ("--api-key-file", str(keys), "--admin-key-file", str(admins),
             "--prefix-dir", str(folder), "--served-model-name", "tiny")  # fmt: skip
    with started(model, *words) as (process, url):
        text, cached = ask(url, "first-key")
        assert cached == 0
        second = subprocess.run(process.args, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert second.returncode == 2 and second.stderr.count("\n") == 1
        assert "belongs to one server at a time" in second.stderr
        assert end(process) == ""
    assert all(b"-key" not in file.read_bytes() for file in folder.iterdir())
    with started(model, *words) as (process, url):
        assert ask(url, "second-key") == (text, 0)
        again, cached = ask(url, "first-key")
        assert again == text and cached >= 48
        assert metric(url, "prefix_disk_hits_total") > 0
        assert metric(url, "prefix_disk_failures_total") == 0
        assert end(process) == ""


def test_other_weights_under_the_same_name_are_another_model(tmp_path):
    answers = []
    for seed in (0, 1, 0):
        shutil.rmtree(tmp_path / "tiny", ignore_errors=True)
        llm = models.load(write_tiny(tmp_path / "tiny", seed))
        folder = PrefixFolder(tmp_path / "prefixes", 2**30)
        engine = make_engine(
            llm, POLICY, max_batch=1, chunk=16, prefix_cache=PrefixConfig(folder=folder)
        )
        tokens = tuple(llm.tokenizer.encode(PROMPT))
        (collected,) = answer(engine, [Request(tokens, 4)])
        answers.append((collected.tokens, collected.outcome.cached_tokens))
        engine.stop()
    assert answers[0][1] == answers[1][1] == 0 < answers[2][1]
    assert answers[0][0] == answers[2][0]
