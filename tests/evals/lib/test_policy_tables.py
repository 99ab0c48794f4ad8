"""The tables of docs/policies.md and docs/results."""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from jaxkv.evals.lib import figures, policy_tables
from jaxkv.evals.lib.record import read
from jaxkv.policies import POLICIES


def test_every_policy_says_what_it_is_for_and_what_not():
    for kind in POLICIES.values():
        for text in (kind.summary, kind.source, kind.use_for, kind.avoid_for, kind.bytes_formula):
            assert text and text == text.strip() and not text.endswith(".")
        # A measurement belongs to a page, where a test compares it with its record.
        assert not re.search(r"SmolLM2|standard error|%|\d{3}", kind.use_for + kind.avoid_for)


def test_every_policy_has_a_section_with_its_fields():
    sections = policy_tables.policies().split("\n### ")[1:]
    assert [section.split("`")[1] for section in sections] == list(POLICIES)
    for section, policy in zip(sections, POLICIES.values(), strict=True):
        names = {f.name for f in dataclasses.fields(policy) if f.repr}
        assert set(re.findall(r"`(\w+)=", section.split("**Fields**")[1].split("\n")[0])) == names


def test_a_source_links_to_its_paper():
    assert policy_tables.linked("X, arXiv 2410.16179, Definition 3.1") == (
        "[X](https://arxiv.org/abs/2410.16179), Definition 3.1"
    )
    assert policy_tables.linked("dense attention") == "dense attention"


def test_tables_are_filled_in():
    done = figures.fill("a\n<!--table policies-->\nold\n<!--/table-->\nb\n")
    assert done == f"a\n<!--table policies-->\n{policy_tables.policies()}<!--/table-->\nb\n"


def test_a_number_is_shown_with_its_range():
    found = {"median": 1.0, "min": 0.5, "max": 2.0}
    assert policy_tables.ranged(found, "median", ".2f") == "1.00 (0.50 to 2.00)"
    assert policy_tables.ranged(found | {"min": 1.0, "max": 1.0}, "median", ".2f") == "1.00"
    assert policy_tables.over({"mean": -0.5, "two_errors": {"stretches": 0.25}}) == "-0.500 ± 0.250"
    assert policy_tables.over(None) == "needs a prompt"


def test_the_record_has_every_policy():
    for table in (policy_tables.predicted(), policy_tables.cost()):
        names = re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)
        assert names == list(POLICIES)


def test_the_advice_of_the_docs_agrees_with_the_record():
    rows = policy_tables.rows()
    endless = {name: row["endless"]["mean"] for name, row in rows.items() if "endless" in row}
    assert min(endless["full"], endless["h2o"]) > 0.3
    assert endless["window"] < 0.01
    after = {name: row["after_prompt"]["mean"] for name, row in rows.items()}
    assert [name for name, loss in after.items() if loss > 0.02] == ["expected-attention"]
    times = {name: row["long"]["times_as_long"]["median"] for name, row in rows.items()}
    held = {name: row["long"]["state_bytes"] for name, row in rows.items()}
    for name in ("topk", "topp", "oracle", "quest", "vattention"):
        assert times[name] > 1 and held[name] >= held["full"]
    assert held["magicpig"] > 1.2 * held["full"]
    assert max(times["streaming"], times["uniform"]) < 1


def test_the_docs_on_recall_agree_with_the_record():
    far = recalled(lambda distance: distance > 128)
    near = recalled(lambda distance: distance <= 128)
    sampled, compressed = (
        ("reservoir", "stratified", "balance-stream"),
        ("balance", "uniform", "snapkv"),
    )
    for name in (*sampled, *compressed, "pyramidkv"):
        assert far[name] > 1.2 * far["streaming"] and near[name] < 0.99 * near["streaming"]
    assert far["pyramidkv"] > 1.2 * max(far[name] for name in compressed)


def test_the_caption_of_the_first_picture_agrees_with_the_record():
    curve = {
        name: np.array(line) for name, line in read("streaming_tables")["results"]["curve"].items()
    }
    tokens, sinks = curve["tokens"], curve["4+252"]
    assert np.all((curve["full"] < sinks) == (tokens < 10_500))
    assert np.all((curve["full"] - sinks)[tokens > 12_500] > 1)
    assert np.all(curve["0+256"][1:] - sinks[1:] > 0.5)
    for level in (sinks, curve["1+255"]):
        assert abs(np.mean(level[tokens > 10_000]) - np.mean(level[tokens < 10_000])) < 0.1


def recalled(takes):
    """The share of right answers at some distances, by policy."""
    seeds = read("recall")["results"]["seeds"].values()
    shares = [
        {name: np.mean([right for distance, right in of["right"].items() if takes(int(distance))])
         for name, of in seed["within"].items()}
        for seed in seeds
    ]  # fmt: skip
    return {name: np.mean([one[name] for one in shares]) for name in shares[0]}
