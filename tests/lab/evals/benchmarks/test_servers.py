"""The comparison of servers: requests to `jaxkv serve` of a tiny model, and failures of fakes."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

import pytest

from jaxkv import models
from jaxkv.evals.benchmarks import server_requests as requests
from jaxkv.evals.benchmarks import servers
from jaxkv.evals.benchmarks.server_requests import RequestSizes, Target
from jaxkv.evals.benchmarks.servers import Failed
from jaxkv.evals.benchmarks.weights import add_chat, as_folder
from jaxkv.models.loading.llm import without_weights
from jaxkv.models.loading.published import open_published
from tests.models.gguf.files import hf_model, write_gguf
from tests.tiny import write_tiny

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
SIZES = RequestSizes(short=4, long=12, new=3, chat=3, stream=120)
# A server that answers only /health.
HEALTHY = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Answer).serve_forever()
"""


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


@pytest.mark.slow
def test_an_answer_is_that_of_generate(server, folder):
    """It has as many tokens as were asked for, and the times of its chunks are in order."""
    messages = requests.prompt("1", 0, 3)
    answer = asyncio.run(requests.ask(server.target, messages, 12))
    rendered = (
        "".join(f"[{message['role']}]{message['content']}" for message in messages) + "[assistant]"
    )
    llm = models.load(folder)
    ids = llm.tokenizer.encode(rendered, bos=False)
    alone = models.generate(llm, ids, "full", 12, temperature=0, ignore_eos=True, chunk=16)
    assert (answer.text, answer.tokens) == (alone.text, 12)
    assert 1 < len(answer.times) <= 12
    moments = [answer.start, *answer.times, answer.ended]
    assert moments == sorted(moments)


def test_all_measurements_in_turn(server, monkeypatch, capsys):
    """A server that did not start keeps its place, with the reason."""
    monkeypatch.setattr(requests, "messages", lambda: ["Hello!", "And?"])
    work = requests.measurements([1, 3], SIZES)
    results = servers.measure({"ours": server, "other": Failed("no module")}, work, rounds=2)
    assert results["other"] == {"failed": "no module"}
    case = results["ours"]
    assert list(case) == ["first_text", "tokens_per_second, clients 1",
                          "tokens_per_second, clients 3", "gap", "answer", "memory"]  # fmt: skip
    numbers = [
        *case["first_text"],
        *case["gap"].values(),
        case["tokens_per_second, clients 3"],
    ]
    assert len(numbers) == 2 + 3 + 1
    assert all(statistic["n"] == 2 and statistic["min"] > 0 for statistic in numbers)
    assert case["answer"]
    memory = case["memory"]
    assert 0 < memory["start"]["resident"] <= memory["end"]["peak"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 + 2 * len(work)
    assert lines[-1].startswith("servers: round 2 of 2, gap, ours: ")


def test_a_conversation_grows_by_the_answers(server, monkeypatch):
    sent, asked = [], requests.ask

    async def watched(target, messages, new):
        sent.append([message["content"] for message in messages])
        return await asked(target, messages, new)

    monkeypatch.setattr(requests, "ask", watched)
    seconds = asyncio.run(requests.chat(server.target, "7", ["Hello!", "And?"], 4))
    assert len(seconds) == 2
    first, second = sent
    assert first == ["Number 7.", "Hello!"]
    assert second[:2] == first and second[3] == "And?" and second[2]


def test_a_refused_request_is_a_reason(server, capsys):
    wrong = server._replace(target=server.target._replace(fields={"model": "another"}))
    work = requests.measurements([2], SIZES)["tokens_per_second, clients 2"]
    outcome = servers.attempt(work, wrong, "a title")
    assert isinstance(outcome, Failed)
    assert outcome.reason.startswith("2 of 2 requests failed: HTTP/1.1 404 Not Found {")
    assert "failed: 2 of 2" in capsys.readouterr().err


def test_a_server_that_ends_is_a_reason():
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    match = "does not start: no such model"
    with pytest.raises(RuntimeError, match=match), servers.started(command, {}):
        pass


def test_servers_are_ended_after_ctrl_c():
    command = [sys.executable, "-c", HEALTHY]
    with pytest.raises(KeyboardInterrupt), servers.started(command, {}) as running:
        assert running.process.poll() is None
        raise KeyboardInterrupt
    assert running.process.poll() is not None
    assert "ended with exit code" in servers.memory_of(running)["failed"]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"error": "out of memory"}, "out of memory"),
        ({"choices": [{"delta": {"content": "a"}}]}, "ended without its usage"),
    ],
)
def test_a_stream_that_breaks_off_is_a_reason(event, reason):
    async def answer(reader, writer):
        await reader.readuntil(b"}")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + b"data: %s\n\n" % json.dumps(event).encode())
        writer.close()

    async def request():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as fake:
            target = Target(fake.sockets[0].getsockname()[1], {})
            await requests.ask(target, [], 1)

    with pytest.raises(RuntimeError, match=reason):
        asyncio.run(request())


