"""Verdicts and the table of synthetic records of tasks."""

import pytest

from jaxkv.evals.lib.claim import HOLDS, NOT, OPEN, PART, UNSEEN
from jaxkv.evals.tasks import claims, report
from jaxkv.evals.tasks.score import passes, wilson

SAMPLES = 20


def scored(share):
    low, high = wilson(share, SAMPLES)
    return {"score": share, "low": low, "high": high, "by_depth": [share, share, share, 1.0]}


def record(full, **policies):
    """A record of one task, with these scores."""
    rows = {}
    for name, share in policies.items():
        rows[name] = scored(share) if passes(full) else {}
        rows[name] |= {"kl": 0.5, "kl_two_errors": 0.1, "agreement": 0.75, "state_bytes": 2048}
    case = {
        "full": scored(full) | {"state_bytes": 4096, "right": 3, "samples": SAMPLES},
        "scored": passes(full),
        "ratios": {"0.25": rows},
    }
    return {"model": "a model", "samples": SAMPLES, "tasks": {"needle": {"1024": case}}}


@pytest.mark.parametrize(
    "says, holds, fails, verdict",
    [
        ("A streaming", record(1.0, streaming=0.05), record(1.0, streaming=0.2), HOLDS),
        ("A sample", record(1.0, reservoir=0.95), record(1.0, reservoir=0.85), HOLDS),
        (
            "SnapKV answers from a compressed prompt as",
            record(1.0, snapkv=1.0),
            record(1.0, snapkv=0.5),
            HOLDS,
        ),
        # Retrieval is half of this claim.
        ("Attention to", record(0.9, topk=0.85), record(0.9, topk=0.5), PART),
    ],
)
def test_verdicts_follow_the_scores(says, holds, fails, verdict):
    claim, *longer = [c for c in claims.LONG_TASKS if c.says.startswith(says)]
    assert [c.record for c in (claim, *longer)] == ["tasks", "tasks_2048", "tasks_4096"]
    assert all(c.find is claim.find for c in longer)
    assert claim.find(holds)[1] == verdict
    assert claim.find(fails)[1] == NOT
    assert claim.find(record(1.0, quest=1.0))[1].startswith(OPEN)


def test_without_the_gate_there_is_no_score():
    claim = next(
        c
        for c in claims.LONG_TASKS
        if c.says.startswith("SnapKV answers from a compressed prompt as")
    )
    text, verdict = claim.find(record(0.85, snapkv=1.0))
    assert verdict == UNSEEN
    gate = "needle, 1024 tokens: not scored: full attention is right in 3 of 20"
    assert "KL 0.50" in text and gate in text and "right," not in text


def test_the_page_of_gates_says_what_is_not_scored():
    claim, longer = [c for c in claims.LONG_TASKS if c.record.startswith("task_gates")]
    assert claim.find is longer.find
    for full, verdict, word in ((0.95, HOLDS, "scored"), (0.85, NOT, "not scored")):
        given = record(full)
        text, found = claim.find(given)
        line = f"{word}: full attention is right in 3 of 20"
        assert found == verdict and line in text
        (row,) = report.gate_rows(given).splitlines()[2:]
        assert row.startswith("| needle, 1,024 | ") and row.endswith(f" | {line} |")


def test_the_table_shows_scores_only_beyond_the_gate(monkeypatch):
    lines = {}
    for full in (0.95, 0.85):
        found = {"results": record(full, snapkv=0.5)}
        monkeypatch.setattr(report, "read", lambda *_, found=found: found)
        lines[full] = report.table("tasks").splitlines()[2:]
    assert (
        lines[0.95][0] == "| needle, 1,024 | all | `full` | 95% (76 to 99) | 0 | 100% | 4.0 KiB |"
    )
    middle = "| needle, 1,024 | 25% | `snapkv` | {} | 0.50 ± 0.10 | 75% | 2.0 KiB |"
    assert lines[0.95][1] == middle.format("50% (30 to 70)")
    assert lines[0.85][1] == middle.format("not scored: full attention is right in 3 of 20")
