"""KVzip's scores against the attention of an uncached program, and head shares from them."""

import dataclasses

import numpy as np
import pytest

from jaxkv import UserError
from jaxkv.models.generation.context_scores import (
    SINKS,
    around_context,
    context_scores,
    repetitions,
)
from jaxkv.models.loading.chat import Chat
from jaxkv.models.network.uncached import attend_with_probabilities, forward
from jaxkv.models.tools import calibrate
from jaxkv.models.tools.passage import PASSAGE

TEXT = PASSAGE.read_text("utf-8")[83:156]
SCORES = "jaxkv.models.generation.context_scores"
TEMPLATE = "{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}<a>"


def oracle(llm, ids, front):
    """Attention to sinks, piece and repetition: full attention, without that to other keys."""
    expected = np.zeros((llm.config.layers, llm.config.kv_heads, len(ids)))
    for piece, tokens in repetitions(llm, ids, front):
        inputs = np.array([[*ids, *tokens]], np.int32)
        layers = forward(llm.config, llm.weights, inputs, attend_with_probabilities)[2]
        counted = np.zeros(inputs.shape[1], bool)
        counted[: min(front, SINKS)] = counted[piece] = counted[len(ids) :] = True
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
    for model, chat in ((llm, llm.chat), (llm, Chat(TEMPLATE)), (learned, llm.chat)):
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
