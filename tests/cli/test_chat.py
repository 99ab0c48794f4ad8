"""`jaxkv chat`, with lines on standard input."""

from __future__ import annotations

import json
import os
import signal

from jaxkv import models


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
