"""The experiments and the notebook with rollouts of google-tunix, at small size.

Skipped without the extra tunix.
"""

from __future__ import annotations

import json
import math

import pytest

from jaxkv.colab import notebooks
from jaxkv.evals.lib import record
from jaxkv.evals.lib.run import run
from jaxkv.evals.training import long_rollouts, rollouts
from jaxkv.models.training import grpo

pytest.importorskip("tunix", reason="no google-tunix: pip install -e '.[tunix]'")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Runs an experiment; its results."""
    monkeypatch.setattr(record, "TRIALS", tmp_path)

    def run_quickly(measure, words):
        run(measure, [*words.split(), "--quick"])
        return json.loads((tmp_path / f"{measure.record}.json").read_text())["results"]

    return run_quickly


def test_a_learner_of_the_adapter_has_no_mismatch_in_training(results):
    arms = results(rollouts.MEASURE, "--seeds 0 --arms weights bounded --pretraining 1 --steps 2")[
        "arms"
    ]
    for arm, differs in (("weights", True), ("bounded", False)):
        (seed,) = arms[arm]["seeds"]
        assert len(seed["rewards"]) == 2 and 0 <= min(seed["rewards"]) <= seed["reward"] <= 1
        assert (seed["difference"] > 1e-5) == differs
    assert arms["weights"]["first_reward"] == arms["bounded"]["first_reward"]  # the same rollouts


def test_a_long_rollout_has_the_log_probabilities_of_its_sampler(results):
    measured = results(
        long_rollouts.MEASURE, "--seeds 0 --policies snapkv --prompt 96 --tokens 40 --sequences 3"
    )
    snapkv = measured["policies"]["snapkv"]
    assert snapkv["largest"]["max"] < long_rollouts.BOUND < 0.1 < snapkv["full_mean"]["min"]
    assert 1 < snapkv["nats_per_token"]["median"] < math.log(long_rollouts.VOCAB)


def test_the_reward_counts_right_letters():
    words = ["abcdef", "fedcba"]
    answers = [grpo.continued(word) for word in words]
    assert grpo.rewards(words, answers) == [1.0, 1.0]
    assert grpo.rewards(words, ["x" + answers[0][1:], answers[1][: grpo.ANSWER // 2]]) == [
        1 - 1 / grpo.ANSWER, 0.5,
    ]  # fmt: skip


def test_the_notebook_runs():
    notebooks.run("09_bounded_rollouts", smoke=True)
