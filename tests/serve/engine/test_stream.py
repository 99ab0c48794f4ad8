"""The engine gives the log probabilities of `Stream`, at any length, and draws of every layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import Spec, draws, models
from jaxkv.models.generation.serving import make_engine
from jaxkv.models.generation.streams import Stream
from jaxkv.policy_spec import by_layer
from jaxkv.rotary import NoPosition
from jaxkv.serve.engine import Request, answer
from jaxkv.serve.engine.prefill import init_prefill
from jaxkv.state.shared import deduplicate_shared
from tests.serve.engine.plain import plain
from tests.tiny import write_tiny

# One to three chunks of 16, with and without padding.
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40)
DRAWN = "reservoir:sinks=1,window=4,sample=4"


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> models.Llm:
    return models.load(write_tiny(tmp_path_factory.mktemp("tiny")))


def test_the_first_token_has_the_logits_of_a_stream(llm):
    ids = np.random.default_rng(0).integers(2, 258, max(LENGTHS)).tolist()
    policy = "streaming:sinks=2,window=14"
    engine = make_engine(llm, policy, max_batch=2, max_len=64, chunk=16)
    # With echo, another program computes the logits of all tokens of a chunk.
    requests = [
        Request((*ids[:length],), 1, logprobs=5, echo=echo)
        for length in LENGTHS
        for echo in (False, True)
    ]
    collected = iter(answer(engine, requests))
    for length in LENGTHS:
        stream = Stream(llm, policy)
        stream.prefill([ids[:length]])
        expected = np.asarray(jax.nn.log_softmax(stream.decoding.logits[0]))
        for _ in range(2):
            tokens, logprobs = zip(*next(collected).scored[-1].top, strict=True)
            np.testing.assert_allclose(
                logprobs, expected[[*tokens]], atol=1e-5, err_msg=str(length)
            )
            np.testing.assert_allclose(logprobs, np.sort(expected)[:-6:-1], atol=1e-5)


def engine_states(llm, seed):
    return init_prefill(plain(DRAWN), None, jnp.uint32(seed)).states


def stream_states(llm, seed):
    return Stream(llm, DRAWN, 2, [seed, seed + 10]).decoding.states


@pytest.mark.parametrize("make_states", [engine_states, stream_states])
def test_draws_differ_by_layer_sequence_and_seed(llm, make_states):
    positions = jnp.arange(8, dtype=jnp.uint32)[None, None]
    states = [state for seed in (3, 4) for state in make_states(llm, seed)]
    bits = np.concatenate([draws.bits(positions, s.rng).reshape(-1, 8) for s in states])
    assert len(states) == 4 and len({tuple(row) for row in bits.tolist()}) == len(bits)


def test_equal_layers_share_one_array():
    """Layers of one policy share the leaves that are equal in all of them."""
    spec = Spec(kv_heads=2, head_dim=4, scale=0.5, encoding=NoPosition())
    text = "1=window:window=3;4=reservoir:sinks=1,window=3,sample=2;*=streaming:sinks=1,window=4"
    policies = by_layer(text, 5)
    rngs = jax.random.split(jax.random.key(0), len(policies))
    states = [p.init(spec, 3, rng) for p, rng in zip(policies, rngs, strict=True)]
    shared = deduplicate_shared(policies, states)
    assert shared[0].positions is shared[2].positions and shared[0].count is shared[3].count
    assert shared[1].positions is not shared[0].positions
    assert shared[0].k is not shared[2].k
