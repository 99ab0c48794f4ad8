"""The attention scores of SnapKV's observation window, compared with numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.contract import Chunk, Spec
from jaxkv.policies import SnapKV
from jaxkv.policies.prompt_compression.base import attention_of_last_queries
from jaxkv.rotary import Alibi, NoPosition, rotary
from tests.core import oracle

TOKENS, WINDOW, KV_HEADS, GROUP, HEAD_DIM, SCALE = 40, 6, 2, 3, 8, 0.4
HEADS = KV_HEADS * GROUP


def scores(q, k, window, theta, slopes, softcap):
    """Attention of the last queries to each token [N,T], including their own tokens."""
    tokens, positions = len(q), np.arange(len(q))
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    if theta is not None:
        q, k = (oracle.rotate_heads(x, positions, theta) for x in (q, k))
    sums = np.zeros((HEADS, tokens))
    for head in range(HEADS):
        for n in range(max(0, tokens - window), tokens):
            logits = k[: n + 1, head // GROUP] @ q[n, head] * SCALE
            if softcap is not None:
                logits = softcap * np.tanh(logits / softcap)
            if slopes is not None:
                logits = logits - slopes[head] * (n - positions[: n + 1])
            e = np.exp(logits - logits.max())
            sums[head, : n + 1] += e / e.sum()
    return sums


@pytest.mark.parametrize("tokens", [TOKENS, WINDOW, 3])
@pytest.mark.parametrize(
    "encoding, theta, softcap",
    [
        (rotary(HEAD_DIM, 100.0), 100.0, None),
        (NoPosition(), None, 1.5),
        (Alibi.of(HEADS), None, None),
    ],
    ids=["rotary", "softcap", "alibi"],
)
def test_scores_of_the_last_queries_equal_numpy(rng, encoding, theta, softcap, tokens):
    """All scores are compared, not only those of the chosen tokens."""
    spec = Spec(KV_HEADS, HEAD_DIM, SCALE, encoding, softcap, group=GROUP)
    policy = SnapKV(capacity=WINDOW + 3, window=WINDOW, kernel=1, start=TOKENS)
    valid = np.ones((2, TOKENS), bool)
    valid[0, tokens:] = False  # padding after the prompt
    valid[1, : TOKENS - tokens] = False  # padding before it
    sizes = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (rng.normal(size=(2, TOKENS, n, HEAD_DIM)).astype(np.float32) for n in sizes)
    positions = (np.cumsum(valid, axis=1) - 1).astype(np.uint32)
    update = jax.jit(lambda state, chunk: policy.update(spec, state, chunk)[1])
    state = policy.init(spec, 2, jax.random.key(0))
    for first in range(0, TOKENS, 8):
        arrays = (x[:, first : first + 8] for x in (q, k, v, positions, valid))
        state = update(state, Chunk(*map(jnp.asarray, arrays)))
    actual = np.asarray(jax.jit(lambda state: attention_of_last_queries(spec, state))(state))
    actual = actual.reshape(2, HEADS, -1)
    slopes = encoding.slopes if isinstance(encoding, Alibi) else None
    for sequence in range(2):
        mask = valid[sequence]
        expected = scores(q[sequence][mask], k[sequence][mask], WINDOW, theta, slopes, softcap)
        np.testing.assert_allclose(actual[sequence][:, :tokens], expected, rtol=2e-5, atol=2e-6)
        assert not actual[sequence][:, tokens:].any(), "an empty slot has no score"
