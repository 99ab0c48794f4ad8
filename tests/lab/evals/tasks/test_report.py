"""Tables and comparisons of a synthetic record of tasks."""

from jaxkv.evals.lib import verdict
from jaxkv.evals.tasks import report


def case(full, by_depth):
    """A task of four samples; by_depth: right answers of the policy by depth of the answer."""
    score = sum(by_depth) / len(by_depth)
    row = {"score": score, "by_depth": by_depth, "kl": 0.5, "kl_two_errors": 0.1}
    return {
        "scored": full == 1,
        "full": {"score": full, "right": int(4 * full), "samples": 4, "state_bytes": 4096},
        "ratios": {"0.25": {"snapkv": row | {"state_bytes": 2048}}},
    }


RESULTS = {
    "samples": 4,
    "tasks": {
        "needle": {"1024": case(1.0, [0, 0, 0.5, 1])},
        "common-words": {"1024": case(0.5, [0, 0, 0, 0])},
    },
}


def test_a_table_has_a_row_per_policy_and_only_tasks_that_full_attention_solves():
    head, _, full, policy = report.length_table(RESULTS, "1024").splitlines()[2:]
    assert head == "| policy | needles at 25 % | KL at 25 %, needles | state at 25 % |"
    assert full == "| `full` | 4 | 0 | 4.0 KiB |"
    assert policy == "| `snapkv` | 1.5 | 0.50 ± 0.10 | 2.0 KiB |"


def test_claims_read_only_tasks_that_full_attention_solves():
    assert report.over_full("snapkv")(RESULTS) == {"needle, 25 %": -0.625}
    assert report.over_full("quest")(RESULTS) == {}
    assert report.evicted_scores("snapkv")(RESULTS) == {"snapkv, needle, 25 %": 0.5 / 3}
    gate, *_ = report.CLAIMS
    decisions, outcome = verdict.decide(gate, RESULTS)
    assert [x.holds for x in decisions] == [True, False] and outcome == verdict.PART
