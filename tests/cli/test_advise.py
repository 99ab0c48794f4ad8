"""`jaxkv advise`."""

from __future__ import annotations

import json
import os
import signal

import pytest

from jaxkv.models import advise
from tests.cli.test_bad_input import refused
from tests.tiny import write_sink_tokens

BUDGET = 6000  # bytes: 22 tokens under streaming
CHOSEN = ("--policy", "streaming", "--policy", "window:window=16")


def test_table_and_files(run, model, text, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "out"
    flags = ("--budget", BUDGET, "--out", out, *CHOSEN)
    ran = run("advise", "--model", model, "--text", text, *flags)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0].split() == [
        *("loss", "over", "full", "KL", "to", "full", "same", "top-1", "over", "best"),
        *("far", "repeats", "ms/token", "state", "policy"),
    ]
    assert lines[1].split()[0] == "-" and lines[1].endswith("full")
    found = {line.split()[-1]: line.split()[0] for line in lines[2:4]}
    assert set(found) == {"streaming:sinks=4,window=18", "window:window=16"}
    assert set(found.values()) == {"1", "2"}
    assert f'jaxkv generate "Once upon a time" --model {model} --policy' in lines[-1]
    assert sorted(path.name for path in out.iterdir()) == ["advise.json", "advise.png"]
    report = json.loads((out / "advise.json").read_text())
    assert (report["text"], report["budget"], report["tokens"]) == ("text.txt", BUDGET, 211)
    assert not report["interrupted"] and report["first_counted"] == 23
    for row in report["policies"][1:]:
        assert row["state_bytes"] <= BUDGET and row["over_full"]["two_errors"] > 0
    again = run("advise", "--model", model, "--text", text, "--budget", BUDGET, *CHOSEN, "--json")
    assert [row["loss"] for row in again.json["policies"]] == [
        row["loss"] for row in report["policies"]
    ]


def test_two_learned_sinks(run, model, text, tmp_path):
    """No head predicts the second one."""
    sinks = write_sink_tokens(tmp_path / "sinks.safetensors", model, 2)
    flags = ("--sinks", sinks, "--budget", BUDGET, *CHOSEN, "--json")
    ran = run("advise", "--model", model, "--text", text, *flags)
    assert len(ran.json["policies"]) == 3
    assert all(row["loss"] > 0 for row in ran.json["policies"])


def test_ctrl_c_keeps_what_was_measured(run, model, text, monkeypatch):
    """It comes during the third reading, after full attention and the first policy."""
    count, by_chunk = iter(range(100)), advise.hidden_by_chunk

    def pressing(*words):
        if next(count) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        yield from by_chunk(*words)

    monkeypatch.setattr(advise, "hidden_by_chunk", pressing)
    ran = run("advise", "--model", model, "--text", text, "--budget", BUDGET, *CHOSEN)
    assert ran.code == 130
    said = "1 of 2 policies are measured, times per token are not"
    assert ran.err.endswith(f"jaxkv: interrupted: {said}\n")
    assert [line.split()[-1] for line in ran.out.splitlines()[1:3]] == [
        "full", "streaming:sinks=4,window=18"
    ]  # fmt: skip


def test_bad_input(run, model, text, tmp_path, monkeypatch):
    def advise_with(*flags):
        return run("advise", "--model", model, "--text", text, *flags)

    short = ("--budget", BUDGET, "--max-tokens", 100, *CHOSEN)
    refused(advise_with(*short), "longer than a cache", "at least 151 tokens", "got 100")
    refused(advise_with("--budget", "1KB"), "--budget must be at least", "got 1000 bytes", "raise")
    refused(advise_with("--budget", "lots"), "--budget", "512MiB", "'lots'")
    refused(advise_with("--policy", "streming"), "unknown policy 'streming'", "'streaming'?")
    refused(advise_with("--policy", "snapkv"), "snapkv", "end of prefill")
    big = ("--budget", BUDGET, "--policy", "window:window=64")
    refused(advise_with(*big), "for window:window=64", "bytes", "raise it")
    full = ("--policy", "full", *CHOSEN)
    refused(advise_with(*full), "full is always measured", "got --policy full", "leave it out")
    few = ("--budget", BUDGET, "--block", 90, *CHOSEN)
    refused(advise_with(*few), "at least 8 blocks", "got --block 90", "give at most 23")
    refused(run("advise", "--model", model), "--text")
    (tmp_path / "file").write_text("x")
    refused(advise_with("--out", tmp_path / "file"), "--out needs a folder", "choose another")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(advise_with("--out", tmp_path), "matplotlib", "pip install 'jaxkv[evals]'")
