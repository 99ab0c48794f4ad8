"""`jaxkv perplexity`."""

from __future__ import annotations

import math

import numpy as np

FIELDS = {
    "perplexity", "loss", "tokens", "predictions", "policy", "state_bytes", "chunk", "seconds",
    "compile_seconds", "blocks", "seed", "versions",
}  # fmt: skip


def test_json(run, model, text):
    flags = ("--policy", "window:window=32", "--chunk", 64, "--max-tokens", 150, "--block", 60)
    found = run("perplexity", "--model", model, "--text", text, *flags, "--json").json
    assert set(found) == FIELDS
    assert (found["tokens"], found["predictions"]) == (150, 149)
    assert math.isclose(found["perplexity"], math.exp(found["loss"]))
    assert [(b["start"], b["end"]) for b in found["blocks"]] == [(1, 61), (61, 121), (121, 150)]
    weights = [b["end"] - b["start"] for b in found["blocks"]]
    mean = np.average([b["loss"] for b in found["blocks"]], weights=weights)
    assert math.isclose(mean, found["loss"], rel_tol=1e-6)


def test_about_twenty_blocks(run, model, text):
    flags = ("--policy", "window:window=32", "--chunk", 64, "--json")
    found = run("perplexity", "--model", model, "--text", text, *flags).json
    assert found["tokens"] == 1 + len(text.read_bytes())  # one token per byte, after a BOS
    assert len(found["blocks"]) == 20


def test_table(run, model, text):
    flags = ("--policy", "window:window=32", "--chunk", 64, "--max-tokens", 150)
    ran = run("perplexity", "--model", model, "--text", text, *flags)
    assert ran.code == 0 and ran.out.startswith("perplexity ") and "149 predictions" in ran.out


def test_the_reference_perplexity(run, stories, shared):
    file = shared / "text" / "tinystories" / "valid.txt"
    flags = ("--policy", "full", "--max-tokens", 512, "--chunk", 256, "--json")
    found = run("perplexity", "--model", stories, "--text", file, *flags).json
    assert math.isclose(found["perplexity"], 3.7107, rel_tol=1e-3)
