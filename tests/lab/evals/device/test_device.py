"""The runs for an accelerator work with tiny sizes on a CPU, and go on where they stopped."""

from __future__ import annotations

import json

import pytest

from jaxkv.evals.device import flash, rates
from jaxkv.evals.lib import record
from jaxkv.evals.lib.run import run

SMALL = ["--quick", "--models", "SmolLM2-135M", "--lengths", "24", "--batches", "1", "2", "--new",
         "4", "--rounds", "1"]  # fmt: skip


def results(trials, name):
    return json.loads((trials / f"{name}.json").read_text("utf-8"))["results"]


def test_flash_attention_is_compared_with_float32(trials):
    run(flash.MEASURE, ["--quick"])
    bars = results(trials, "device_flash")["bars"]
    assert len(bars) == 4 and all(bar["met"] and bar["value"] > 0 for bar in bars)


def test_a_kernel_is_needed_beyond_a_trial(monkeypatch, capsys):
    monkeypatch.setattr(record, "run_metadata", lambda *_: {"commit": "x", "data": {}})
    with pytest.raises(SystemExit) as error:
        run(flash.MEASURE, [])
    said = capsys.readouterr().err
    assert error.value.code == 2 and "there is no kernel for cpu; give --quick for a trial" in said


def test_rates_go_on_where_they_stopped(trials, capsys):
    small = [*SMALL, "--policies", "full", "streaming"]
    with pytest.raises(SystemExit) as error:
        run(rates.MEASURE, [*small, "--minutes", "0"])
    assert error.value.code == 2
    assert "0 of 6 cases are done after 0 minutes; the same command" in capsys.readouterr().err
    run(rates.MEASURE, [*SMALL, "--policies", "full"])
    capsys.readouterr()
    assert len(list((trials / "device_rates.parts").iterdir())) == 3
    run(rates.MEASURE, small)
    assert capsys.readouterr().out.count("\npart ") >= 2
    by_policy = results(trials, "device_rates")["rates"]["SmolLM2-135M"]
    titles = {"prefill 1 x 24", "decode 1 x 24", "decode 2 x 24"}
    assert {policy: set(row) for policy, row in by_policy.items()} == {
        "full": titles, "streaming": titles,
    }  # fmt: skip
    assert all(cell["median"] > 0 for row in by_policy.values() for cell in row.values())


def test_transformers_runs_the_same_shapes(trials):
    pytest.importorskip("torch", reason="no torch: pip install --group peers")
    run(rates.MEASURE, [*SMALL, "--policies", "transformers"])
    assert len(results(trials, "device_rates")["rates"]["SmolLM2-135M"]["transformers"]) == 3
