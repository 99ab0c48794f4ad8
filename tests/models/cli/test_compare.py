"""`jaxkv compare`."""

from __future__ import annotations

import json
import math
import os
import signal

import pytest

from jaxkv.models.tools.compare import defaults

POLICIES = ("full", "window:window=16", "recompute:window=16")


def test_table_and_files(run, model, text, tmp_path):
    pytest.importorskip("matplotlib")
    chosen = [word for policy in POLICIES for word in ("--policy", policy)]
    flags = ("--max-tokens", 100, "--chunk", 50, "--block", 40)
    out = tmp_path / "new" / "out"
    ran = run("compare", "--model", model, "--text", text, *flags, *chosen, "--out", out)
    assert ran.code == 0 and ran.err == ""
    lines = ran.out.splitlines()
    assert lines[0].split() == [
        "policy", "perplexity", "loss", "over", "first", "state", "tokens/s", "seconds", "compiling"
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[1:]] == list(POLICIES)
    assert sorted(path.name for path in out.iterdir()) == ["compare.json", "compare.png"]
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((out / "compare.json").read_text())
    assert (record["text"], record["tokens"], record["block"]) == ("text.txt", 100, 40)
    full, window, recompute = record["policies"]
    assert [(b["start"], b["end"]) for b in full["blocks"]] == [(1, 41), (41, 81), (81, 100)]
    assert full["blocks"][0] != window["blocks"][0]
    assert (recompute["policy"], recompute["state_bytes"]) == ("recompute:window=16", 0)
    assert full["policy_string"] == "full:max=131072,start=512,storage=float"

    again = run("compare", "--model", model, "--text", text, *flags, *chosen, "--json").json
    assert again["versions"] == record["versions"]
    assert [row["blocks"] for row in again["policies"]] == [
        row["blocks"] for row in record["policies"]
    ]


def test_default_bounded_policies_cache_equally_many_tokens():
    assert defaults(512) == ["full", "window:window=256", "streaming:sinks=4,window=252"]
    assert defaults(64) == ["full", "window:window=64", "streaming:sinks=4,window=60"]


def test_policies_after_prompts(run, model, text):
    """Three stretches, of which each scored token is one of both policies and of the baseline."""
    chosen = ("full", "snapkv:capacity=12,window=5", "window:window=16", "recompute:window=16")
    flags = [word for policy in chosen for word in ("--policy", policy)]
    sizes = ("--prompt-tokens", 40, "--stretches", 3, "--block", 7)
    record = run("compare", "--model", model, "--text", text, *sizes, *flags, "--json").json
    scored = 211 // 3 - 41
    assert (record["stretches"], record["prompt"], record["tokens"]) == (3, 40, 3 * (41 + scored))
    full, snapkv, *_ = record["policies"]
    assert [row["predictions"] for row in record["policies"]] == [3 * scored] * 4
    assert full["blocks"][0]["start"] == 41 and full["blocks"][-1]["end"] == 41 + scored
    assert full["over_first"]["mean"] == 0
    for row in record["policies"][1:]:
        assert math.isclose(row["loss"] - full["loss"], row["over_first"]["mean"], abs_tol=1e-6)
        assert row["over_first"]["two_errors"] > 0
    assert snapkv["over_first"]["mean"] != 0


def test_ctrl_c_within_the_first_prompt(run, model, text, monkeypatch):
    def pressing(streams, prompt):
        os.kill(os.getpid(), signal.SIGINT)
        yield 0

    monkeypatch.setattr("jaxkv.models.generation.shared_prompt.read", pressing)
    flags = ("--policy", "keydiff:capacity=8", "--prompt-tokens", 60, "--max-tokens", 100)
    ran = run("compare", "--model", model, "--text", text, *flags)
    said = "keydiff:capacity=8 is scored on the first 0 of 39 predictions"
    assert (ran.code, ran.out, ran.err) == (130, "", f"jaxkv: interrupted: {said}\n")
