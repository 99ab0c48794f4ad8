"""KVzip: the scores of a context decide what a stream caches of it."""

import numpy as np
import pytest

from jaxkv.models.generation.context_scores import context_scores
from jaxkv.models.generation.kvzip import kvzip_stream
from jaxkv.models.tools.passage import PASSAGE
from jaxkv.policies.prompt_compression.scored import Scored
from jaxkv.sampling import Sampling

TEXT = PASSAGE.read_text("utf-8")[83:156]


def best_of_layer(scores):
    """The sum of 32 scores of two heads: the three largest of each head, and the best others."""
    forced = np.sort(scores, axis=1)[:, -(16 // 5) :]
    others = np.sort(scores, axis=1)[:, : -(16 // 5)]
    return forced.sum() + np.sort(others, axis=None)[-(32 - forced.size) :].sum()


@pytest.mark.parametrize("budgets", ["equal", "adaptive", "global"])
def test_a_stream_caches_the_tokens_with_the_largest_scores(llm, budgets):
    ids = llm.tokenizer.encode(TEXT, bos=True)
    policy = Scored(capacity=20, sinks=1, window=3, budgets=budgets, start=128)
    stream = kvzip_stream(llm, ids, 1, policy)
    scores = context_scores(llm, ids, 1)[:, :, 1:-3]
    best = {
        "equal": np.sort(scores, axis=2)[:, :, -16:].sum(),
        "adaptive": sum(map(best_of_layer, scores)),
        "global": np.sort(scores, axis=None)[-64:].sum(),
    }
    total = 0.0
    for layer, (of_layer, state) in enumerate(
        zip(stream.policies, stream.decoding.states, strict=True)
    ):
        cache = of_layer.cached(llm.spec, state)
        for head in range(2):
            stored = np.asarray(cache.log_weight)[0, head] > -np.inf
            positions = set(np.asarray(cache.positions)[0, head][stored].tolist())
            assert positions >= {0, *range(len(ids) - 3, len(ids))}
            total += sum(scores[layer, head, n - 1] for n in positions if 1 <= n < len(ids) - 3)
    assert total == pytest.approx(best[budgets], rel=1e-5)
    stream.prefill([llm.tokenizer.encode(" The end.", bos=False, start=False)])
    tokens, _ = stream.decode(Sampling(temperature=0.0), 4, ())
    assert tokens.shape == (1, 4)
