"""Tables of docs/: the policies, what each predicted at equal budgets, and what each costs."""

from __future__ import annotations

import dataclasses
import inspect
import re
from functools import partial
from typing import Any

from jaxkv.evals.lib import gallery
from jaxkv.evals.lib.claim import ranged, table_head
from jaxkv.evals.lib.record import RESULTS, read
from jaxkv.evals.magicpig import report as sparse_report
from jaxkv.evals.peers import rates_table, transformers_table
from jaxkv.evals.speed import chat, operations_table, rates, workarounds_table
from jaxkv.evals.streaming import tables as streaming_tables
from jaxkv.evals.tasks import report
from jaxkv.policies import POLICIES
from jaxkv.state.memory import show


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


def predicted() -> str:
    """The loss of the next token."""
    lines = table_head(
        "policy", "KV budget (tokens)", "after a prompt: loss minus full's",
        "endless text: loss minus streaming's",
    )  # fmt: skip
    for name, row in rows().items():
        first, last = (row["tokens"][at]["mean"] for at in ("first", "last"))
        grows = f"{first:.0f}" if round(first) == round(last) else f"{first:.0f} to {last:.0f}"
        after_prompt = "0" if name == "full" else over(row["after_prompt"])
        endless = "0" if name == "streaming" else over(row.get("endless"))
        lines.append(f"| `{name}` | {grows} | {after_prompt} | {endless} |")
    return "\n".join(lines) + "\n"


def over(found: dict[str, Any] | None) -> str:
    """A difference with two standard errors."""
    if found is None:
        return "needs a prompt"
    return f"{found['mean']:+.3f} ± {found['two_errors']['stretches']:.3f}"


def cost() -> str:
    """What a token costs after a long prompt."""
    lines = table_head(
        "policy", "KV budget (tokens)", "memory during prefill", "memory during decode",
        "time per token over full's",
    )  # fmt: skip
    for name, row in rows().items():
        of = row["long"]
        tokens = ranged(of["tokens"], "mean", ",.0f")
        reading, then = show(of["reading_bytes"]), show(of["state_bytes"])
        time = "1" if name == "full" else ranged(of["times_as_long"], "median", ".2f")
        lines.append(f"| `{name}` | {tokens} | {reading} | {then} | {time} |")
    return "\n".join(lines) + "\n"


def rows() -> dict[str, Any]:
    """The measurements of each policy."""
    return read("side_by_side", RESULTS)["results"]["rows"]


TABLES = {"policies": policies, "predicted": predicted, "cost": cost}
TABLES |= {
    name: partial(report.table, name)
    for name in ("tasks", "tasks_2048", "tasks_4096", "tasks_query_aware")
}
TABLES |= {"llama_cpp": rates_table.table, "workarounds": workarounds_table.table}
TABLES |= {"operations": operations_table.table, "transformers_rates": transformers_table.table}
TABLES |= streaming_tables.TABLES | sparse_report.TABLES | rates.TABLES | chat.TABLES
TABLES |= {"task_gates": report.gates, "pictures": gallery.page}
