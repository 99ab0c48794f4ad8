"""The comparison of servers: requests to `jaxkv serve` of a tiny model, and failures of fakes."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json

import pytest

from jaxkv import models
from jaxkv.evals.benchmarks import servers
from jaxkv.evals.benchmarks.servers import Failed, RequestSizes
from jaxkv.evals.benchmarks.weights import add_chat, as_folder
from jaxkv.models.loading.llm import without_weights
from jaxkv.models.loading.source import open_source
from tests.models.gguf.files import hf_model, write_gguf
from tests.tiny import write_tiny

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
SIZES = RequestSizes(short=4, long=12, new=20, chat=3, stream=120)  # `new` begins the numbers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("servers") / "tiny", num_hidden_layers=1)


@pytest.fixture(scope="module")
def server(folder):
    """`jaxkv serve` with few programs, because it compiles them first: one sequence at a time."""
    template = folder / "template"
    template.write_text(TEMPLATE)
    command = [*servers.OURS, "--model", str(folder), "--policy", "full", "--max-batch", "1",
               "--chunk", "16", "--max-len", "256", "--prefix-memory", "0",
               "--chat-template", str(template)]  # fmt: skip
    fields = {"model": "tiny", "ignore_eos": True}
    with servers.started(command, fields) as running:
        yield running


def test_an_answer_is_that_of_generate(server, folder):
    """It has as many tokens as were asked for, and the times of its chunks are in order."""
    messages = servers.prompt("1", 0, 3)
    answer = asyncio.run(servers.ask(server.target, messages, 12))
    rendered = "".join(f"[{message['role']}]{message['content']}" for message in messages)
    llm = models.load(folder)
    ids = llm.tokenizer.encode(rendered + "[assistant]", bos=False)
    alone = models.generate(llm, ids, "full", 12, temperature=0, ignore_eos=True, chunk=16)
    assert (answer.text, answer.tokens) == (alone.text, 12) and 1 < len(answer.times) <= 12
    moments = [answer.start, *answer.times, answer.ended]
    assert moments == sorted(moments)


def test_all_measurements_in_turn(server, monkeypatch):
    """A server that did not start keeps its place, with the reason."""
    monkeypatch.setattr(servers, "messages", lambda: ["Hello!", "And?"])
    work = servers.measurements([1, 3], SIZES)
    results = servers.measure_servers(
        {"ours": server, "other": Failed("no module")}, work, rounds=2
    )
    assert results["other"] == {"failed": "no module"}
    case = results["ours"]
    assert set(case) == {"answer", *work, "memory"} and case["answer"]
    rates = (case[f"tokens_per_second, {form}clients 3"] for form in ("", "with a schema, "))
    numbers = [*case["first_text"], *case["gap"].values(), *rates]
    assert len(numbers) == 2 + 3 + 2
    assert all(statistic["n"] == 2 and statistic["min"] > 0 for statistic in numbers)
    assert 0 < case["memory"]["start"]["resident"] <= case["memory"]["end"]["peak"]


def test_a_refused_request_is_a_reason(server, capsys):
    wrong = server._replace(target=server.target._replace(fields={"model": "another"}))
    work = servers.measurements([2], SIZES)["tokens_per_second, clients 2"]
    outcome = servers.attempt(work, wrong, map(str, itertools.count()))
    assert outcome.reason.startswith("2 of 2 requests failed: HTTP/1.1 404 Not Found {")
    assert "failed: 2 of 2" in capsys.readouterr().err
    assert servers.summary([1.0, outcome, 2.0]) == {"failed": outcome.reason}


def test_an_answer_that_ignores_the_schema_is_a_failure(server, monkeypatch):
    """As from a server that ignores schemas: here it gets another one."""
    monkeypatch.setattr(servers, "SCHEMA", servers.object_of(letters=servers.integer_of(0, 9)))
    work = servers.measurements([1], SIZES)["tokens_per_second, with a schema, clients 1"]
    outcome = servers.attempt(work, server, map(str, itertools.count()))
    assert "the answer does not follow the schema" in outcome.reason


def test_servers_get_equal_requests_and_weights(tmp_path, monkeypatch):
    """Apart from what makes servers ignore the EOS, which the folder for transformers lacks."""
    monkeypatch.setattr(servers.smollm2, "fetch", lambda: tmp_path / "q4_1.gguf")
    options = argparse.Namespace(peer_python="python", cb_memory=0.2, llama_cpp="bin")
    commands = servers.commands(options, tmp_path)
    assert [*servers.CASES] == [*commands][: len(servers.CASES)]
    ignored = {name for name, (_, fields) in commands.items() if fields.get("ignore_eos")}
    assert {*commands} - ignored == {name for name in commands if "transformers" in name}

    def add_template(writer, tensors):
        writer.add_chat_template(TEMPLATE)

    fields, weights = hf_model(tmp_path / "hf", "llama2", vocab_size=300)
    file = write_gguf(tmp_path / "model.gguf", fields, weights, change=add_template)
    llm = models.load(file, dtype="float32")
    (tmp_path / "out").mkdir()
    out = as_folder(llm, tmp_path / "out")
    add_chat(llm, out)
    published = without_weights(open_source(out))
    assert published.chat.template == llm.chat.template == TEMPLATE
    text = "<|begin|>Hello there"
    assert published.tokenizer.encode(text, bos=False) == llm.tokenizer.encode(text, bos=False)
    assert json.loads((out / "generation_config.json").read_text()) == {"do_sample": False}
    assert "eos_token_id" not in json.loads((out / "config.json").read_text())
