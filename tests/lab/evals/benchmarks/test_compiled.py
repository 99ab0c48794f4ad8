"""The lens on programs for accelerators: a layer has no more kernels than its record says."""

import sys

import pytest

from jaxkv.evals.benchmarks import compiled
from jaxkv.evals.lib.ahead import reports_of
from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.run import run

MODEL, STREAMING = "h100, SmolLM2-135M", "streaming:sinks=4,window=1020"
NAMES = [f"{MODEL}, prefill, full", f"{MODEL}, prefill, {STREAMING}",
         f"{MODEL}, decode, {STREAMING}", f"{MODEL}, decode, magicpig"]  # fmt: skip


@pytest.mark.gpu_check
def test_a_layer_has_no_more_kernels_than_recorded():
    recorded = read("compiled")["results"]["cases"]
    reports = {report["case"]: report for report in reports_of(compiled.WORKER, "h100", *NAMES)}
    assert [*reports] == NAMES
    for name, report in reports.items():
        for count in ("kernels", "copies", "host_conditions", "temporary_bytes"):
            assert report[count] <= recorded[name][count], (name, count)


@pytest.mark.parametrize("device, package", [("h100", "jax_cuda12_plugin"), ("v5e", "libtpu")])
def test_a_compiler_that_is_not_installed_is_one_line(device, package, monkeypatch, capsys):
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["compiled"])
    with pytest.raises(SystemExit) as error:
        run(compiled.MEASURE, ["--devices", device])
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: to compile for {device} needs {package}")
    assert said.count("\n") == 1 and "pip install" in said


def test_times_and_bars_follow_from_the_reports():
    report = {"kernels": 100, "moved_bytes": 3.35e9, "argument_bytes": 3.35e9, "flops": 1e9}
    layer = {"kernels": 17, "copies": 0, "host_conditions": 1}
    cases = {f"{MODEL}, decode, {STREAMING}": report | {"of_layer": layer}}
    expected = compiled.expected_seconds(compiled.DEVICES["h100"], report)
    assert expected == pytest.approx(1e-3 + 100 * 1.4e-6)
    assert compiled.expected_seconds(
        compiled.DEVICES["v5e"], report | {"flops": 197e12}
    ) == pytest.approx(1)
    assert [line["met"] for line in compiled.bars(cases)] == [False, False, True]
    tpu = {"v5e, Llama-3.2-1B, decode, full": report}
    assert [line["met"] for line in compiled.bars(tpu)] == [True]
