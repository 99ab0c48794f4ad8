"""`jaxkv policies`."""

from __future__ import annotations

import re

import pytest

from jaxkv import POLICIES
from jaxkv.policy_spec import describe, parse_policy
from tests.core.test_house import ROOT


def test_all_are_listed(run):
    ran = run("policies")
    for name in POLICIES:
        assert f"{name}: " in ran.out
    assert "sinks=4 (int), window=252 (int), positions=relative (relative|absolute)" in ran.out
    assert "  memory  385.0 KiB at 1,024 tokens, 385.0 KiB at 16,384 tokens" in ran.out
    assert ran.err == ""


@pytest.mark.parametrize("listed", describe(), ids=lambda listed: listed["name"])
def test_a_description_names_every_field(run, listed):
    """Its lines fit a terminal."""
    ran = run("policies", listed["name"])
    words = ran.out.partition("\n\n")[2].partition("A policy is written")[0]
    assert ran.code == 0 and ran.out.startswith(
        f"{listed['name']}: {listed['summary']}\n  fields  "
    )
    assert not [name for name in listed["fields"] if not re.search(rf"\b{name}\b", words)]
    assert max(map(len, words.splitlines())) <= 88


def test_the_policy_strings_of_the_docs_parse():
    text = "".join((ROOT / page).read_text("utf-8") for page in ("README.md", "docs/policies.md"))
    names = "|".join(POLICIES)
    strings = set(re.findall(rf"(?<![\w-])(?:{names}):\w+=[\w,=-]+(?:\.\d[\w,=-]*)*", text))
    assert {spec.partition(":")[0] for spec in strings} >= {"reservoir", "stratified", "balance"}
    for spec in strings:
        parse_policy(spec)


def test_json(run):
    policies = {policy["name"]: policy for policy in run("policies", "--json").json["policies"]}
    assert set(policies) == set(POLICIES)
    assert policies["window"]["fields"] == {
        "window": {"type": "int", "default": 256},
        "storage": {"type": "float|int8", "default": "float"},
    }
    fields = {"summary", "bytes", "source", "about"}
    assert all(fields <= set(p) for p in policies.values())
    assert run("policies", "window", "--json").json == {"policies": [policies["window"]]}
