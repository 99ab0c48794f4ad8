"""The pages of the server and docs/grafana.json name flags, metrics and labels that exist."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxkv import defaults
from jaxkv.cli import serve
from tests.serve.http.conftest import serving
from tests.serve.http.fake import FakeEngine

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = "\n".join(
    (DOCS / name).read_text("utf-8") for name in ("serving.md", "serving_reference.md")
)
DASHBOARD = json.loads((DOCS / "grafana.json").read_text("utf-8"))
# Of other programs, and those that the page says are absent.
OTHERS = {
    *("--no-cache-dir", "--time", "--total-queued-requests-metric"),
    *("--kv-cache-usage-percentage-metric", "--lora-info-metric", "--cache-info-metric"),
    *("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens"),
    *("--balance-abs-threshold", "--balance-rel-threshold"),
    *("--limit", "--metadata", "--tasks"),
    *("--tensor-parallel-size", "--api-key", "--gpu-memory-utilization", "--worker-urls"),
}


def parser() -> argparse.ArgumentParser:
    serve_parser = argparse.ArgumentParser()
    serve.add_flags(serve_parser)
    return serve_parser


def test_flags_exist():
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) - OTHERS
    unknown = named - set(parser()._option_string_actions)
    assert len(named) > 20 and not unknown


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The labels of every sample, by name."""
    with serving(FakeEngine()) as served:
        assert served.complete("|x").status == 200
        assert served.complete("|x", temperature=9).status == 400
        raw = served.ask("GET", "/metrics").raw.decode()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(raw):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def test_metrics_exist(exported):
    named = set(re.findall(r"jaxkv:[a-z]\w+", PAGE))
    assert len(named) >= 3 and named <= exported.keys()


def queries() -> list[str]:
    variables = DASHBOARD["templating"]["list"]
    targets = (target for panel in DASHBOARD["panels"] for target in panel.get("targets", ()))
    return [x["definition"] for x in variables if "definition" in x] + [x["expr"] for x in targets]


@pytest.mark.parametrize("query", queries())
def test_a_query_names_metrics_and_labels_that_exist(exported, query):
    names = re.findall(r"[\w]+:\w+", query)
    assert names and all(name in exported for name in names)
    for label in re.findall(r"by \((\w+)\)", query):
        assert all(label in exported[name] for name in names)
    for label in re.findall(r"(\w+)=~", query):
        assert label in ("job", "instance")  # labels that Prometheus adds
    assert query.count("(") == query.count(")") and query.count("{") == query.count("}")


def block(language: str) -> str:
    (code,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return code


def test_the_unit_for_systemd(tmp_path):
    unit = block("ini")
    command = shlex.split(re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)[1])
    args = parser().parse_args(command[2:])
    stop = int(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[1])
    assert stop > args.drain > 0, "systemd must wait until the server has drained"
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    path = tmp_path / "jaxkv.service"
    path.write_text(unit.replace(command[0], "/bin/true"))  # it must exist
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True)
    assert str(path.name) not in done.stderr, done.stderr


def test_the_command_of_the_container():
    words = re.search(r"^ENTRYPOINT \[(.*)\]$", block("dockerfile"), re.MULTILINE)[1]
    command = [word.strip(' "') for word in words.split(",")]
    assert command[:2] == ["jaxkv", "serve"]
    assert parser().parse_args(command[2:]).policy == defaults.POLICY
