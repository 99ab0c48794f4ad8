"""The tables of docs/which_cache.md: the answers, and what records say of every policy."""

from __future__ import annotations

from collections.abc import Sequence

from jaxkv.evals.benchmarks.kvpress_parity import sure_cases
from jaxkv.evals.comparison.side_by_side_tables import over
from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.table import UNMEASURED, ranged, table
from jaxkv.evals.lib.verdict import Results, Statement, above, below, within
from jaxkv.evals.tasks.budgets import CALIBRATED, CALIBRATED_HALF_WINDOW, SCORED
from jaxkv.evals.tasks.report import ANSWERS, BUDGETED, EIGHTH, QUARTER, needle_results, of_needles
from jaxkv.models.tools.choices import CHOICES
from jaxkv.policies import POLICIES
from jaxkv.state.memory import show

LENGTH = "1024"  # tokens of a context of the tasks


def answers() -> str:
    """A row per choice."""
    heads = ("text", "what it is asked", "device", "policy", "because")
    return table(heads, ((*choice[:3], f"`{choice.policy}`", choice.reason) for choice in CHOICES))


def recall_loss_cost() -> str:
    """A row per policy: recall, losses, bytes and time, at equal budgets of tokens."""
    tasks, beside = (read(name)["results"] for name in ("tasks", "side_by_side"))
    records = tasks, needle_results()
    caption = (
        f"Right answers of {tasks['samples']} with a quarter of {int(LENGTH):,} tokens cached or "
        f"attended (SmolLM2-135M). Losses in nats per token and costs with {beside['budget']} "
        f"tokens per KV head (default model), costs after {beside['long']:,} tokens. ± gives two "
        "standard errors, parentheses the range of rounds on two CPU cores."
    )
    heads = (*("policy", *ANSWERS.values()), "after a prompt: loss minus full's",
             "endless text: loss minus streaming's", "memory during prefill",
             "memory during decode", "time per token over full's")  # fmt: skip
    rows = (
        (f"`{name}`", *recall(records, name),
         *loss_and_cost(beside["rows"].get(name), name))
        for name in POLICIES
    )  # fmt: skip
    return table(heads, rows, caption)


def recall(records: Sequence[Results], name: str) -> list[str]:
    """Right answers by task, of the first record that has the policy."""
    for record in records:
        cases = [record["tasks"][task][LENGTH] for task in ANSWERS]
        rows = [case["full"] if name == "full" else case["ratios"][QUARTER].get(name)
                for case in cases]  # fmt: skip
        if None not in rows:
            return [f"{record['samples'] * row['score']:.3g}" for row in rows]
    return [UNMEASURED] * len(ANSWERS)


def loss_and_cost(row: Results | None, name: str) -> list[str]:
    if row is None:
        return [UNMEASURED] * 5
    long = row["long"]
    return [
        "0" if name == "full" else over(row["after_prompt"]),
        "0" if name == "streaming" else over(row.get("endless")),
        show(long["reading_bytes"]),
        show(long["state_bytes"]),
        "1" if name == "full" else ranged(long["times_as_long"], "median", ".2f"),
    ]


PAGE = "docs/which_cache.md"
LOSS = "prompts/{prompt}/cases/{policy}/{ratio}/over_full/ours/by_text"  # in `peers`
STATEMENTS = (
    Statement(PAGE, "it finds needles that left the window of streaming", "endless_needle",
              [above(f"tasks/needle/8192/{policy}/score", "tasks/needle/8192/streaming/score",
                     by=0.3) for policy in ("retrieval", CALIBRATED_HALF_WINDOW)]),
    Statement(PAGE, "after 1,024 tokens with half evicted it loses less than streaming", "peers",
              [below(*(LOSS.format(prompt=1024, policy=policy, ratio=0.5)
                       for policy in ("snapkv", "streaming")))]),
    Statement(PAGE, "after 2,048 and 4,096 tokens the two do not differ", "peers",
              [within(sure_cases("snapkv", "streaming", prompts=("2048", "4096")), 0)]),
    Statement(PAGE, "streaming needs no memory for the prompt", "side_by_side",
              [below("rows/streaming/long/reading_bytes", "rows/snapkv/long/reading_bytes")]),
    Statement(PAGE, "with an eighth of 1,024 tokens cached it finds more needles with "
              "budgets=calibrated", BUDGETED,
              [above(of_needles("needle", "1024", EIGHTH, CALIBRATED),
                     of_needles("needle", "1024", EIGHTH))]),
    Statement(PAGE, "a quarter of 1,024 tokens answers all needles and pass keys", "needles_1024",
              [within(of_needles(task, LENGTH, QUARTER, name), 1)
               for task in ANSWERS for name in SCORED]),
    Statement(PAGE, "From an eighth, most pass keys are lost with KVzap", "needles_1024",
              [below(of_needles("passkey", LENGTH, EIGHTH, "kvzap"), 0.5)]),
    Statement(PAGE, "with a quarter of 1,024 and 2,048 tokens it finds over two thirds of the "
              "needles", "needles_equal",
              [above(of_needles("needle", length, QUARTER, "retrieval-equal"), 2 / 3)
               for length in ("1024", "2048")]),
)  # fmt: skip
TABLES = {"which_cache": answers, "recall_loss_cost": recall_loss_cost}
