"""`jaxkv perplexity` and `jaxkv compare`."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from jaxkv.models.tools import measurement
from jaxkv.models.tools.compare import defaults

FIELDS = {
    "perplexity", "loss", "tokens", "prompt", "predictions", "interrupted", "policy",
    "state_bytes", "chunk", "seconds", "compile_seconds", "blocks", "seed", "versions",
    "policy_string", "over_first", "tokens_per_second",
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


def test_ctrl_c_keeps_what_was_scored(run, model, text, press):
    flags = ("--policy", "window:window=32", "--chunk", 20, "--json")
    uninterrupted = run("perplexity", "--model", model, "--text", text, *flags, "--block", 20).json
    press(measurement, "hidden_by_chunk", 2, items=True)
    ran = run("perplexity", "--model", model, "--text", text, *flags, "--block", 20)
    record = json.loads(ran.out)
    assert ran.code == 130 and record["predictions"] == 60
    assert record["interrupted"] and not uninterrupted["interrupted"]
    assert record["blocks"] == uninterrupted["blocks"][:3]
    total = uninterrupted["predictions"]
    said = f"window:window=32 is scored on the first 60 of {total} predictions"
    assert ran.err == f"jaxkv: interrupted: {said}\n"


def test_ctrl_c_keeps_what_was_compared(run, model, text, press):
    words = ("--policy", "window:window=32", "--policy", "full", "--policy", "window:window=16")
    press(measurement, "hidden_by_chunk", 5, items=True)
    flags = ("--chunk", 20, "--max-tokens", 81)
    ran = run("compare", "--model", model, "--text", text, *flags, *words)
    assert ran.code == 130
    rows = [line.split() for line in ran.out.splitlines()]
    assert rows[0][-1] == "predictions"
    assert [(row[0], row[-1]) for row in rows[1:]] == [("window:window=32", "80"), ("full", "40")]
    said = "full is scored on the first 40 of 80 predictions; 1 more not scored"
    assert ran.err == f"jaxkv: interrupted: {said}\n"


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
