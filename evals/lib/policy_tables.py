"""Tables of docs/: the policies, what each predicted at equal budgets, and what each costs."""

from __future__ import annotations

import dataclasses
import inspect
import re
from functools import partial

from jaxkv.evals.balancekv import single_layer, tree_slots
from jaxkv.evals.comparison import side_by_side_tables
from jaxkv.evals.correctness import known_answers
from jaxkv.evals.lib import gallery
from jaxkv.evals.magicpig import report as sparse_report
from jaxkv.evals.peers import rates_table, transformers_table
from jaxkv.evals.reservoir import attention_error, recall, sampled, stream_losses
from jaxkv.evals.speed import cache_int8, operations_table, workarounds_table
from jaxkv.evals.streaming import tables as streaming_tables
from jaxkv.evals.tasks import report
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


TABLES = {"policies": policies}
for experiment in (
    side_by_side_tables, cache_int8, known_answers, recall, stream_losses, attention_error, sampled,
    single_layer, tree_slots,
):  # fmt: skip
    TABLES |= experiment.TABLES
TABLES |= {
    name: partial(report.table, name)
    for name in ("tasks", "tasks_2048", "tasks_4096", "tasks_query_aware")
}
TABLES |= {
    name: partial(sparse_report.table, name)
    for name in ("sparse_135m", "sparse_135m_4096", "sparse_135m_7680")
}
TABLES |= {"llama_cpp": rates_table.table, "workarounds": workarounds_table.table}
TABLES |= {"operations": operations_table.table, "transformers_rates": transformers_table.table}
TABLES |= streaming_tables.TABLES
TABLES |= {"task_gates": report.gates, "pictures": gallery.page}
