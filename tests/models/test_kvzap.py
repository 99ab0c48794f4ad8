"""KVzap: a ridge regression on hidden states predicts KVzip's scores, and a stream uses them."""

import numpy as np
import pytest

from jaxkv import UserError
from jaxkv.models.generation import kvzap
from jaxkv.models.generation.context_scores import around_context, context_scores, scores_by_layer
from jaxkv.models.generation.kvzap import fit_kvzap, kvzap_scores, kvzap_stream
from jaxkv.models.generation.kvzip import compress, layer_policies
from jaxkv.models.generation.streams import Stream
from jaxkv.models.loading.llm import load
from jaxkv.models.tools.passage import PASSAGE
from jaxkv.policies.prompt_compression.scored import Scored
from jaxkv.sampling import Sampling
from tests.tiny import write_tiny

SIZE = 100  # of passages
BOOK = PASSAGE.read_text("utf-8")[83:]
TEXT, NEW = BOOK[:449], BOOK[449:541]


@pytest.fixture(scope="module")
def weights(llm):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvzap, "FIT_TOKENS", SIZE)
        return fit_kvzap(llm, TEXT)


def test_ridge_is_the_closed_form_of_centred_data():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 40, 6)) + 3, rng.normal(size=(2, 40, 3)) - 5
    inputs = np.concatenate([x, np.ones((2, 40, 1))], axis=2)
    transposed = inputs.transpose(0, 2, 1)
    solved = kvzap.ridge(transposed @ inputs, transposed @ y, alpha=0.7)
    for layer in range(2):
        mean_x, mean_y = x[layer].mean(axis=0), y[layer].mean(axis=0)
        centred = x[layer] - mean_x
        inverse = np.linalg.inv(centred.T @ centred + 0.7 * np.eye(6))
        kernel = inverse @ centred.T @ (y[layer] - mean_y)
        np.testing.assert_allclose(solved[layer, :-1], kernel, atol=1e-9)
        np.testing.assert_allclose(solved[layer, -1], mean_y - mean_x @ kernel, atol=1e-9)


def test_the_fit_of_passages(llm, weights):
    front, _ = around_context(llm)
    ids = llm.tokenizer.encode(TEXT, bos=False, start=False)
    inputs, targets = [], []
    for start in range(0, len(ids) - SIZE + 1, SIZE):
        context = [*front, *ids[start : start + SIZE]]
        hidden, scores = zip(*scores_by_layer(llm, context, len(front)), strict=True)
        inputs.append(np.stack(hidden)[:, len(front) :])
        targets.append(np.log(np.stack(scores)[:, :, len(front) :]))
    x = np.concatenate(inputs, axis=1, dtype=np.float64)
    y = np.concatenate(targets, axis=2, dtype=np.float64)
    assert x.shape == (2, 4 * SIZE, 32)
    for layer in range(2):
        centred = x[layer] - x[layer].mean(axis=0)
        penalised = centred.T @ centred + np.eye(32)
        kernel = np.linalg.solve(penalised, centred.T @ y[layer].T).T
        np.testing.assert_allclose(weights.kernel[layer], kernel, rtol=1e-3, atol=1e-4)


def test_passages_fit_the_trained_context(llm, weights, monkeypatch):
    fitted = fit_kvzap(llm, TEXT)
    monkeypatch.setattr(kvzap, "FIT_TOKENS", 236)
    np.testing.assert_array_equal(fitted.kernel, fit_kvzap(llm, TEXT).kernel)
    assert not np.array_equal(fitted.kernel, weights.kernel)


def test_predictions_correlate_with_the_scores_of_other_text(llm, weights):
    front, _ = around_context(llm)
    ids = [*front, *llm.tokenizer.encode(NEW, bos=False, start=False)]
    predicted = kvzap_scores(llm, weights, ids)[:, :, len(front) :]
    scores = np.log(context_scores(llm, ids, len(front))[:, :, len(front) :])
    pairs = zip(predicted.reshape(4, -1), scores.reshape(4, -1), strict=True)
    correlations = [np.corrcoef(*pair)[0, 1] for pair in pairs]
    assert min(correlations) > 0.5, correlations


@pytest.mark.parametrize(
    "budgets, storage, share",
    [
        ("equal", "float", 1.0),
        ("adaptive", "float", 1.0),
        ("global", "float", 1.0),
        ("global", "int8", 0.9),  # a stream reads hidden states from its own caches
    ],
)
def test_a_stream_is_scored_by_predictions(llm, weights, budgets, storage, share):
    ids = llm.tokenizer.encode(NEW, bos=True)
    policy = Scored(capacity=20, sinks=4, window=6, budgets=budgets, start=16, storage=storage)
    scores = kvzap_scores(llm, weights, ids)
    expected = Stream(llm, layer_policies(policy, scores))
    expected.prefill([ids])
    compress(expected, scores)
    stream = kvzap_stream(llm, ids, weights, policy)
    places = [cached_places(llm, s) for s in (stream, expected)]
    assert len(places[0]) == len(places[1]) == 2 * 2 * 20
    assert len(places[0] & places[1]) >= share * len(places[1])
    if share == 1.0:
        assert stream.policies == expected.policies
    np.testing.assert_allclose(stream.decoding.logits, expected.decoding.logits, atol=1e-4)
    assert stream.decoding.position == expected.decoding.position == len(ids)
    np.testing.assert_array_equal(stream.decoding.seen, expected.decoding.seen)
    if share == 1.0:
        texts = [
            s.decode(Sampling(temperature=0.0), 12, ())[0].tolist() for s in (stream, expected)
        ]
        assert texts[0] == texts[1]


def cached_places(llm, stream):
    """(layer, KV head, position) of every cached token."""
    places = set()
    for layer, (policy, state) in enumerate(
        zip(stream.policies, stream.decoding.states, strict=True)
    ):
        cache = policy.cached(llm.spec, state)
        _, heads, slots = np.nonzero(np.asarray(cache.log_weight) > -np.inf)
        positions = np.asarray(cache.positions)[0, heads, slots]
        places |= {(layer, *pair) for pair in zip(heads.tolist(), positions.tolist(), strict=True)}
    return places


def test_weights_of_another_model_are_refused(weights, tmp_path):
    other = load(write_tiny(tmp_path, seed=1))
    with pytest.raises(
        UserError, match=r"belong to another model .*; name that model, or fit them"
    ):
        kvzap_scores(other, weights, [5, 6])


def test_bad_inputs(llm, weights):
    with pytest.raises(UserError, match="passages of 236 tokens, got a text of 9; give a longer"):
        fit_kvzap(llm, "Too short")
    with pytest.raises(UserError, match="the prompt is empty; give at least one token"):
        kvzap_stream(llm, [], weights, Scored())
    broken = weights._replace(kernel=weights.kernel * np.nan)
    with pytest.raises(UserError, match=r"must be finite, \[2, 2, 32\] and \[2, 2\], got"):
        kvzap_scores(llm, broken, [5, 6])
