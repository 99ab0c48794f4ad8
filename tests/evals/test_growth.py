"""What a longer text costs, and README's tables of policies."""

from __future__ import annotations

import re

import pytest

import models
from evals import figures, growth, policies, runtime
from jaxkv.policies import POLICIES


@pytest.fixture(scope="module")
def llm():
    return models.load()


def test_costs_are_of_the_length_that_was_asked(llm):
    names, lengths = ["full:start=16", "streaming:sinks=2,window=14"], [16, 40]
    found = growth.measure(llm, runtime.passage(llm, 40), names, lengths, new=4, count=1)
    full, streaming = (found[name] for name in names)
    assert [cost.tokens for cost in full] == lengths
    assert full[1].state_bytes > 1.9 * full[0].state_bytes
    assert streaming[0].state_bytes == streaming[1].state_bytes
    assert all(cost.microseconds > 0 for cost in (*full, *streaming))
    assert growth.draw(found, "a caption").png.startswith(b"\x89PNG")


def test_the_table_of_policies_has_them_all():
    lines = policies.policies().splitlines()[2:]
    assert [re.match(r"\| `([\w-]+)`", line)[1] for line in lines] == list(POLICIES)
    assert all(line.count("|") == 6 and "()" not in line for line in lines)


def test_every_policy_is_measured_as_it_can_be(llm):
    assert list(policies.SETTINGS) == list(POLICIES)
    for setting in policies.SETTINGS.values():
        llm.policies(setting)


def test_a_source_leads_to_its_paper():
    assert policies.linked("X, arXiv 2410.16179, Definition 3.1") == (
        "[X](https://arxiv.org/abs/2410.16179), Definition 3.1"
    )
    assert policies.linked("dense attention") == "dense attention"


def test_tables_are_filled_in():
    done = figures.fill("a\n<!--table policies-->\nold\n<!--/table-->\nb\n")
    assert done == f"a\n<!--table policies-->\n{policies.policies()}<!--/table-->\nb\n"
