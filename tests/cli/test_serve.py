"""`jaxkv serve`: errors before a model is loaded, and a server in a real process."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import openai
import pytest

from jaxkv import models
from jaxkv.cli import serve
from tests.cli.test_bad_input import refused
from tests.seldom import seldom
from tests.server.conftest import eventually

ROOT = Path(__file__).resolve().parents[2]
POLICY = "streaming:sinks=2,window=30"
NO_MODEL = ("--model", "nowhere/at/all")


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    for name in ("JAXKV_API_KEYS", "JAXKV_ADMIN_KEYS"):
        monkeypatch.delenv(name, raising=False)


def test_a_port_in_use(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(run("serve", *NO_MODEL, "--port", port), f"127.0.0.1 port {port}", "is in use", "0")


@pytest.mark.parametrize("words, expected", [
    (["--host", "no.such.host.invalid"], ["--host 'no.such.host.invalid'", "127.0.0.1"]),
    (["--host", "192.0.2.1"], ["192.0.2.1 port", "not an address of this machine"]),
    (["--port", "65536"], ["--port", "0 to 65535", "65536"]),
    (["--host", "a..b"], ["--host 'a..b' is unknown", "127.0.0.1"]),
    (["--host", "a" * 100], ["--host", "is unknown"]),
    (["--host", "\udcff"], ["--host", "is unknown"]),
    (["--served-model-name", ""], ["--served-model-name must be", "got ''"]),
    (["--served-model-name", "\udcff"], ["--served-model-name must be Unicode"]),
    (["--served-model-name", "x" * 1001], ["--served-model-name must be", "1000 characters"]),
    (["--served-model-name", "a,"], ["--served-model-name must be", "got ''"]),
    (["--chat-template", "absent"], ["no such chat template absent"]),
    (["--mesh", "model=2"], ["--mesh"]),
    (["--drain", "-1"], ["--drain", "at least 0"]),
    (["--step-timeout", "0"], ["--step-timeout", "at least 1"]),
    (["--max-batch", "0"], ["--max-batch", "at least 1"]),
    (["--memory", "lots"], ["--memory", "such as 512MiB", "lots"]),
    (["--max-prefill-tokens", "0"], ["--max-prefill-tokens", "at least 1"]),
    (["--per-key", "3"], ["--per-key", "--api-key-file"]),
    (["--prefix-memory", "4 apples"], ["--prefix-memory", "such as 512MiB", "4 apples"]),
    (["--prefix-memory", "0", "--prefix-host-memory", "1GiB"], ["needs --prefix-memory"]),
    (["--api-key-file", "absent"], ["no such API key file absent"]),
    (["--api-key", "secret"], ["--api-key"]),
    (["--admin-key-file", "absent"], ["no such admin key file absent"]),
    (["--allowed-origins", "https://a.example/path"], ["--allowed-origins", "without a path"]),
    (["--log", "xml"], ["--log", "must be text or json", "'xml'"]),
    (["--metrics-prefix", "v-llm"], ["--metrics-prefix", "letters", "'v-llm'"]),
    (["--allowed-origins", "a.example"], ["--allowed-origins", "https://chat.example"]),
    (["--allowed-origins", "https://a.example,"], ["--allowed-origins", "got ''"]),
    (["--prefix-where", "nonsense"], ["--prefix-where", "branch", "nonsense"]),
    (["--prefix-order", "nonsense"], ["--prefix-order", "lru", "nonsense"]),
])  # fmt: skip
def test_flags(run, words, expected):
    refused(run("serve", *NO_MODEL, "--port", "0", *words), *expected)


@pytest.mark.parametrize("words, expected", [
    (["--memory", "1MiB"], ["weights (12.3 MiB), 1 sequence (", "got 1.0 MiB", "--memory 16MiB"]),
    (["--memory", "64MiB", "--max-batch", "500"], ["500 sequences", "a smaller --max-batch"]),
    (["--memory", "64MiB", "--prefix-memory", "1GiB"], ["prefixes (1.0 GiB)", "--prefix-memory"]),
    (["--memory", "64MiB", "--prefix-host-memory", "1GiB"], ["a smaller --prefix-host-memory"]),
    (["--memory", "16MiB", "--prefix-host-memory", "1KiB"], ["--prefix-host-memory needs"]),
    (["--memory", "9000TiB"], ["--memory must be at most what is free", "9000.0 TiB"]),
    (["--prefix-memory", "1KiB"], ["--prefix-memory must hold one prefix", "1.0 KiB"]),
    (["--memory", "64MiB", "--policy", "full", "--max-len", "100000"], ["a smaller policy"]),
])  # fmt: skip
def test_too_little_memory_says_how_much_is_needed(run, words, expected):
    """Before the weights of the default model are loaded."""
    refused(run("serve", "--port", "0", *words), *expected)


@pytest.mark.parametrize(
    "words", [(), seldom(("--memory", "48MiB")), seldom(("--prefix-memory", "0"))]
)
def test_memory_at_the_start_is_that_of_the_plan(words):
    """Within 10 %, for the default model, in the arrays that JAX has on the device."""
    parser = argparse.ArgumentParser()
    serve.add_flags(parser)
    args = parser.parse_args(words)
    gc.collect()  # engines of other tests
    before = sum(array.nbytes for array in jax.live_arrays())
    llm, load = serve.flags.open_model(args, args.policy)
    plan = serve.plan_of(args, llm)
    load()
    has_keys = args.prefix_memory != 0
    engine = serve.make(args, llm, plan, serve.prefixes_of(args), has_keys)
    assert engine.max_per_owner == plan.max_batch - has_keys
    planned = sum(engine.bytes.values())
    held = sum(array.nbytes for array in jax.live_arrays()) - before
    assert 0.9 * planned < held <= planned
    assert planned <= plan.limit
    assert args.memory is None or planned > 0.9 * args.memory
    assert (engine.bytes["prefixes"] > 0) == (args.prefix_memory != 0)


def test_invalid_api_keys(run, tmp_path, monkeypatch):
    path = tmp_path / "keys"
    path.write_text("a b c\n")
    refused(run("serve", "--api-key-file", path), f"{path}, line 1", "3 words")
    monkeypatch.setenv("JAXKV_API_KEYS", "good\ngood")
    ran = run("serve")
    refused(ran, "JAXKV_API_KEYS, line 2")
    assert "good" not in ran.err
    refused(run("serve", "--api-key-file", path), "given twice")
    monkeypatch.delenv("JAXKV_API_KEYS")
    monkeypatch.setenv("JAXKV_ADMIN_KEYS", "root")
    refused(run("serve"), "--admin-key-file needs API keys", "--api-key-file")


def test_a_public_address_without_keys_warns(run):
    ran = run("serve", *NO_MODEL, "--port", "0", "--host", "0.0.0.0")
    warning, error = ran.err.splitlines()
    assert (
        "accepts requests from other machines without an API key" in warning and "nowhere" in error
    )


@pytest.mark.parametrize("words, has_keys, expected", [
    ([], True, (16 + 256) // 2),
    (["--max-batch", "2", "--queue", "8"], True, 5),
    (["--max-batch", "1", "--queue", "1"], True, 1),
    (["--per-key", "7"], True, 7),
    ([], False, None),
])  # fmt: skip
def test_the_default_of_per_key(words, has_keys, expected):
    """One key must not fill the batch and the queue."""
    parser = argparse.ArgumentParser()
    serve.add_flags(parser)
    args = parser.parse_args(words)
    llm = SimpleNamespace(name="tiny", dtype="float32", sampling=models.Sampling())
    assert serve.server_config(args, llm, args.max_batch or 16, has_keys).max_per_key == expected


def test_the_system_fingerprint(model):
    """It tells weights, sinks and templates apart, whatever the folder is called."""
    parser = argparse.ArgumentParser()
    serve.add_flags(parser)
    args, llm = parser.parse_args([]), models.load(model)
    others = [
        replace(llm, weights={**llm.weights, "norm": llm.weights["norm"] + 1}),
        replace(llm, tokenizer=replace(llm.tokenizer, front=(5, 0), sinks=(5,))),
        replace(llm, chat=replace(llm.chat, template="{{ messages }}")),
    ]
    assert len({serve.fingerprint_of(args, one) for one in (llm, *others)}) == 4
    moved = replace(llm, path=llm.path / "elsewhere")
    assert serve.fingerprint_of(args, moved) == serve.fingerprint_of(args, llm)


@pytest.fixture(scope="module")
def process(model, tmp_path_factory):
    """A server with an API key: its process and URL."""
    folder = tmp_path_factory.mktemp("keys")
    keys, admins = folder / "keys", folder / "admins"
    keys.write_text("secret team\n")
    admins.write_text("root\n")
    template = folder / "template.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}{{ mood }}"
    )
    words = ("--api-key-file", str(keys), "--admin-key-file", str(admins),
             "--served-model-name", "tiny,gpt", "--chat-template", str(template))  # fmt: skip
    with started(model, *words) as running:
        yield running


@contextlib.contextmanager
def started(model, *more, program=("-m", "jaxkv.cli")):
    words = ["--model", model, "--port", "0", "--max-batch", "3", "--chunk", "16",
             "--policy", POLICY, "--max-len", "2000000", *more]  # fmt: skip
    command = [sys.executable, *program, "serve", *words]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stderr.readline()
            pattern = (
                rf"jaxkv: serving tiny on (http://127.0.0.1:\d+) \(policy {POLICY}, at most 3 "
                r"sequences; weights \S+ \w+, sequences \S+ \w+, prefixes \S+ \w+, of \S+ \w+\)\n"
            )
            match = re.fullmatch(pattern, line)
            assert match, line
            yield process, match[1]
        finally:
            process.kill()


@pytest.fixture
def client(process):
    with openai.OpenAI(base_url=f"{process[1]}/v1", api_key="secret", max_retries=0) as client:
        yield client


def test_answers_equal_those_of_generate(client, model):
    """Two prompts per request, greedy and sampled, with the same model, policy and chunk."""
    llm = models.load(model)
    for settings in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 3}):
        prompts = ["Once upon a time there was a cache", "Hello"]
        answer = client.completions.create(
            model="tiny", prompt=prompts, max_tokens=20, extra_body={"ignore_eos": True}, **settings
        )
        for prompt, choice in zip(prompts, answer.choices, strict=True):
            alone = models.generate(llm, prompt, POLICY, 20, ignore_eos=True, chunk=16, **settings)
            assert choice.text == alone.text


def test_a_prefix_is_reused(client):
    prompt = "A long beginning that several prompts share. "
    answers = [
        client.completions.create(model="tiny", prompt=prompt + end, max_tokens=1, temperature=0)
        for end in ("One", "Two", "Three")
    ]
    assert answers[0].usage.prompt_tokens_details.cached_tokens == 0
    assert answers[-1].usage.prompt_tokens_details.cached_tokens >= 32
    admin = {"authorization": "Bearer root"}
    metrics = client.get("/../metrics", cast_to=str, options={"headers": admin})
    hits = re.search(r"^jaxkv:prefix_cache_hits_total (\S+)$", metrics, re.M)
    assert float(hits[1]) >= 32
    assert re.search(r"^jaxkv:prefix_entries_in_use 0.0$", metrics, re.M)


def test_echoed_scores_equal_those_of_the_model(client, model):
    """Also if the text is cached, with one new token and with none."""
    llm = models.load(model)
    text = "Some forty characters to be scored, twice"
    losses = np.concatenate([*models.losses(llm, llm.tokenizer.encode(text), POLICY, chunk=16)])
    for count in (0, 1):
        answer = client.completions.create(
            model="tiny", prompt=text, max_tokens=count, echo=True, logprobs=1, temperature=0
        )
        assert answer.choices[0].text.startswith(text)
        first, *others = answer.choices[0].logprobs.token_logprobs
        assert first is None and len(others) == len(losses) + count
        assert np.allclose(others[: len(losses)], -losses, atol=1e-4)


def head_of(length: int) -> bytes:
    """The header of a completion whose body has this many bytes."""
    return (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def test_requests_without_bodies_do_not_lock_others_out(process, client):
    """As many as there may be answers, all with one API key."""
    port = int(process[1].rpartition(":")[2])
    with contextlib.ExitStack() as opened:
        for _ in range(2 + 256 + 14):
            stalled = socket.create_connection(("127.0.0.1", port), timeout=20)
            opened.enter_context(stalled).sendall(head_of(100))
        for _ in range(3):
            answer = client.completions.create(model="tiny", prompt="x", max_tokens=1, timeout=20)
            assert answer.usage.completion_tokens == 1


def test_refused_bodies_of_one_key_do_not_delay_others(process, client):
    """Bodies that take seconds to tokenize, and are refused then."""
    body = json.dumps({"model": "tiny", "prompt": "word " * 500_000, "max_tokens": 1}).encode()
    port = int(process[1].rpartition(":")[2])
    with contextlib.ExitStack() as opened:
        senders = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(3)]
        for sender in senders:
            opened.enter_context(sender).sendall(head_of(len(body)) + body)
        for _ in range(3):
            client.completions.create(model="tiny", prompt="x", max_tokens=1, timeout=20)
        early, _, _ = select.select(senders, [], [], 0)
        assert len(early) < len(senders)
        assert [sender.recv(12) for sender in senders] == [b"HTTP/1.1 400"] * 3


def running_requests(client) -> float:
    admin = {"authorization": "Bearer root"}
    metrics = client.get("/../metrics", cast_to=str, options={"headers": admin})
    return float(re.search(r"^jaxkv:num_requests_running (\S+)$", metrics, re.M)[1])


def test_clients_that_leave_after_a_pipelined_request(process, client):
    """They free all batch entries of their API key, although their answers have no end."""
    body = json.dumps(
        {"model": "tiny", "prompt": "x", "max_tokens": 10**6, "ignore_eos": True}
    ).encode()
    pipelined = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    port = int(process[1].rpartition(":")[2])
    leavers = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(2)]
    for leaver in leavers:
        leaver.sendall(head_of(len(body)) + body)
    eventually(lambda: running_requests(client) == 2, 20)
    for leaver in leavers:
        leaver.sendall(pipelined)
    time.sleep(0.2)  # the server reads them before it sees the end
    for leaver in leavers:
        leaver.close()
    eventually(lambda: running_requests(client) == 0, 20)
    answer = client.completions.create(model="tiny", prompt="x", max_tokens=1, timeout=20)
    assert answer.usage.completion_tokens == 1


def test_a_message_cannot_contain_special_tokens(client):
    """<|end|> in a message takes its 7 characters as tokens; in a prompt it is one token."""
    counts = [
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": text}], max_tokens=1
        ).usage.prompt_tokens
        for text in ("", "<|end|>")
    ]
    assert counts[1] - counts[0] == 7
    prompts = [
        client.completions.create(model="tiny", prompt=text, max_tokens=1).usage.prompt_tokens
        for text in ("a", "a<|end|>")
    ]
    assert prompts[1] - prompts[0] == 1


def test_the_template_of_a_flag_and_the_second_name(client):
    """A chat has the tokens of the same text as a prompt; `mood` is a variable of the template."""
    said = [{"role": "system", "content": "Be."}, {"role": "assistant", "content": "I am "}]

    def size(text: str | None = None, messages=said, **fields) -> int:
        create = client.completions.create if text else client.chat.completions.create
        given = {"prompt": text} if text else {"messages": messages}
        return create(model="gpt", max_tokens=1, extra_body=fields, **given).usage.prompt_tokens

    begin = size("x") - 1  # the BOS, which this template leaves out
    assert size() == size("[system]Be.[assistant]I am [assistant]") - begin
    assert size(chat_template_kwargs={"mood": "!!"}) == size() + 2
    continued = size(continue_final_message=True)
    assert continued == size("[system]Be.[assistant]I am ") - begin


def test_min_tokens_and_stop_token_ids(client, model):
    """The most likely next token ends the answer, but not in its first three tokens."""

    def answer(**fields):
        return client.completions.create(
            model="tiny", prompt="Once upon", max_tokens=5, temperature=0, logprobs=1,
            extra_body={"ignore_eos": True} | fields,
        )  # fmt: skip

    free = answer().choices[0]
    first = free.logprobs.tokens[0]
    alone = models.generate(
        models.load(model), "Once upon", POLICY, 1, temperature=0, ignore_eos=True, chunk=16
    )
    ids = {"stop_token_ids": alone.tokens}
    ended = answer(**ids)
    assert (ended.choices[0].finish_reason, ended.usage.completion_tokens) == ("stop", 1)
    later = answer(**ids, min_tokens=3)
    assert first not in later.choices[0].logprobs.tokens[:3]
    assert later.usage.completion_tokens >= 3


@pytest.mark.skipif(os.name != "posix", reason="signals as on POSIX")
def test_sighup_reads_the_keys_again(process, client):
    running, url = process
    keys = Path(running.args[running.args.index("--api-key-file") + 1])
    keys.write_text("secret team\nnew team\n")
    running.send_signal(signal.SIGHUP)
    assert running.stderr.readline() == "jaxkv: read the keys again: API keys 2, admin 1\n"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="new", max_retries=0) as other:
        assert other.models.list().data[0].id == client.models.list().data[0].id == "tiny"


@pytest.mark.skipif(os.name != "posix", reason="signals as on POSIX")
def test_ctrl_c(process, client):
    """A second Ctrl-C does not wait for running answers. Last, because it ends the process."""
    running, _ = process
    with client.completions.create(
        model="tiny", prompt="x", max_tokens=10**6, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        running.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(0.5)
        running.send_signal(signal.SIGINT)
        assert running.wait(20) == 130
    assert running.stderr.read() == ""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals as on POSIX")
def test_sigterm(model):
    """Answers that do not end within some seconds get an error."""
    tiers = ("--prefix-memory", "1MiB", "--prefix-host-memory", "4MiB", "--prefix-order", "lfu")
    with (
        started(model, *tiers) as (running, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        client.completions.create(
            model="tiny", prompt="x", max_tokens=10**6, stream=True,
            extra_body={"ignore_eos": True},
        ) as stream,
    ):  # fmt: skip
        next(iter(stream))
        running.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="stopping"):
            for _ in stream:
                pass
        assert running.wait(20) == 0
        assert running.stderr.read() == ""
