"""Claims about long-context tasks, tested after RULER's definitions (evals/tasks)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jaxkv.evals.lib.claim import OPEN, UNSEEN, Claim, Finding, Results, adder, by_all, joined
from jaxkv.evals.tasks import report

LONG_TASKS: list[Claim] = []
claim = adder(LONG_TASKS)
ROW = tuple[str, Results, Results]  # task, results of full attention, results of the policy


def rows(results: Results, policy: str, scored: bool) -> Iterator[ROW]:
    """Every case and budget of a policy; scored: only where full attention passes the gate."""
    for task, length, found in report.cases(results):
        for ratio, by_policy in found["ratios"].items():
            if policy in by_policy and (found["scored"] or not scored):
                name = f"{task}, {length} tokens, {float(ratio):.0%}"
                yield name, found["full"], by_policy[policy]


def score_claim(
    says: str, paper: str, policy: str, holds: Callable[[Results, Results], bool]
) -> None:
    """A claim on the score of one policy.

    holds: of the results of full attention and of the policy, in one case.
    """

    @claim("tasks", says, paper)
    def find(r: Results) -> Finding:
        every, scored = list(rows(r, policy, False)), list(rows(r, policy, True))
        if not every:
            return "", f"{OPEN}: needs --policies {policy}"
        parts = [
            f"{name}: KL {row['kl']:.2f}, {row['agreement']:.0%} of top tokens as full's"
            + (f", {report.score(row)} right, full {report.score(full)}" if "score" in row else "")
            for name, full, row in every
        ]
        missed = [
            f"{task}, {length} tokens: not scored, full answers {found['full']['score']:.0%}"
            for task, length, found in report.cases(r)
            if not found["scored"]
        ]
        verdict = by_all([holds(full, row) for _, full, row in scored]) if scored else UNSEEN
        return f"{r['model']}, {r['samples']} samples; {joined([*parts, *missed])}", verdict


score_claim(
    "A streaming cache does not answer about evicted text",
    "Pan et al., section 7: it loses accuracy where a task needs long-term memory", "streaming",
    lambda full, row: row["high"] < full["low"],
)  # fmt: skip
score_claim(
    "A sample of the evicted text answers as full attention does",
    "Pan et al., section 7: accuracy improves", "reservoir",
    lambda full, row: row["score"] >= full["low"],
)  # fmt: skip
score_claim(
    "SnapKV answers from a compressed prompt as full attention does",
    "SnapKV, needle in a haystack; there the question is part of the prompt, here it follows it",
    "snapkv", lambda full, row: row["score"] >= full["low"],
)  # fmt: skip
score_claim(
    "Attention to the largest logits alone answers as full attention does",
    "MagicPIG, Figure 1: retrieval yes, aggregation (common and frequent words) no", "topk",
    lambda full, row: row["score"] >= full["low"],
)  # fmt: skip
