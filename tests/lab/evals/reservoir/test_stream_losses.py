"""Sampled caches against streaming at equal bytes: cases, cached tokens."""

import pytest

from jaxkv.evals.lib import state_sizes
from jaxkv.evals.reservoir import stream_losses
from jaxkv.policy_spec import parse_policy


def test_streaming_has_at_least_the_bytes_of_every_sampled_cache(llm):
    cases = stream_losses.cases(llm)
    max_bytes = max(
        state_sizes.sequence_bytes(llm, policy) for policy in stream_losses.SAMPLED.values()
    )
    window = parse_policy(cases["streaming"].policy).window
    assert max_bytes <= state_sizes.sequence_bytes(llm, cases["streaming"].policy)
    assert max_bytes > state_sizes.sequence_bytes(llm, state_sizes.streaming(window - 1))


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
    counted = stream_losses.mean_cached(parse_policy(policy), tokens=2_048, chunk=1)
    assert counted == pytest.approx(expected, abs=0.6)
