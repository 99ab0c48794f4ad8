"""`jaxkv advise`."""

from __future__ import annotations

import json

import pytest

from jaxkv.models.tools import measurement
from tests.models.cli.test_bad_input import refused
from tests.tiny import write_sink_tokens

BUDGET = 11000  # bytes: 41 tokens under streaming
PARTS = ("--prompt-tokens", 64, "--score-tokens", 16)
SIZES = (*PARTS, "--budget", BUDGET)
CHOSEN = ("--policy", "streaming", "--policy", "snapkv", "--policy", "topk")
POLICIES = {"streaming:sinks=4,window=37", "snapkv:capacity=24,window=12",
            "topk:share=0.466,sinks=4,window=16"}  # fmt: skip


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("It was a bright cold day in April. " * 20, encoding="utf-8")
    return path


def test_table_and_files(run, model, text, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "out"
    ran = run("advise", "--model", model, "--text", text, *SIZES, *CHOSEN, "--out", out)
    assert ran.code == 0, ran.err
    assert ran.err.startswith("jaxkv: measures full attention and 3 others on 8 stretches of 80 ")
    lines = ran.out.splitlines()
    assert lines[0].split() == [
        *("loss", "over", "full", "KL", "to", "full", "same", "top-1", "over", "best"),
        *("far", "repeats", "ms/token", "state", "prompt", "policy"),
    ]
    ranks = {line.split()[-1]: line.split()[0] for line in lines[1:5]}
    assert set(ranks) == {"full", *POLICIES} and lines[1].endswith("full")
    assert sorted(ranks.values()) == ["-", "-", "1", "2"] and lines[4].split()[-1][:4] == "topk"
    assert f'jaxkv generate "Once upon a time" --model {model} --policy' in ran.out
    assert sorted(path.name for path in out.iterdir()) == ["advise.json", "advise.png"]
    report = json.loads((out / "advise.json").read_text())
    assert (report["text"], report["budget"], report["tokens"]) == ("text.txt", BUDGET, 8 * 81)
    assert (report["stretches"], report["prompt"], report["scored"]) == (8, 64, 16)
    assert not report["interrupted"]
    for row in report["policies"][1:]:
        assert row["within_budget"] == (row["state_bytes"] <= BUDGET)
        assert row["over_full"]["two_errors"] > 0 and row["over_full"]["count"] == 8 * 16
    again = run("advise", "--model", model, "--text", text, *SIZES, *CHOSEN, "--json")
    assert [row["loss"] for row in again.json["policies"]] == [
        row["loss"] for row in report["policies"]
    ]


def test_two_learned_sinks(run, model, text, tmp_path):
    """No head predicts the second one."""
    sinks = write_sink_tokens(tmp_path / "sinks.safetensors", model, 2)
    ran = run("advise", "--model", model, "--text", text, "--sinks", sinks, *SIZES, *CHOSEN[:4],
              "--json")  # fmt: skip
    assert len(ran.json["policies"]) == 3
    assert all(row["loss"] > 0 for row in ran.json["policies"])


def test_ctrl_c_keeps_what_was_measured(run, model, text, press):
    """It comes while streaming is read, after the policies that share a prompt."""
    press(measurement, "hidden_by_chunk", 8 * 3)
    ran = run("advise", "--model", model, "--text", text, *SIZES, *CHOSEN)
    assert ran.code == 130
    said = "2 of 3 policies are measured, times per token are not"
    assert ran.err.endswith(f"jaxkv: interrupted: {said}\n")
    names = [line.split()[-1] for line in ran.out.splitlines()[1:4]]
    assert names[:2] == ["full", "snapkv:capacity=24,window=12"]


def test_bad_input(run, model, text, tmp_path, monkeypatch):
    def advise_with(*flags):
        sizes = PARTS if "--budget" in flags else SIZES
        return run("advise", "--model", model, "--text", text, *sizes, *flags)

    short = advise_with("--max-tokens", 80)
    refused(short, "at least 81 tokens, got 80", "longer text", "--prompt-tokens")
    refused(advise_with("--budget", "1KB"), "--budget must be at least", "got 1000 bytes", "raise")
    big = ("--policy", "window:window=60", "--policy", "snapkv:capacity=60")
    refused(advise_with(*big), "for snapkv:capacity=60", "bytes", "raise it")
    wide = advise_with("--budget", "1MB", "--policy", "window:window=65")
    refused(wide, "caches 65 tokens, got a prompt of 64", "raise --prompt-tokens")
    full = ("--policy", "full", *CHOSEN)
    refused(advise_with(*full), "full is always measured", "got --policy full", "leave it out")
    refused(advise_with("--stretches", 999), "the text has", "got --stretches 999", "lower")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(advise_with("--out", tmp_path), "matplotlib", "pip install 'jaxkv[models]'")
