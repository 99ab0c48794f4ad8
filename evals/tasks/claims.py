"""Claims about long-context tasks, tested after RULER's definitions (evals/tasks)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jaxkv.evals.lib.claim import (
    OPEN,
    UNSEEN,
    Claim,
    Finding,
    Results,
    adder,
    by_all,
    grade,
    joined,
)
from jaxkv.evals.tasks import report

LONG_TASKS: list[Claim] = []
claim = adder(LONG_TASKS)
# Task, results of full attention, results of the policy, budget as a share of the context.
ROW = tuple[str, Results, Results, float]
LOSS = 0.1  # of all answers: a smaller loss counts as none


SOLVED = "Full attention solves the tasks in short contexts"
BY_RULER = "RULER, Table 3: models of 7 billion weights and more, 4,096 tokens"


@claim("task_gates", SOLVED, BY_RULER)
@claim("task_gates_4096", SOLVED, BY_RULER)
def solved(r: Results) -> Finding:
    """The gate of every task and length; a task that fails it is not scored."""
    each = list(report.cases(r))
    shown = joined(
        f"{task}, {int(length):,} tokens: {report.score(found['full'])}, {report.gate(found)}"
        for task, length, found in each
    )
    return f"{r['model']}, {r['samples']} samples; {shown}", by_all([x["scored"] for *_, x in each])


def rows(results: Results, policy: str, scored: bool) -> Iterator[ROW]:
    """Every case and budget of a policy; scored: only where full attention passes the gate."""
    for task, length, found in report.cases(results):
        for ratio, by_policy in found["ratios"].items():
            if policy in by_policy and (found["scored"] or not scored):
                name = f"{task}, {length} tokens, {100 * float(ratio):g}%"
                yield name, found["full"], by_policy[policy], float(ratio)


def score_claim(
    says: str, paper: str, policy: str, holds: Callable[[Results, Results, float], bool],
    needs: str = "", records: tuple[str, ...] = ("tasks", "tasks_2048", "tasks_4096"),
) -> None:  # fmt: skip
    """A claim on the score of one policy, tested on each record.

    holds: of the results of full attention and of the policy in one case, and of the budget as a
    share of the context. needs: part of the name of a task without which it holds only in part.
    """

    def find(r: Results) -> Finding:
        every, scored = list(rows(r, policy, False)), list(rows(r, policy, True))
        if not every:
            return "", f"{OPEN}: needs --policies {policy}"
        parts = [
            f"{name}: KL {row['kl']:.2f}, {row['agreement']:.0%} of top tokens as full's"
            + (f", {report.score(row)} right, full {report.score(full)}" if "score" in row else "")
            for name, full, row, _ in every
        ]
        missed = [
            f"{task}, {length} tokens: {report.gate(found)}"
            for task, length, found in report.cases(r)
            if not found["scored"]
        ]
        found = [holds(full, row, ratio) for _, full, row, ratio in scored]
        whole = all(found) and any(needs in name for name, *_ in scored)
        verdict = grade(whole, any(found)) if scored else UNSEEN
        return f"{r['model']}, {r['samples']} samples; {joined([*parts, *missed])}", verdict

    for record in records:
        claim(record, says, paper)(find)


def forgets(full: Results, row: Results, ratio: float) -> bool:
    """Whether facts that the window has evicted are lost; others are still cached."""
    depths = row.get("by_depth", [])
    evicted = depths[: int(len(depths) * (1 - ratio))]
    return bool(evicted) and sum(evicted) / len(evicted) < min(full["low"], LOSS)


def keeps(full: Results, row: Results, ratio: float) -> bool:
    return row["score"] > full["score"] - LOSS


score_claim(
    "A streaming cache does not answer about evicted text",
    "Pan et al., section 7: it loses accuracy where a task needs long-term memory", "streaming",
    forgets,
)  # fmt: skip
score_claim(
    "A sample of the evicted text answers as full attention does",
    "Pan et al., section 7: accuracy improves", "reservoir", keeps,
)  # fmt: skip
score_claim(
    "SnapKV answers from a compressed prompt as full attention does",
    "SnapKV, needle in a haystack; there the question is part of the prompt, here it follows it",
    "snapkv", keeps,
)  # fmt: skip
score_claim(
    "SnapKV answers from a compressed prompt with the question as full attention does",
    "SnapKV, needle in a haystack", "snapkv", keeps, records=("tasks_query_aware",),
)  # fmt: skip
score_claim(
    "Attention to the ends and the largest logits answers as full attention does",
    "MagicPIG, Figure 1: retrieval yes, aggregation (common and frequent words) no", "topk", keeps,
    needs="words",
)  # fmt: skip


LONG_TASKS.append(
    Claim("Caches are told apart by several needles at once, and by judged conversations",
          "RULER, multi-key needles; not claimed for conversations", "",
          "a model of billions of weights: SmolLM2-135M solves no task that combines several "
          "places of a text, and answers few open questions")
)  # fmt: skip
