"""Programs for accelerators, compiled on a machine without one: kernels, bytes, expected time.

The compilers of XLA for an H100 and for a TPU v5e run on any CPU (extras gpu-check and tpu-check).
No device has run these programs. So times follow from a simple model: the bytes that all kernels
move over the bandwidth, or the products over the peak if that takes longer, and on a GPU 1.4
microseconds for each kernel, which is what a step of SmolLM2-135M took on an H200.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from jaxkv.errors import UserError
from jaxkv.evals.benchmarks import compiled_worker
from jaxkv.evals.benchmarks.compiled_worker import ENGINE_BATCH, TRAINED, CompiledCase
from jaxkv.evals.lib.ahead import reports_of
from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.table import table
from jaxkv.evals.lib.timing import bar
from jaxkv.state.memory import show

WORKER = compiled_worker.__name__


class Device(NamedTuple):
    """What a device can do. bandwidth: bytes a second. peak: FLOP a second in bfloat16. launch:
    seconds of a kernel that waits for nothing. memory: bytes. package, extra: of the compiler."""

    bandwidth: float
    peak: float
    launch: float
    memory: float
    package: str
    extra: str


V5E = Device(819e9, 197e12, 0.0, 16e9, "libtpu", "tpu-check")
DEVICES = {
    "h100": Device(3.35e12, 989e12, 1.4e-6, 80e9, "jax_cuda12_plugin", "gpu-check"),
    "v5e": V5E,
    "v5e-8": V5E,  # each of eight
}
# The most kernels that a layer may have, by program and policy of SmolLM2-135M on an H100.
MOST_KERNELS = {
    "prefill": {"full": 22, "streaming": 22},
    "decode": {
        "streaming": 16, "reservoir": 20, "balance-stream": 20, "stratified": 20, "magicpig": 24,
    },
}  # fmt: skip
MAX_MOVED = 1.1  # bytes of a decode step on a v5e over weights and caches
MAX_COLLECTIVES = 2  # of a layer: one after attention, one after the MLP
FLAGS = (flag("--devices", tuple(DEVICES), choices=DEVICES),)


def measure(run: Run) -> dict[str, Any]:
    """The reports of all cases, by name."""
    for name in run.options.devices:
        device = DEVICES[name]
        if find_spec(device.package) is None:
            raise UserError(
                f"to compile for {name} needs {device.package}, which is not installed; run pip "
                f"install -e '.[{device.extra}]'"
            )
    cases: dict[str, dict[str, Any]] = {}
    for name in run.options.devices:
        for report in reports_of(WORKER, name):
            case = report.pop("case")
            cases[case] = report | {"expected_seconds": expected_seconds(DEVICES[name], report)}
            print(f"{case}: {report['kernels']:.0f} kernels", flush=True)
    return {"cases": cases, "bars": bars(cases)}


def expected_seconds(device: Device, report: Mapping[str, Any]) -> float:
    """The time of a step by the model of this module."""
    limit = max(report["moved_bytes"] / device.bandwidth, report["flops"] / device.peak)
    return limit + device.launch * report["kernels"]


def bars(cases: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The bars on kernels, conditions, copies and bytes."""
    lines = []
    for name, report in cases.items():
        device, model, program, policy = CompiledCase.of(name)
        layer = report.get("of_layer", report)
        kind = policy.partition(":")[0]
        if device == "v5e" and program == "decode":
            ratio = report["moved_bytes"] / report["argument_bytes"]
            lines.append(bar(f"{name}: bytes over weights and caches", ratio, "<=", MAX_MOVED))
        if device == "v5e-8":
            share = report["device_bytes"] / DEVICES[device].memory
            lines.append(bar(f"{name}: share of a device's memory", share, "<=", 1))
            title = f"{name}: collectives of a layer"
            lines.append(bar(title, layer["collectives"], "<=", MAX_COLLECTIVES))
        if device != "h100" or model != "SmolLM2-135M" or kind not in MOST_KERNELS.get(program, {}):
            continue
        most = MOST_KERNELS[program][kind]
        lines.append(bar(f"{name}: kernels of a layer", layer["kernels"], "<=", most))
        if program == "decode":
            for count in ("host_conditions", "copies"):
                title = f"{name}: {count.replace('_', ' ')} of a layer"
                lines.append(bar(title, layer[count], "<=", 0))
    return lines


def cases_table() -> str:
    """A row per case."""
    results = read("compiled")["results"]
    heads = ("device", "model", "program", "policy", "kernels of a layer", "copies", "conditions",
             "collectives", "largest float32", "bytes over weights and caches", "temporary",
             "in all", "expected (ms)")  # fmt: skip
    rows = []
    for name, report in results["cases"].items():
        device, model, program, policy = CompiledCase.of(name)
        layer = report.get("of_layer", report)
        rows.append(
            (
                device,
                model,
                program,
                f"`{policy}`",
                f"{layer['kernels']:g}",
                f"{layer['copies']:g}",
                f"{layer['host_conditions']:g}",
                f"{layer['collectives']:g}",
                " x ".join(map(str, report["largest_float32"])),
                f"{report['moved_bytes'] / report['argument_bytes']:.2f}",
                show(report["temporary_bytes"]),
                show(report["device_bytes"]),
                f"{1e3 * report['expected_seconds']:.3g}",
            )
        )
    caption = (
        "In bfloat16. Prefill: one layer, one sequence, a chunk of 1,024 tokens. Decode: a token "
        f"after 2,048 of one sequence. Engine: a token of each of {ENGINE_BATCH} sequences. "
        f"Training: a step of {TRAINED[0]} samples of 2,048 tokens; the policy names its sinks. "
        "Except for prefill, kernels, copies, conditions and collectives are those that a layer "
        "adds, and the rest is of all layers. Bytes are those of one device, v5e-8 one of eight."
    )
    return table(heads, rows, caption)


TABLES = {"compiled": cases_table}
MEASURE = Measure("compiled", measure, FLAGS)

if __name__ == "__main__":
    run(MEASURE)
