"""vLLM's router in front of two servers: prompts with equal beginnings go to one server."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.serve.cli.test_serve_process import started
from tests.serve.http.conftest import eventually

pytestmark = pytest.mark.slow
GROUPS, TURNS, SHARED = 8, 5, 240  # prompts of a group share so many characters


@pytest.fixture(scope="module")
def servers(model) -> Iterator[list[str]]:
    with contextlib.ExitStack() as running:
        words = ("--metrics-prefix", "vllm", "--max-len", "1000")
        yield [running.enter_context(started(model, *words))[1] for _ in range(3)]


@contextlib.contextmanager
def routed(servers: list[str]) -> Iterator[str]:
    """The URL of a router in front of these servers."""
    ports = [free_port(), free_port()]
    command = [
        sys.executable, "-m", "vllm_router.launch_router", "--port", str(ports[0]),
        "--prometheus-port", str(ports[1]), "--worker-urls", *servers, "--policy", "cache_aware",
        "--worker-startup-check-interval", "1", "--log-level", "error",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{ports[0]}"
        try:
            eventually(lambda: answers(url))
            yield url
        finally:
            process.kill()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def answers(url: str) -> bool:
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(f"{url}/health", timeout=5) as response,
    ):
        return response.status == 200
    return False


def post(url: str, route: str, **fields: object) -> dict:
    body = json.dumps({"model": "tiny", "temperature": 0, "ignore_eos": True} | fields).encode()
    asked = urllib.request.Request(f"{url}/v1/{route}", body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=120) as response:
        return json.load(response)


def prompts() -> list[list[str]]:
    """Groups of prompts, each with a beginning of its own."""
    random = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz "))
    begin = ["".join(random.choice(letters, SHARED)) for _ in range(GROUPS)]
    return [[text + " and so on" * turn for turn in range(TURNS)] for text in begin]


def ask(url: str) -> tuple[list[list[str]], int]:
    """The answers to all prompts and the cached tokens; groups are asked at the same time."""

    def group(texts: list[str]) -> list[dict]:
        return [post(url, "completions", prompt=text, max_tokens=8) for text in texts]

    with ThreadPoolExecutor(GROUPS) as pool:
        groups = list(pool.map(group, prompts()))
    cached = [
        answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        for group in groups
        for answer in group
    ]
    return [[answer["choices"][0]["text"] for answer in group] for group in groups], sum(cached)


def counted(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        return float(re.search(rf"^vllm:{name} (\S+)$", response.read().decode(), re.MULTILINE)[1])


@pytest.mark.router
def test_two_routed_servers_share_prefixes_as_one_does(servers):
    """The same answers, hits within 5 % of one server's, and work for both."""
    *pair, alone = servers
    texts, hits = ask(alone)
    with routed(pair) as url:
        routed_texts, routed_hits = ask(url)
        chat = [{"role": "user", "content": "hello"}]
        assert post(url, "chat/completions", messages=chat, max_tokens=3)["choices"]
    assert routed_texts == texts
    assert hits > 0 and abs(routed_hits - hits) <= 0.05 * hits
    queries = [counted(url, "prefix_cache_queries_total") for url in pair]
    assert min(queries) >= 0.2 * sum(queries), queries


def test_render_gives_the_tokens_that_are_answered(servers):
    url = servers[0]
    asked = {"prompt": ["a cache", "another"], "n": 2, "max_tokens": 1}
    rendered = post(url, "completions/render", **asked)
    tokens = sum(len(prompt["token_ids"]) for prompt in rendered)
    assert (
        len(rendered) == 2 and tokens == post(url, "completions", **asked)["usage"]["prompt_tokens"]
    )
    again = post(
        url, "completions", prompt=[prompt["token_ids"] for prompt in rendered], max_tokens=4
    )
    direct = post(url, "completions", prompt=asked["prompt"], max_tokens=4)
    assert [c["text"] for c in again["choices"]] == [c["text"] for c in direct["choices"]]
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    rendered = post(url, "chat/completions/render", **chat)
    assert (
        len(rendered["token_ids"])
        == post(url, "chat/completions", **chat)["usage"]["prompt_tokens"]
    )
