"""`jaxkv serve` in a process of its own: answers, clients that leave, and signals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import openai
import pytest

from jaxkv import models
from jaxkv.serve.http.server import GRACE

ROOT = Path(__file__).resolve().parents[3]
POLICY = "streaming:sinks=2,window=30"


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
def started(model, *flags, program=("-m", "jaxkv.cli")):
    words = ["--model", model, "--port", "0", "--max-batch", "3", "--chunk", "16",
             "--policy", POLICY, "--max-len", "2000000", *flags]  # fmt: skip
    command = [sys.executable, *program, "serve", *words]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr.readline() == "jaxkv: compiling ...\n"
            line = process.stderr.readline()
            while line.startswith("jaxkv: compiling: "):  # on a busy machine
                line = process.stderr.readline()
            pattern = (
                rf"jaxkv: serving tiny on (http://127.0.0.1:\d+) \(policy {POLICY}, at most 3 "
                r"sequences; weights \S+ \w+, sequences \S+ \w+, prefixes \S+ \w+, of \S+ \w+"
                r"(?:; the process \S+ \w+ besides)?\)\n"
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
        first, *logprobs = answer.choices[0].logprobs.token_logprobs
        assert first is None and len(logprobs) == len(losses) + count
        assert np.allclose(logprobs[: len(losses)], -losses, atol=1e-4)


def head_of(length: int) -> bytes:
    """The header of a completion whose body has this many bytes."""
    return (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


@pytest.mark.slow
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


def test_the_template_of_a_flag_and_the_second_name(client):
    """A chat has the tokens of the same text as a prompt; `mood` is a variable of the template."""
    said = [{"role": "system", "content": "Be."}, {"role": "assistant", "content": "I am "}]

    def size(text: str | None = None, messages=said, **fields) -> int:
        create = client.completions.create if text else client.chat.completions.create
        prompt = {"prompt": text} if text else {"messages": messages}
        return create(model="gpt", max_tokens=1, extra_body=fields, **prompt).usage.prompt_tokens

    begin = size("x") - 1  # the BOS, which this template leaves out
    assert size() == size("[system]Be.[assistant]I am [assistant]") - begin
    assert size(chat_template_kwargs={"mood": "!!"}) == size() + 2
    continued = size(continue_final_message=True)
    assert continued == size("[system]Be.[assistant]I am ") - begin


@pytest.mark.skipif(os.name != "posix", reason="signals as on POSIX")
def test_sighup_reads_the_keys_again(process, client):
    running, url = process
    keys = Path(running.args[running.args.index("--api-key-file") + 1])
    read_prompt = partial(client.completions.create, model="tiny", prompt=[7] * 40, max_tokens=1)
    assert read_prompt().usage.prompt_tokens == 40
    keys.write_text("secret team\nnew team\n")
    running.send_signal(signal.SIGHUP)
    assert running.stderr.readline() == "jaxkv: read the keys again: API keys 2, admin 1\n"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="new", max_retries=0) as new_client:
        assert new_client.models.list().data[0].id == client.models.list().data[0].id == "tiny"
    assert read_prompt().usage.prompt_tokens_details.cached_tokens >= 16  # prefixes stay


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals as on POSIX")
def test_ctrl_c(process, client):
    """A second Ctrl-C gives running answers an error. Last, because it ends the process."""
    running, _ = process
    with client.completions.create(
        model="tiny", prompt="x", max_tokens=10**6, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        running.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(0.5)
        running.send_signal(signal.SIGINT)
        start = time.monotonic()
        with pytest.raises(openai.APIError, match="stopping"):
            for _ in stream:
                pass
        assert time.monotonic() - start < GRACE - 0.5
        assert running.wait(20) == 130
    assert running.stderr.read() == ""
