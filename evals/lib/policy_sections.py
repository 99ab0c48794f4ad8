"""The sections of docs/policies.md, one per policy."""

from __future__ import annotations

import dataclasses
import inspect
import re

from jaxkv.policies import POLICIES


def policies() -> str:
    """One section per policy, from its docstring and fields."""
    sections = []
    for name, policy in POLICIES.items():
        about, formula = inspect.getdoc(policy), policy.bytes_formula.replace("*", "\\*")
        fields = ", ".join(
            f"`{f.name}={str(f.default).lower() if f.default in (True, False) else f.default}`"
            for f in dataclasses.fields(policy) if f.repr
        )  # fmt: skip
        sections.append(
            f"### `{name}`\n\n{about}\n\n"
            f"- **Take it for** {policy.use_for}.\n- **Not for** {policy.avoid_for}.\n"
            f"- **Fields** {fields}.\n"
            f"- **Bytes** of one sequence in one layer: {formula}.\n"
            f"- **Source** {linked(policy.source)}.\n"
        )
    return "\n" + "\n".join(sections) + "\n"


def linked(source: str) -> str:
    """A source with its paper's address."""
    return re.sub(r"(.*?),? arXiv (\d{4}\.\d{5})", r"[\1](https://arxiv.org/abs/\2)", source)
