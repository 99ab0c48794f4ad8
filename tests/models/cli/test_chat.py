"""`jaxkv chat`, with lines on standard input."""

from __future__ import annotations

import io
import json
import os
import re
import signal

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


def test_empty_input_exits_with_code_0(run, model, stdin):
    stdin(b"")
    ran = run("chat", "--model", model)
    assert (ran.code, ran.out) == (0, "")


def test_ctrl_c_ends_only_the_answer(run, model, stdin, monkeypatch):
    say = models.Conversation.say

    def pressed(self, *words):
        for number, piece in enumerate(say(self, *words)):
            if number == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield piece

    monkeypatch.setattr(models.Conversation, "say", pressed)
    stdin(b"Hello\n")
    ran = run("chat", "--model", model, "--max-new-tokens", 10**9, "--ignore-eos", "--json")
    (turn,) = ran.json["turns"]
    assert turn["finish_reason"] == "interrupted" and turn["tokens"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_at_the_prompt_exits(run, model, stdin, monkeypatch):
    def pressed():
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxkv.cli.chat._piped", pressed)
    stdin(b"")
    ran = run("chat", "--model", model, "--json")
    assert ran.code == 130 and json.loads(ran.out)["turns"] == []


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
    assert ran.code == 2 and "/reset" not in ran.err


def test_a_message_beyond_the_trained_context(run, model, stdin, monkeypatch):
    """In a pipe it is an error; at a terminal the turn is refused and the chat goes on."""
    flags = ("--model", model, "--policy", "full", "--max-new-tokens", 5, "--json")
    long, rule = "x" * 600, "under full a prompt must fit the trained context of 512 tokens, got 60"
    stdin(f"{long}\n".encode())
    ran = run("chat", *flags)
    assert (ran.code, ran.out) == (2, "") and f"jaxkv: error: {rule}" in ran.err.splitlines()[-1]
    said = iter([long, "Hello", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    ran = run("chat", *flags)
    assert [turn["user"] for turn in ran.json["turns"]] == ["Hello"]
    assert any(line.startswith(f"jaxkv: error: {rule}") for line in ran.err.splitlines())


def test_help_names_every_command(chat):
    turns, lines = chat("/help")
    names = ("/help", "/reset", "/system", "/policy", "/save", "/load", "/exit")
    assert turns == [] and all(any(name in line for line in lines) for name in names)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/hepl", "unknown command '/hepl'; did you mean /help? /help lists"),
        ("/RESET", "did you mean /reset?"),
        ("/xyzzy", "unknown command '/xyzzy'; /help lists"),
        ("/save", "/save needs FILE; write /save FILE"),
        ("/exit now", "/exit takes nothing after it, got 'now'; write /exit"),
        ("/reset now", "/reset takes nothing after it, got 'now'; write /reset"),
        ("/policy windw", "unknown policy 'windw'; did you mean 'window'?"),
        ("/load absent", "no such file: absent"),
        ("/save /no/such/folder/file", "choose another place"),
        ("/save ~nobody-of-this-name/x", "begins with the home of an unknown user"),
        ("/load ~nobody-of-this-name/x", "begins with the home of an unknown user"),
        ("/load " + "x" * 300, "no such file"),
        ("/save " + "x" * 300, "choose another"),
        ("/save\tx/y/z", "choose another place"),
    ],
)
def test_a_wrong_command_is_one_line_and_the_chat_goes_on(chat, line, words):
    turns, lines = chat("Hello", line, "And?")
    assert len(lines) == 1 and lines[0].startswith("jaxkv: error: ") and words in lines[0]
    assert [turn["position"] for turn in turns] == [12, 23]


def test_reset_begins_an_empty_conversation(chat):
    turns, lines = chat("Hello", "/reset", "Hello")
    assert turns[0] == turns[1] | {"tokens_per_second": turns[0]["tokens_per_second"]}
    assert lines == ["jaxkv: the conversation is empty"]


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


def test_ctrl_c_while_a_policy_compiles(chat, monkeypatch):
    """The conversation goes on under the policy it had, and `/policy` can be given again."""
    warm_up = models.Conversation.warm_up

    def interrupted(talk, *arguments):
        if talk.policy.startswith("window"):
            monkeypatch.setattr(models.Conversation, "warm_up", warm_up)
            raise KeyboardInterrupt
        warm_up(talk, *arguments)

    monkeypatch.setattr(models.Conversation, "warm_up", interrupted)
    change = "/policy window:window=16"
    turns, lines = chat("Hello", change, "And?", change, "Hello")
    assert lines[0].startswith("jaxkv: stopped; the conversation goes on under streaming")
    assert [turn["position"] for turn in turns] == [12, 23, 12]
    assert any(line.startswith("jaxkv: window:window=16") for line in lines[1:])


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
    "weights": (bytes, ("--weights", "int8"), "own format: .* has float32, .* float32 int8"),
    "system": (bytes, ("--system", "Be long."), "own system message"),
    "model": (lambda raw: edited(raw, model="other 123"), (), "own model: .* has other, .* tiny"),
    "version": (lambda raw: edited(raw, version="jaxkv 9"), (), "own version: .* has jaxkv 9"),
    "old policy": (lambda raw: edited(raw, policy="fifo:n=4"), (), "fifo:n=4, .* unknown policy"),
    "old field": (lambda raw: edited(raw, policy="window:width=4"), (), "does not have.*width"),
    "edited": (lambda raw: edited(raw, lengths=[3], checksum=1), (), "as they were written"),
    "text": (lambda raw: edited(raw, messages="Hello"), (), "messages is 'Hello'"),
    "role": (lambda raw: edited(raw, messages=[{"role": 3, "content": ""}]), (), "messages is"),
    "length": (lambda raw: edited(raw, lengths=[-1]), (), r"lengths is \[-1\]"),
    "absent": (lambda raw: edited(raw, policy=None), (), "policy is None"),
    "cut": (lambda raw: raw[: len(raw) // 2], (), "no complete session"),
    "flipped": (lambda raw: flipped(raw, len(raw) // 2), (), "no complete session"),
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


@pytest.mark.parametrize("name, words", [
    ("absent/talk", "absent"),
    ("text", "no complete session"),
    ("", "this is a folder"),
    ("~nobody at all/talk", "nobody at all"),
])  # fmt: skip
def test_a_bad_session_ends_before_the_first_message(run, model, stdin, tmp_path, name, words):
    (tmp_path / "text").write_text("x")
    stdin(b"Hello\n")
    path = name if name.startswith("~") else str(tmp_path / name)
    ran = run("chat", "--model", model, "--session", path)
    assert (ran.code, ran.out) == (2, "") and words in ran.err


def test_a_session_with_a_bad_scale_ends_with_one_line(run, model, stdin, tmp_path):
    path, policy = tmp_path / "talk", "window:window=64,storage=int8"
    talk = models.Conversation(models.load(model), policy)
    assert "".join(talk.say("Hello", max_new_tokens=9))
    first, *later_layers = talk.stream.decoding.states
    first = first._replace(v=first.v._replace(scale=first.v.scale.at[0, 0, 2].set(-1)))
    talk.stream.decoding = talk.stream.decoding._replace(states=(first, *later_layers))
    session.save(path, talk)
    stdin(b"And?\n")
    ran = run("chat", "--model", model, "--session", path, "--policy", policy)
    assert (ran.code, ran.out) == (2, "")
    *_, last = ran.err.splitlines()
    assert last.startswith("jaxkv: error: scales of int8 rows in a snapshot must be finite")
    assert str(path) in last and " has -1; " in last and "older copy" in last


def test_a_message_that_begins_with_a_slash(chat):
    turns, lines = chat("//help", "see http://example.org")
    assert [turn["user"] for turn in turns] == ["/help", "see http://example.org"] and not lines


def test_a_session_keeps_its_system_message(run, model, stdin, tmp_path):
    path = str(tmp_path / "talk")
    for system, code in (("Be brief.", 0), ("Be brief.", 0), ("Be long.", 2)):
        stdin(b"")
        ran = run("chat", "--model", model, "--session", path, "--system", system)
        assert ran.code == code
    assert "has 'Be brief.', --system is 'Be long.'; leave --system out" in ran.err
