"""Sampled caches against streaming at equal bytes: cases, cached tokens, verdict."""

import pytest

from jaxkv import models
from jaxkv.evals.lib import state_sizes
from jaxkv.evals.lib.claim import HOLDS, NOT
from jaxkv.evals.reservoir import claims, stream_losses
from jaxkv.policy_spec import parse_policy
from tests.tiny import write_tiny


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return models.load(write_tiny(tmp_path_factory.mktemp("samples") / "model"))


def test_streaming_has_at_least_the_bytes_of_every_sampled_cache(llm):
    cases = stream_losses.cases(llm)
    most = max(state_sizes.sequence_bytes(llm, policy) for policy in stream_losses.SAMPLED.values())
    window = parse_policy(cases["streaming"].policy).window
    assert most <= state_sizes.sequence_bytes(llm, cases["streaming"].policy)
    assert most > state_sizes.sequence_bytes(llm, state_sizes.streaming(window - 1))


def test_every_variant_differs_in_its_fields_alone(llm):
    cases = stream_losses.cases(llm)
    plain = parse_policy(cases["reservoir"].policy)
    both = parse_policy(cases["reservoir, weighted, absolute"].policy)
    assert (plain.weighted, plain.positions) == (False, "cache")
    assert (both.weighted, both.positions) == (True, "absolute")
    assert (plain.sinks, plain.window, plain.sample) == (both.sinks, both.window, both.sample)


@pytest.mark.parametrize(
    "policy, expected",
    [
        ("streaming:sinks=2,window=14", 16),
        ("reservoir:sinks=2,window=6,sample=8", 16),
        # Blocks of 4 wait until they are full; then one of two stays, until 4 are in the sample.
        ("stratified:sinks=2,window=6,sample=4", 2 + 6 + 3),
    ],
)
def test_cached_tokens_are_counted(policy, expected):
    found = stream_losses.mean_cached(parse_policy(policy), tokens=2_048, chunk=1)
    assert found == pytest.approx(expected, abs=0.6)


def record(over, weighted=0.0):
    names = {"streaming": 0.0, "window": over, "reservoir": over, "reservoir, weighted": weighted}
    rows = {
        name: {"loss_over_base": gap, "standard_error": 0.01, "loss_over_base_by_text": [gap] * 2,
               "cached": 256.0, "tokens": [512, 20_000]} for name, gap in names.items()
    }  # fmt: skip
    bins = {name: {"commit": "0" * 40, "loss": [3 + gap] * 4} for name, gap in names.items()}
    by_text = {name: {"tokens": 1024, "bins": bins} for name in ("a", "b")}
    return {"model": "a model", "texts": {"a": 1024, "b": 1024}, "rows": rows, "by_text": by_text}


def test_the_verdicts_follow_the_losses():
    plain, weights = [c for c in claims.RESERVOIR if c.record == "stream_losses"]
    assert plain.find(record(-0.03))[1] == HOLDS
    assert plain.find(record(0.03))[1] == NOT
    assert "256 cached, 20,000 tokens read" in plain.find(record(0.03))[0]
    assert weights.find(record(0.03, weighted=0.02))[1] == HOLDS
    assert weights.find(record(0.03, weighted=0.3))[1] == NOT
    assert "weighted" in weights.find(record(0.03))[0]
    assert "weighted" not in plain.find(record(0.03))[0]
