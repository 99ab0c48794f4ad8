"""The tables of docs/which_cache.md: the answers, and what records say of every policy."""

from __future__ import annotations

from jaxkv.contract import Policy
from jaxkv.evals.benchmarks.kvpress_parity import sure_cases
from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.table import UNMEASURED, over_base, ranged, table
from jaxkv.evals.lib.verdict import Results, Statement, above, below, within
from jaxkv.evals.tasks.budgets import CALIBRATED, CALIBRATED_HALF_WINDOW, SCORED
from jaxkv.evals.tasks.report import (
    ANSWERS,
    BUDGETED,
    EIGHTH,
    LONG_SAMPLED,
    QUARTER,
    needle_results,
    of_needles,
)
from jaxkv.models.tools.choices import CHOICES
from jaxkv.policies import POLICIES, Retrieval
from jaxkv.state.memory import show

LENGTH = "1024"  # tokens of a context of the tasks
ORACLES = ("topk", "topp", "oracle", "quest", "loki", "vattention")  # they read every key


def answers() -> str:
    """A row per choice."""
    heads = ("text", "what it is asked", "device", "policy", "because")
    return table(heads, ((*choice[:3], f"`{choice.policy}`", choice.reason) for choice in CHOICES))


def recall_loss_cost() -> str:
    """A row per policy: recall, the loss in endless text, bytes and time."""
    needles, beside = needle_results(), read("side_by_side")["results"]
    losses = endless_losses()
    caption = (
        f"SmolLM2-135M: right answers of {needles['samples']} with a quarter of {int(LENGTH):,} "
        "tokens cached or attended; losses in nats per token at the bytes of 256 tokens, over five "
        "novels, ± two standard errors, of the form that compresses again and again. Default "
        f"model: costs with {beside['budget']} tokens per KV head after {beside['long']:,}, of the "
        "form that compresses once, with the range of rounds on two CPU cores in parentheses."
    )
    heads = (*("policy", *ANSWERS.values()), "endless text: loss minus streaming's",
             "memory during prefill", "memory during decode",
             "time per token over full's")  # fmt: skip
    rows = [
        (f"`{name}`", *recall(needles, name), endless(losses.get(name), POLICIES[name]),
         *cost(beside["rows"][name]["long"], name))
        for name in POLICIES if name not in ORACLES
    ]  # fmt: skip
    loss = endless(losses[CALIBRATED_HALF_WINDOW], Retrieval)
    rows.append((f"`{CALIBRATED}`", *recall(needles, CALIBRATED), loss,
                 *cost(beside["other_costs"][CALIBRATED], CALIBRATED)))  # fmt: skip
    return table(heads, rows, caption)


def endless_losses() -> Results:
    """The rows of two records by policy; each has the loss minus that of streaming."""
    return read("stream_losses")["results"]["rows"] | read("endless_losses")["results"]["rows"]


def endless(row: Results | None, kind: type[Policy]) -> str:
    if row is None:
        return UNMEASURED if kind().min_prompt is None else "needs a prompt"
    return over_base(row) if row["loss_over_base"] else "0"


def recall(needles: Results, name: str) -> list[str]:
    """Right answers by task."""
    cases = [needles["tasks"][task][LENGTH] for task in ANSWERS]
    rows = [case["full"] if name == "full" else case["ratios"][QUARTER][name] for case in cases]
    return [f"{needles['samples'] * row['score']:.3g}" for row in rows]


def cost(long: Results, name: str) -> list[str]:
    """Memory and time after a long prompt."""
    return [
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
    Statement(PAGE, "of up to 1,024 tokens: with half evicted it loses less than streaming",
              "peers",
              [below(*(LOSS.format(prompt=1024, policy=policy, ratio=0.5)
                       for policy in ("snapkv", "streaming")))]),
    Statement(PAGE, "after 2,048 and 4,096 tokens its loss does not differ from that of snapkv",
              "peers",
              [within(sure_cases("snapkv", "streaming", prompts=("2048", "4096")), 0)]),
    Statement(PAGE, "it needs no memory for the prompt", "side_by_side",
              [below("rows/streaming/long/reading_bytes", "rows/snapkv/long/reading_bytes")]),
    Statement(PAGE, "with an eighth of 1,024 tokens cached it finds more needles with "
              "budgets=calibrated", BUDGETED,
              [above(of_needles("needle", "1024", EIGHTH, CALIBRATED),
                     of_needles("needle", "1024", EIGHTH))]),
    Statement(PAGE, "a quarter of 1,024 tokens answers all needles and pass keys", "needles_1024",
              [within(of_needles(task, LENGTH, QUARTER, name), 1)
               for task in ANSWERS for name in SCORED]),
    Statement(PAGE, "and a quarter of 4,096 all needles", LONG_SAMPLED,
              [within(of_needles("needle", "4096", QUARTER, name), 1) for name in SCORED]),
    Statement(PAGE, "From an eighth of 1,024, most pass keys are lost with KVzap", "needles_1024",
              [below(of_needles("passkey", LENGTH, EIGHTH, "kvzap"), 0.5)]),
    *(Statement(page, says, "needles_equal",
                [above(of_needles("needle", length, QUARTER, "retrieval-equal"), 2 / 3)
                 for length in lengths])
      for page, says, lengths in (
          (PAGE, "with a quarter of 1,024 and 2,048 tokens it finds over two thirds of the needles",
           ("1024", "2048")),
          ("README.md", "with `budgets=equal`, for a mesh, over two thirds", ("1024",)),
      )),
)  # fmt: skip
TABLES = {"which_cache": answers, "recall_loss_cost": recall_loss_cost}
