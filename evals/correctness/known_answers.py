"""Statistical tests with known answers, as one record.

`python -m jaxkv.evals.correctness.known_answers` runs them: whether each token of a stream is
equally likely to be in a reservoir, the error of halved blocks and of uniform samples, and how the
error of merge-and-reduce decreases with its size. If a test fails, nothing is written.
"""

from __future__ import annotations

from jaxkv.evals.correctness.agreement import reported_by
from jaxkv.evals.lib.record import Record, make_parser, run_command

TESTS = {
    "reservoir": "tests/policies/test_reservoir.py",
    "halving": "tests/policies/test_discrepancy.py",
    "levels": "tests/policies/merge_reduce/test_tree.py",
    "theorem": "tests/test_balancekv.py",
}


def main() -> None:
    make_parser("jaxkv.evals.correctness.known_answers", __doc__).parse_args()
    record = Record("known_answers", seeds=[0])
    results = reported_by(TESTS)
    results["levels"] |= results.pop("theorem")
    record.finish(results)


if __name__ == "__main__":
    run_command(main)
