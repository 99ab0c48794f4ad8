"""`jaxkv policies`."""

from __future__ import annotations

from jaxkv import POLICIES


def test_all_are_listed(run):
    ran = run("policies")
    for name in POLICIES:
        assert f"{name}: " in ran.out
    assert "sinks=4 (int), window=252 (int), positions=cache (cache|absolute)" in ran.out
    assert ran.err == ""


def test_json(run):
    found = {policy["name"]: policy for policy in run("policies", "--json").json["policies"]}
    assert set(found) == set(POLICIES)
    assert found["window"]["fields"] == {"window": {"type": "int", "default": 256}}
    assert all({"summary", "bytes_per_row_and_layer", "source"} <= set(p) for p in found.values())
