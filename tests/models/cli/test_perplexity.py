"""`jaxkv perplexity`."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal

import numpy as np
import pytest

FIELDS = {
    "perplexity", "loss", "tokens", "prompt", "predictions", "interrupted", "policy",
    "state_bytes", "chunk", "seconds", "compile_seconds", "blocks", "seed", "versions",
}  # fmt: skip


def test_json(run, model, text):
    flags = ("--policy", "window:window=32", "--chunk", 64, "--max-tokens", 150, "--block", 60)
    record = run("perplexity", "--model", model, "--text", text, *flags, "--json").json
    assert set(record) == FIELDS
    assert (record["tokens"], record["predictions"]) == (150, 149)
    assert math.isclose(record["perplexity"], math.exp(record["loss"]))
    assert [(b["start"], b["end"]) for b in record["blocks"]] == [(1, 61), (61, 121), (121, 150)]
    weights = [b["end"] - b["start"] for b in record["blocks"]]
    mean = np.average([b["loss"] for b in record["blocks"]], weights=weights)
    assert math.isclose(mean, record["loss"], rel_tol=1e-6)


def test_tokens_after_a_prompt(run, model, text):
    flags = ("--max-tokens", 100, "--json", "--prompt-tokens", 60, "--policy")
    by_policy = {
        policy: run("perplexity", "--model", model, "--text", text, *flags, policy).json
        for policy in ("full", "topk:share=1", "keydiff:capacity=8")
    }
    full, every, some_tokens = by_policy.values()
    assert (full["prompt"], full["predictions"]) == (60, 39)
    assert (full["blocks"][0]["start"], full["blocks"][-1]["end"]) == (61, 100)
    assert math.isclose(full["loss"], every["loss"], abs_tol=1e-5)
    assert abs(full["loss"] - some_tokens["loss"]) > 1e-4


def test_table(run, model, text):
    flags = ("--policy", "window:window=32", "--chunk", 64, "--max-tokens", 150)
    ran = run("perplexity", "--model", model, "--text", text, *flags)
    assert ran.code == 0 and ran.out.startswith("perplexity ") and "149 predictions" in ran.out
    record = run("perplexity", "--model", model, "--text", text, *flags, "--json").json
    assert len(record["blocks"]) == 19  # of eight tokens, by default about twenty


def test_the_reference_perplexity(run, stories, shared):
    file = shared / "text" / "tinystories" / "valid.txt"
    flags = ("--policy", "full", "--max-tokens", 512, "--chunk", 256, "--json")
    record = run("perplexity", "--model", stories, "--text", file, *flags).json
    assert math.isclose(record["perplexity"], 3.7107, rel_tol=1e-3)


@pytest.fixture
def pressed_at(monkeypatch):
    """Press Ctrl-C when a chunk of a text is scored, by its number in the process."""

    def press(number: int) -> None:
        # `models.score` is the function.
        for name in ("jaxkv.models.generation.score", "jaxkv.models.tools.measurement"):
            module = importlib.import_module(name)
            by_chunk, count = module.hidden_by_chunk, iter(range(10**6))

            def pressing(*words, by_chunk=by_chunk, count=count):
                for chunk in by_chunk(*words):
                    if next(count) == number:
                        os.kill(os.getpid(), signal.SIGINT)
                    yield chunk

            monkeypatch.setattr(module, "hidden_by_chunk", pressing)

    return press


def test_ctrl_c_keeps_what_was_scored(run, model, text, pressed_at):
    flags = ("--policy", "window:window=32", "--chunk", 20, "--json")
    uninterrupted = run("perplexity", "--model", model, "--text", text, *flags, "--block", 20).json
    pressed_at(2)
    ran = run("perplexity", "--model", model, "--text", text, *flags, "--block", 20)
    record = json.loads(ran.out)
    assert ran.code == 130 and record["predictions"] == 60
    assert record["interrupted"] and not uninterrupted["interrupted"]
    assert record["blocks"] == uninterrupted["blocks"][:3]
    total = uninterrupted["predictions"]
    said = f"window:window=32 is scored on the first 60 of {total} predictions"
    assert ran.err == f"jaxkv: interrupted: {said}\n"


def test_ctrl_c_keeps_what_was_compared(run, model, text, pressed_at):
    words = ("--policy", "window:window=32", "--policy", "full", "--policy", "window:window=16")
    pressed_at(5)
    flags = ("--chunk", 20, "--max-tokens", 81)
    ran = run("compare", "--model", model, "--text", text, *flags, *words)
    assert ran.code == 130
    rows = [line.split() for line in ran.out.splitlines()]
    assert rows[0][-1] == "predictions"
    assert [(row[0], row[-1]) for row in rows[1:]] == [("window:window=32", "80"), ("full", "40")]
    said = "full is scored on the first 40 of 80 predictions; 1 more not scored"
    assert ran.err == f"jaxkv: interrupted: {said}\n"