def test_prompts_differ_in_their_first_words():
    messages, next_messages = requests.prompt("1.2", 0, 8), requests.prompt("1.3", 0, 8)
    assert messages[0] != next_messages[0] and messages[1] == next_messages[1]
    assert len(messages[1]["content"].split()) == 8
    end = requests.prompt("1", 10**6 + 3, 50)[1]["content"].split()  # continues at the beginning
    assert len(end) == 50


def test_gaps_count_while_prompts_are_answered():
    times = [0.0, 1.0, 3.0, 6.0, 10.0]
    assert requests.gaps(times) == [1, 2, 3, 4]
    assert requests.gaps(times, 1.5, 5.0) == [2, 3]
    assert requests.percentile([1.0] * 50 + [5.0]) > 2.9
    with pytest.raises(RuntimeError, match="no chunks while the prompts arrive"):
        requests.percentile(requests.gaps(times, 11.0))


def test_a_failed_round_is_the_reason_of_the_whole():
    assert servers.summary([3.0, 1.0, 2.0])["median"] == 2
    assert [turn["max"] for turn in servers.summary([[1.0, 5.0], [3.0, 4.0]])] == [3, 5]
    assert servers.summary([{"a": 1.0}, {"a": 2.0}])["a"]["min"] == 1
    assert servers.summary(["text", "other"]) == "text"
    assert servers.summary([1.0, Failed("refused"), 2.0]) == {"failed": "refused"}


def test_servers_get_equal_requests(tmp_path):
    """Apart from the model's name and what makes jaxkv ignore the EOS."""
    options = argparse.Namespace(peer_python="python", cb_memory=0.2)
    commands = servers.commands(options, tmp_path)
    num_jaxkv = len(servers.CASES)
    assert [*servers.CASES] == [*commands][:num_jaxkv]
    plain, batching = (command for command, _ in [*commands.values()][num_jaxkv:])
    assert batching[: len(plain)] == plain
    assert batching[len(plain) :] == ["--continuous-batching", "--cb-max-memory-percent", "0.2"]
    assert [fields.get("ignore_eos") for _, fields in commands.values()] == [True] * num_jaxkv + [
        None,
        None,
    ]


def test_the_folder_for_transformers_has_tokenizer_and_template_and_no_eos(tmp_path):
    fields, weights = hf_model(tmp_path / "hf", "llama2", vocab_size=300)

    def add_template(writer, tensors):
        writer.add_chat_template(TEMPLATE)

    file = write_gguf(tmp_path / "model.gguf", fields, weights, change=add_template)
    llm = models.load(file, dtype="float32")
    (tmp_path / "out").mkdir()
    out = as_folder(llm, tmp_path / "out")
    add_chat(llm, out)
    read = without_weights(open_published(out))
    assert read.chat.template == llm.chat.template == TEMPLATE
    text = "<|begin|>Hello there"
    assert read.tokenizer.encode(text, bos=False) == llm.tokenizer.encode(text, bos=False)
    assert json.loads((out / "generation_config.json").read_text()) == {"do_sample": False}
    assert "eos_token_id" not in json.loads((out / "config.json").read_text())
