"""The page of `jaxkv view`: its data equal the cache in numpy, and the attention without one."""

from __future__ import annotations

import base64
import json
import re
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.network.uncached import attend_with_probabilities, forward
from jaxkv.models.tools import view
from tests.tiny import write_sink_tokens

SINKS, WINDOW, TOKENS = 2, 6, 24
POLICY = f"streaming:sinks={SINKS},window={WINDOW}"


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(2, 258, TOKENS).tolist()


@pytest.fixture(scope="module")
def streamed(llm, ids):
    return view.record(llm, ids, POLICY, TOKENS)


class Scripts(HTMLParser):
    """The contents of a page's script elements by id, and every address that it names."""

    def __init__(self):
        super().__init__()
        self.scripts, self.addresses, self._id = {}, [], None

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self._id = values.get("id", "") if tag == "script" else None
        self.addresses += [values[name] for name in ("src", "href") if name in values]

    def handle_data(self, text):
        if self._id is not None:
            self.scripts[self._id] = self.scripts.get(self._id, "") + text


def parsed(page: str) -> Scripts:
    scripts = Scripts()
    scripts.feed(page)
    return scripts


def rows(packed: str, shape: tuple[int, int], tokens: int) -> list[np.ndarray]:
    """By query n, the codes [L,heads,n+1] of a packed triangle."""
    flat = np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.uint8).reshape(*shape, -1)
    assert flat.shape[2] == tokens * (tokens + 1) // 2
    return [flat[:, :, n * (n + 1) // 2 : (n + 1) * (n + 2) // 2] for n in range(tokens)]


def data_of(llm, record) -> dict:
    return json.loads(parsed(view.page(llm, record, "tiny", "text.txt")).scripts["data"])


def test_the_cached_tokens_are_those_of_streaming(llm, streamed):
    data = data_of(llm, streamed)
    config = llm.config
    cached = rows(data["cached"], (config.layers, config.kv_heads), TOKENS)
    for n, codes in enumerate(cached):
        token = np.arange(n + 1)
        expected = (token < SINKS) | (token > n - WINDOW)
        np.testing.assert_array_equal(codes, np.broadcast_to(view.ONE * expected, codes.shape))
    assert data["prompt"] is None and not data["selects"] and data["policy"] == POLICY


def test_the_attention_is_that_of_an_uncached_program(llm, streamed, ids):
    data, tokens = data_of(llm, streamed), np.array([ids], np.int32)
    attention = rows(data["attention"], (llm.config.layers, llm.config.heads), TOKENS)
    layers = forward(llm.config, llm.weights, tokens, attend_with_probabilities)[2]
    expected = np.stack([layer[0] for layer in layers])
    for n, codes in enumerate(attention):
        np.testing.assert_allclose((codes / 255.0) ** 2, expected[:, :, n, : n + 1], atol=0.005)


def test_losses_are_those_of_scoring(llm, streamed, ids):
    of_policy = np.concatenate(list(models.losses(llm, ids, POLICY)))
    of_full = np.concatenate(list(models.losses(llm, ids, "full")))
    data = data_of(llm, streamed)
    np.testing.assert_allclose(data["losses"], of_policy, atol=2e-3)
    np.testing.assert_allclose(data["fullLosses"], of_full, atol=2e-3)
    assert np.abs(np.subtract(data["losses"], data["fullLosses"])).max() > 0.01


def test_a_prompt_is_compressed_at_its_end(llm, ids):
    prompt, capacity = 16, 8
    record = view.record(llm, ids, f"snapkv:capacity={capacity},window=4", prompt)
    data = data_of(llm, record)
    shape = (llm.config.layers, llm.config.kv_heads)
    for n, codes in enumerate(rows(data["cached"], shape, TOKENS)):
        count = n + 1 if n + 1 < prompt else capacity + n + 1 - prompt
        assert ((codes > 0).sum(axis=2) == count).all()
        assert (codes[:, :, -min(4, n + 1) :] > 0).all()
    assert data["prompt"] == prompt


def test_weights_have_sixteen_codes_an_octave(llm, ids):
    policy = "stratified:sinks=1,window=3,sample=4,weighted=true"
    record = view.record(llm, ids, policy, TOKENS)
    stream = models.Stream(llm, policy, tokens=TOKENS)
    stream.prefill([ids])
    for layer, codes in enumerate(record.cached[:, :, -TOKENS:]):
        state = stream.decoding.states[layer]
        weights = view.weights_of_layer(*stream.policies[layer].cached(llm.spec, state), TOKENS)
        np.testing.assert_array_equal(codes > 0, weights > 0)
        cached = weights > 0
        decoded = 2 ** ((codes[cached].astype(float) - view.ONE) / view.OCTAVE)
        np.testing.assert_allclose(decoded, weights[cached], rtol=0.03)
    assert len(set(record.cached[:, :, -TOKENS:].ravel())) > 2


def test_chosen_layers(llm, ids, streamed):
    record = view.record(llm, ids, POLICY, TOKENS, layers=[1])
    assert record.layers == (1,)
    np.testing.assert_array_equal(record.attention[0], streamed.attention[1])
    np.testing.assert_array_equal(record.cached[0], streamed.cached[1])


def test_the_second_sink_token_has_no_loss(llm, tmp_path, ids):
    """No head predicts it: null in the page, and the other losses are those of scoring."""
    path = write_sink_tokens(tmp_path / "sinks.safetensors", llm.path, 2)
    with_sinks = models.load(llm.path, sinks=path)
    front = with_sinks.tokenizer.front
    assert front == (258, 259)
    tokens = [*front, *ids]
    data = data_of(with_sinks, view.record(with_sinks, tokens, POLICY, TOKENS))
    for name, policy in (("losses", POLICY), ("fullLosses", "full")):
        expected = np.concatenate(list(models.losses(with_sinks, tokens, policy)))
        assert data[name][0] is None and np.isnan(expected[0])
        np.testing.assert_allclose(data[name][1:], expected[1:], atol=2e-3)


def test_the_page_is_whole_and_loads_nothing(llm, ids):
    words = "</script><b>&amp;"
    odd = llm.tokenizer.encode(words, bos=False)
    page = view.page(llm, view.record(llm, odd, POLICY, len(odd)), "tiny", "<text>.txt")
    scripts = parsed(page)
    data = json.loads(scripts.scripts["data"])
    assert "".join(data["words"]) == words and data["text"] == "<text>.txt"
    assert scripts.addresses == [] and not re.search(r"https?:|@import|url\(|fetch\(", page)
    assert "__DATA__" not in page and page.rstrip().endswith("</html>")


def test_what_cannot_be_shown_is_refused(llm, monkeypatch):
    """tests/models/cli/test_view.py has the rules of the layers, the prompt and the cache."""
    with pytest.raises(UserError, match=r"at most 512 tokens, .*got 513; give --max-tokens 512"):
        view.check(llm, POLICY, 513, 9, None)
    monkeypatch.setattr(view, "MAX_BYTES", 1000)
    with pytest.raises(UserError, match=r"fewer --max-tokens, or fewer --layers"):
        view.check(llm, POLICY, 24, 24, None)
    assert view.check(llm, POLICY, 9, 9, [1, 1]) == (1,)
