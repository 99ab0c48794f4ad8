"""docs/grafana.json: its queries name metrics and labels that the server exports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.http.conftest import serving
from tests.serve.http.fake import FakeEngine

DASHBOARD = json.loads((Path(__file__).resolve().parents[3] / "docs/grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SCRAPED = {"job", "instance"}  # labels that Prometheus adds


def queries() -> list[str]:
    variables = [
        var["definition"] for var in DASHBOARD["templating"]["list"] if "definition" in var
    ]
    return variables + [target["expr"] for panel in PANELS for target in panel["targets"]]


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


@pytest.mark.parametrize("query", queries())
def test_a_query_names_metrics_and_labels_that_exist(exported, query):
    names = re.findall(r"[\w]+:\w+", query)
    assert names and all(name in exported for name in names)
    for label in re.findall(r"by \((\w+)\)", query):
        assert all(label in exported[name] for name in names)
    for label in re.findall(r"(\w+)=~", query):
        assert label in SCRAPED
    assert query.count("(") == query.count(")") and query.count("{") == query.count("}")


def test_panels_do_not_overlap():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells = set()
    for panel in DASHBOARD["panels"]:
        x, y, w, h = (panel["gridPos"][name] for name in "xywh")
        panel_cells = {(a, b) for a in range(x, x + w) for b in range(y, y + h)}
        assert x + w <= 24 and not cells & panel_cells
        cells |= panel_cells


def test_legends_name_labels_of_their_query():
    for panel in PANELS:
        assert panel["description"].endswith(".")
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"]
