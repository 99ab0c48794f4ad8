"""`jaxkv chat`, with lines on standard input."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest

from jaxkv import models
from jaxkv.models.generation import session


def test_answers_equal_those_of_the_library(run, model, stdin):
    stdin("Hello\n\n  \nÄ?\r\n/exit\nnever read\n".encode())
    ran = run("chat", "--model", model, "--max-new-tokens", 12, "--json")
    turns = ran.json["turns"]
    assert [turn["user"] for turn in turns] == ["Hello", "Ä?"]
    assert all(len(turn["tokens"]) == 12 for turn in turns)
    assert all(turn["finish_reason"] == "length" for turn in turns)
    assert ran.json["state_bytes"] > 0 and "streaming" in ran.json["policy"]
    assert ran.err == "jaxkv: the model has no chat template: messages are sent as plain text\n"

    talk = models.Conversation(models.load(model))
    assert ["".join(talk.say(line, max_new_tokens=12)) for line in ("Hello", "Ä?")] == [
        turn["text"] for turn in turns
    ]
    stdin("Hello\nÄ?\n".encode())
    plain = run("chat", "--model", model, "--max-new-tokens", 12)
    assert (plain.code, plain.out) == (0, "".join(turn["text"] + "\n" for turn in turns))
    assert [turn["position"] for turn in turns] == [19, 36]
    status = (
        r"\[12 tokens \(cut: --max-new-tokens\), [\d.]+ tokens/s, cache 66.0 KiB, position {}\]"
    )
    _, *lines = plain.err.splitlines()
    assert len(lines) == 2
    assert all(
        re.fullmatch(status.format(n), line) for n, line in zip((19, 36), lines, strict=True)
    )


@pytest.fixture
def chat(run, model, stdin):
    """Chat with these lines; the turns, and the lines on standard error after the first."""

    def chat(*lines: str, flags: tuple = ()) -> tuple[list[dict], list[str]]:
        stdin("".join(line + "\n" for line in lines).encode())
        ran = run("chat", "--model", model, "--max-new-tokens", 5, "--json", *flags)
        return ran.json["turns"], ran.err.splitlines()[1:]

    return chat


def test_at_a_terminal_a_full_cache_does_not_end_the_chat(run, model, monkeypatch):
    said = iter(["Hello", "Hello again", "/reset", "Hello", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    flags = ("--policy", "full:start=24,max=24", "--max-new-tokens", 5, "--json")
    ran = run("chat", "--model", model, *flags)
    _, refused, emptied = (line for line in ran.err.splitlines() if line.startswith("jaxkv: "))
    assert refused.startswith("jaxkv: error: ") and refused.endswith("with /reset")
    assert "24" in refused and emptied == "jaxkv: the conversation is empty"
    assert [turn["user"] for turn in ran.json["turns"]] == ["Hello", "Hello"] and ran.code == 0


def test_in_a_pipe_a_full_cache_is_an_error(run, model, stdin):
    stdin(b"Hello\nHello again\n")
    ran = run("chat", "--model", model, "--policy", "full:start=24,max=24", "--max-new-tokens", 5)
    assert ran.code == 2 and ran.err.endswith("with /reset\n")
    assert len(ran.out.splitlines()) == 1  # the answer before the error


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/hepl", "unknown command '/hepl'; did you mean /help? /help lists"),
        ("/save", "/save needs FILE; write /save FILE"),
        ("/exit now", "/exit takes nothing after it, got 'now'; write /exit"),
        ("/policy windw", "unknown policy 'windw'; did you mean 'window'?"),
        ("/load absent", "no such file: absent"),
        ("/save /no/such/folder/file", "choose another place"),
        ("/save ~nobody-of-this-name/x", "begins with the home of an unknown user"),
    ],
)
def test_a_wrong_command_is_one_line_and_the_chat_goes_on(run, model, stdin, line, words):
    stdin(f"Hello\n{line}\nAnd?\n".encode())
    ran = run("chat", "--model", model, "--max-new-tokens", 5, "--json")
    _, *lines = ran.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("jaxkv: error: ") and words in lines[0]
    assert [turn["position"] for turn in json.loads(ran.out)["turns"]] == [12, 23]
    assert ran.code == 2


def test_the_system_message(chat):
    turns, lines = chat("Hello", "/system Be brief.", "/system", "Hello")
    (alone,), _ = chat("Hello", flags=("--system", "Be brief."))
    assert turns[1]["tokens"] == alone["tokens"] and turns[1]["position"] == alone["position"]
    assert "begins with this system message" in lines[0]
    assert lines[1] == "jaxkv: system message: Be brief."


def test_another_policy(chat):
    change = "/policy window:window=17"
    turns, lines = chat("Hello", "/policy", change, "Hello", "/policy window:window=16", change)
    lines = [line for line in lines if line.startswith("jaxkv: ")]  # without progress
    assert lines[0].startswith("jaxkv: streaming:sinks=4,window=252") and "position 12" in lines[0]
    assert re.match(r"jaxkv: compiling \d+ programs for window:window=17.* a minute", lines[1])
    assert lines[2].startswith("jaxkv: window:window=17")
    assert "the conversation is empty, because a cache cannot be converted" in lines[2]
    assert turns[1]["position"] == 12
    assert lines[-1] == lines[2] and "window=16" in lines[-2]  # compiled by this process


def test_ctrl_c_while_a_policy_compiles(chat, press):
    """The conversation goes on under the policy it had, and `/policy` can be given again."""
    press(models.Conversation, "warm_up", 1)
    change = "/policy window:window=16"
    turns, lines = chat("Hello", change, "And?", change, "Hello")
    stopped = "jaxkv: stopped; the conversation goes on under streaming"
    (at,) = (i for i, line in enumerate(lines) if line.startswith(stopped))
    assert [turn["position"] for turn in turns] == [12, 23, 12]
    assert any(line.startswith("jaxkv: window:window=16") for line in lines[at:])


def test_save_and_load(chat, tmp_path):
    path = tmp_path / "a b"
    turns, lines = chat("Hello", f"/save {path}", "And?", f"/load {path}", "And?")
    assert turns[1]["tokens"] == turns[2]["tokens"] and turns[2]["position"] == 23
    assert "saved" in lines[0] and "2 messages, position 12" in lines[1]


def test_a_session_continues_after_a_restart(run, model, stdin, tmp_path):
    """Two chats with one file answer as one chat does, and the file holds the last line."""

    def turns(text: str, *words: str):
        stdin(text.encode())
        ran = run("chat", "--model", model, "--max-new-tokens", 9, "--json", *words)
        return [(turn["tokens"], turn["position"]) for turn in ran.json["turns"]], ran.err

    session = ("--session", str(tmp_path / "talk"))
    uninterrupted, _ = turns("Hello\nAnd?\n")
    first_part, told = turns("Hello\n", *session)
    assert first_part == uninterrupted[:1] and "loaded" not in told
    resumed, told = turns("And?\n", *session)
    assert resumed == uninterrupted[1:] and "2 messages, position 16" in told
    turns("/reset\n", *session)
    assert "0 messages, position 0" in turns("", *session)[1]


def test_a_session_continues_under_its_own_policy(run, model, stdin, tmp_path):
    """Also one that `/policy` chose, and one that `/load` names."""
    path = tmp_path / "talk"

    def answers(text: str, *words: object):
        stdin(text.encode())
        ran = run("chat", "--model", model, "--max-new-tokens", 5, "--json", *words)
        return [turn["tokens"] for turn in ran.json["turns"]], ran

    window = "window:window=17"
    expected, _ = answers("Hello\nAnd?\n", "--policy", window)
    answers(f"/policy {window}\nHello\n", "--session", path)
    kept = path.read_bytes()
    for words in ((), ("--policy", window)):
        path.write_bytes(kept)
        resumed, ran = answers("And?\n", "--session", path, *words)
        assert resumed == expected[1:] and ran.json["policy"].startswith(window)
        (line,) = (line for line in ran.err.splitlines() if "loaded" in line)
        assert "2 messages, position 12" in line and f"under {window}" in line
    path.write_bytes(kept)
    assert answers(f"/load {path}\nAnd?\n")[0] == expected[1:]


def edited(raw: bytes, **notes) -> bytes:
    """A session with other notes, as a hand that also knows its checksum would write them."""
    with np.load(io.BytesIO(raw)) as file:
        arrays = dict(file)
    header = json.loads(str(arrays["header"]))
    header["notes"] |= notes
    if "checksum" not in notes:
        rest = {name: value for name, value in header["notes"].items() if name != "checksum"}
        header["notes"]["checksum"] = session._checksum(rest)
    np.savez(out := io.BytesIO(), **arrays | {"header": np.array(json.dumps(header))})
    return out.getvalue()


def flipped(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :]


# Fault -> the file, more flags, and words of the message.
UNUSABLE = {
    "policy": (bytes, ("--policy", "streaming"), "own policy: .*window=17.* has streaming:"),
    "dtype": (bytes, ("--dtype", "bfloat16"), "own format: .* has float32, .* has bfloat16"),
    "system": (bytes, ("--system", "Be long."), "own system message"),
    "model": (lambda raw: edited(raw, model="other 123"), (), "own model: .* has other, .* tiny"),
    "version": (lambda raw: edited(raw, version="jaxkv 9"), (), "own version: .* has jaxkv 9"),
    "old policy": (lambda raw: edited(raw, policy="fifo:n=4"), (), "fifo:n=4, .* unknown policy"),
    "edited": (lambda raw: edited(raw, lengths=[3], checksum=1), (), "as they were written"),
    "cut": (lambda raw: raw[: len(raw) // 2], (), "no complete session"),
    "notes": (
        lambda raw: flipped(raw, raw.index("jaxkv chat".encode("utf-32-le"))),
        (),
        "no complete session",
    ),
    "empty": (lambda raw: b"", (), "no complete session"),
}


@pytest.fixture(scope="module")
def session_bytes(model, tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("begun") / "talk"
    talk = models.Conversation(models.load(model), "window:window=17")
    assert "".join(talk.say("Hello", max_new_tokens=5))
    session.save(path, talk)
    return path.read_bytes()


@pytest.mark.parametrize("case", UNUSABLE)
def test_an_unusable_session_is_refused_before_weights_are_loaded(
    case, session_bytes, run, model, stdin, tmp_path, monkeypatch
):
    change, words, message = UNUSABLE[case]
    (path := tmp_path / "talk").write_bytes(change(session_bytes))
    monkeypatch.setattr("jaxkv.models.loading.llm.load_weights", None)
    stdin(b"Hello\n")
    ran = run("chat", "--model", model, "--session", path, *words)
    (line,) = ran.err.splitlines()
    assert (ran.code, ran.out) == (2, "") and line.startswith("jaxkv: error: ")
    assert str(path) in line and re.search(message, line), line
    assert path.read_bytes() == change(session_bytes)


def test_a_message_that_begins_with_a_slash(chat):
    turns, lines = chat("//help", "see http://example.org")
    assert [turn["user"] for turn in turns] == ["/help", "see http://example.org"] and not lines


def test_a_session_that_cannot_be_written_is_refused_before_the_model(run, model, tmp_path):
    ran = run("chat", "--model", model, "--session", tmp_path / "no" / "talk")
    assert ran.code == 2 and ran.err.count("\n") == 1
    assert "--session needs a folder that exists, got" in ran.err
