"""Agreement with other implementations: measurements of the agreement tests, as one record.

`python -m jaxkv.evals.correctness.agreement` runs these tests. They need the group peers, the extra
tpu-check, and ../shared/data. They compare logits and greedy tokens with transformers for every
family, perplexities at every chunk size with recorded ones, tokens on several virtual devices with
those on one, and measure the memory of a decode step with the TPU's compiler. If a test fails or is
skipped, nothing is written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from jaxkv.evals.lib import record
from jaxkv.evals.lib.record import ROOT
from jaxkv.evals.lib.run import Measure, Run, run
from jaxkv.evals.lib.table import table
from jaxkv.evals.lib.timing import bar
from jaxkv.models.tools.families import FAMILY_ROWS

STORIES = ROOT.parent / "shared" / "data" / "models" / "stories260K" / "model.safetensors"
TESTS = {
    "parity": "tests/models/test_parity.py",
    "perplexity": "tests/models/test_score.py",
    "devices": "tests/models/test_sharded.py",
    "tpu": "tests/lab/test_tpu.py",
}


def measure(_: Run) -> dict[str, Any]:
    """What the tests report, and the bars."""
    results = reported_by(TESTS, "--must-run=parity,tpu_check")
    return results | {"bars": bars(results)}


def reported_by(tests: dict[str, str], *options: str) -> dict[str, dict[str, Any]]:
    """The measurements of some test files, compiled with the users' optimisation level.

    Raises SystemExit if a test fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        reported = Path(folder, "tests.xml")
        command = [sys.executable, "-m", "pytest", "-m", "record or not record", *options,
                   f"--junitxml={reported}", *tests.values()]  # fmt: skip
        as_users = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=3"}
        if code := subprocess.run(command, cwd=ROOT, env=as_users).returncode:
            raise SystemExit(f"nothing is written: pytest ended with {code}")
        return {name: figures(reported, path) for name, path in tests.items()}


def bars(results: dict[str, dict[str, Any]]) -> list[dict[str, object]]:
    """The worst value of each kind against its bar."""
    logits = [
        reported["largest_logit_difference"]
        for reported in results["parity"].values()
        if "largest_logit_difference" in reported
    ]
    losses = [abs(reported["perplexity"] / reported["reference"] - 1)
              for reported in results["perplexity"].values()]  # fmt: skip
    (tpu,) = results["tpu"].values()
    early, late = (sum(tpu[f"bytes_after_{seen}"].values()) for seen in (1_000, 1_000_000))
    return [
        bar(f"largest difference of a logit from transformers', {len(logits)} models", max(logits),
            "<=", 1e-4),
        bar(f"perplexity against the reference, largest of {len(losses)} rows and chunk sizes",
            max(losses), "<=", 1e-3),
        bar("TPU v5e, 1 B, ahead of time: bytes of a decode step after 1 M tokens over 1 K",
            late / early, "<=", 1),
    ]  # fmt: skip


def figures(reported: Path, path: str) -> dict[str, dict[str, Any]]:
    """The values that each test of a file passed to `record_property`."""
    module = path.removesuffix(".py").replace("/", ".")
    values = {
        case.attrib["name"]: {
            element.attrib["name"]: json.loads(element.attrib["value"])
            for element in case.findall("*/property")
            if element.attrib["name"] != "cpu_seconds"  # of every test
        }
        for case in ElementTree.parse(reported).iter("testcase")
        if case.attrib["classname"] == module
    }
    return {name: reported for name, reported in values.items() if reported}


DIFFERENCES = {
    "largest_logit_difference": "from transformers", "int8_difference": "int8",
    "devices_difference": "8 devices",
}  # fmt: skip


def families_table() -> str:
    """The families, and the largest differences of a logit of each."""
    parity = record.read("agreement")["results"]["parity"]
    worst: dict[tuple[str, str], float] = {}
    for reported in parity.values():
        for kind in DIFFERENCES:
            if "family" in reported and kind in reported:
                key = reported["family"], kind
                worst[key] = max(worst.get(key, 0.0), reported[kind])
    heads = "family", "models", "beyond Llama", "GGUF", "training", *DIFFERENCES.values()
    rows = [
        (
            f"`{row.name}`",
            row.models,
            row.beyond,
            "yes" if row.gguf else "no",
            "yes" if row.trained else "no",
            *(f"{worst.get((row.name, kind), np.nan):.0e}" for kind in DIFFERENCES),
        )
        for row in FAMILY_ROWS
    ]
    return table(heads, rows)


TABLES = {"families": families_table}
MEASURE = Measure("agreement", measure, data=lambda _: [STORIES])

if __name__ == "__main__":
    run(MEASURE)
