"""KVzip's scores of a context, KVzap's predictions of them, and streams that use either."""

import dataclasses

import numpy as np
import pytest

from jaxkv import UserError
from jaxkv.models.generation import kvzap
from jaxkv.models.generation.context_scores import (
    around_context,
    context_scores,
    repetitions,
    scores_by_layer,
)
from jaxkv.models.generation.kvzap import fit_kvzap, kvzap_scores, kvzap_stream
from jaxkv.models.generation.kvzip import compress, kvzip_stream, while_reading
from jaxkv.models.generation.streams import Stream
from jaxkv.models.loading.chat import Chat
from jaxkv.models.loading.llm import load
from jaxkv.models.network.uncached import attend_with_probabilities, forward
from jaxkv.models.tools import calibrate
from jaxkv.models.tools.passage import PASSAGE
from jaxkv.policies.prompt_compression.scored import Scored
from jaxkv.sampling import Sampling
from tests.tiny import write_tiny

BOOK = PASSAGE.read_text("utf-8")[83:]
TEXT, PASSAGES, NEW = BOOK[:73], BOOK[:449], BOOK[449:541]
SIZE = 100  # of passages
SCORES = "jaxkv.models.generation.context_scores"
TEMPLATE = "{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}<a>"


def oracle(llm, ids, front):
    """Attention to sinks, piece and repetition: full attention, without that to other keys."""
    expected = np.zeros((llm.config.layers, llm.config.kv_heads, len(ids)))
    for piece, tokens in repetitions(llm, ids, front):
        inputs = np.array([[*ids, *tokens]], np.int32)
        layers = forward(llm.config, llm.weights, inputs, attend_with_probabilities)[2]
        counted = np.zeros(inputs.shape[1], bool)
        counted[: min(piece.start, 4)] = counted[piece] = counted[len(ids) :] = True
        for layer, attention in enumerate(layers):
            attention = np.asarray(attention[0], np.float64)[:, len(ids) :]
            others = attention[:, :, ~counted].sum(axis=2, keepdims=True)
            attention = attention * counted / (1 - others)  # a sink logit has the rest
            largest = attention.max(axis=1).reshape(llm.config.kv_heads, -1, inputs.shape[1])
            expected[layer, :, piece] = largest.max(axis=1)[:, piece]
    return expected


@pytest.mark.parametrize("piece, chunk", [(2048, 1024), (32, 64), (13, 1024)])
def test_scores_are_the_largest_attention_from_the_repetition(llm, monkeypatch, piece, chunk):
    monkeypatch.setattr(f"{SCORES}.PIECE", piece)
    monkeypatch.setattr(f"{SCORES}.CHUNK", chunk)
    done = []
    heads = llm.config.heads
    drawn = np.random.default_rng(0).normal(2, 1, (llm.config.layers, heads)).astype("f4")
    learned = dataclasses.replace(
        llm,
        config=dataclasses.replace(llm.config, sink_logit="learned"),
        weights=llm.weights | {f"layers.{i}.sink_logits": row for i, row in enumerate(drawn)},
    )
    longer = Chat("<system>" + TEMPLATE)  # more tokens than sinks
    for model, chat in ((llm, llm.chat), (llm, longer), (learned, llm.chat)):
        reader = dataclasses.replace(model, chat=chat)
        front, _ = around_context(reader)
        ids = front + llm.tokenizer.encode(TEXT, bos=False)
        scores = context_scores(reader, ids, len(front), lambda *counts: done.append(counts))
        np.testing.assert_allclose(scores, oracle(reader, ids, len(front)), rtol=2e-4, atol=1e-6)
        assert done[-1][0] == done[-1][1]


def test_requests(llm, monkeypatch):
    monkeypatch.setattr(f"{SCORES}.PIECE", 32)
    reader = dataclasses.replace(llm, chat=Chat(TEMPLATE))
    front, answer = around_context(reader)
    assert [llm.tokenizer.decode(ids) for ids in (front, answer)] == ["<u>", "</u><a>"]
    ids = front + llm.tokenizer.encode(TEXT, bos=False)
    pieces = [(piece, llm.tokenizer.decode(x)) for piece, x in repetitions(reader, ids, 3)]
    request = "\n\nRepeat the part of the previous context exactly, starting with"
    assert pieces == [
        (slice(3, 35), f"\n\nRepeat the previous context exactly.</u><a>{TEXT[:32]}"),
        (slice(35, 67), f"{request}{TEXT[24:32]}</u><a>{TEXT[32:64]}"),
        (slice(67, 76), f"{request}{TEXT[56:64]}</u><a>{TEXT[64:]}"),
    ]


def test_contexts_that_cannot_be_repeated(llm):
    with pytest.raises(UserError, match="needs tokens to repeat, got 0"):
        context_scores(llm, [0, 5], 2)
    with pytest.raises(UserError, match="context of 512 tokens, got 300 and 338; give at most"):
        context_scores(llm, [5] * 300, 1)
    config = dataclasses.replace(llm.config, windows=(None, 24))
    with pytest.raises(UserError, match="sliding windows; use another model"):
        context_scores(dataclasses.replace(llm, config=config), [5] * 30, 1)


@pytest.mark.parametrize(
    "template, times",
    [
        ("{{ messages[0].content | upper }}", 0),
        (TEMPLATE + TEMPLATE, 2),
    ],
)
def test_a_template_that_does_not_show_the_message_once(llm, template, times):
    reader = dataclasses.replace(llm, chat=Chat(template))
    with pytest.raises(UserError, match=f"must show a message once, got {times} times; use ano"):
        around_context(reader)


def test_shares_are_mean_scores(llm):
    about = calibrate.calibrate(llm, TEXT * 9, tokens=60)
    ids = llm.tokenizer.encode(TEXT, bos=True)[:61]
    means = context_scores(llm, ids, 1)[:, :, 1:].mean(axis=2)
    np.testing.assert_allclose(about.shares, means / means.sum(), atol=1e-6)
    assert about.text["tokens"] == 60 and about.encoding == llm.config.encoding
    head, times = calibrate.strongest(about, 1)[0]
    layer, kv_head = map(int, head.split("."))
    assert about.shares[layer][kv_head] == np.max(about.shares)
    assert times == pytest.approx(np.max(about.shares) / np.mean(about.shares))
    assert calibrate.calibrate(llm, TEXT * 9).text["tokens"] == (512 - 1 - 38 - 1) // 2


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


@pytest.fixture(scope="module")
def weights(llm):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvzap, "FIT_TOKENS", SIZE)
        return fit_kvzap(llm, PASSAGES)


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
    ids = llm.tokenizer.encode(PASSAGES, bos=False, start=False)
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
    fitted = fit_kvzap(llm, PASSAGES)
    monkeypatch.setattr(kvzap, "FIT_TOKENS", 236)
    np.testing.assert_array_equal(fitted.kernel, fit_kvzap(llm, PASSAGES).kernel)
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
    expected = Stream(llm, while_reading(policy))
    expected.prefill([ids])
    compress(expected, policy, [scores])
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
