"""The sections of docs/policies.md."""

from __future__ import annotations

import dataclasses
import re

from jaxkv.evals.lib import policy_sections
from jaxkv.policies import POLICIES


def test_every_policy_says_what_it_is_for_and_what_not():
    assert list(policy_sections.USES) == list(POLICIES)
    for kind, uses in zip(POLICIES.values(), policy_sections.USES.values(), strict=True):
        for text in (kind.summary, kind.source, *uses):
            assert text and text == text.strip() and not text.endswith(".")
        # A measurement belongs to a page, where a test compares it with its record.
        assert not re.search(r"SmolLM2|standard error|%|\d{3}", " ".join(uses))


def test_every_policy_has_a_section_with_its_fields():
    sections = policy_sections.policies().split("\n### ")[1:]
    assert [section.split("`")[1] for section in sections] == list(POLICIES)
    for section, policy in zip(sections, POLICIES.values(), strict=True):
        names = {f.name for f in dataclasses.fields(policy) if f.repr}
        assert set(re.findall(r"`(\w+)=", section.split("**Fields**")[1].split("\n")[0])) == names
