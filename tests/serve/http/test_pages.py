"""The pages of the server and docs/grafana.json name flags, metrics and labels that exist."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxkv.cli import serve
from tests.serve.http.conftest import serving
from tests.serve.http.fake import FakeEngine

ROOT = Path(__file__).resolve().parents[3]
PAGES = [(ROOT / f"docs/{name}.md").read_text("utf-8") for name in ("serving", "serving_reference")]
METRICS = [  # besides
    (ROOT / "deploy" / name).read_text("utf-8")
    for name in ("README.md", "kubernetes/endpoint-picker.yaml")
]
DASHBOARD = json.loads((ROOT / "docs/grafana.json").read_text("utf-8"))
# Of other programs, and those that the pages say are absent.
OTHERS = {
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
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(PAGES))) - OTHERS
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
    named = set(re.findall(r"jaxkv:[a-z]\w+_\w+", "\n".join([*PAGES, *METRICS])))
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
