"""Every public function refuses token ids and texts of other types in one line."""

from __future__ import annotations

import numpy as np
import pytest

from jaxkv import UserError, models
from jaxkv.models.generation import kvzap
from jaxkv.models.generation.context_scores import context_scores
from jaxkv.models.generation.kvzip import kvzip_stream
from jaxkv.models.tools.calibrate import calibrate
from jaxkv.policies import KeyDiff
from jaxkv.policies.prompt_compression.scored import Scored

PREDICTOR = np.zeros((2, 2, 32), np.float32), np.zeros((2, 2), np.float32)
READERS = {
    "score": lambda llm, ids: models.score(llm, ids, "full"),
    "losses": models.losses,
    "prefill": lambda llm, ids: models.Stream(llm).prefill([ids]),
    "context_scores": lambda llm, ids: context_scores(llm, ids, 1),
    "kvzip_stream": lambda llm, ids: kvzip_stream(llm, ids, 1, Scored()),
    "kvzap_stream": lambda llm, ids: kvzap.kvzap_stream(
        llm, ids, kvzap.KVzap(*PREDICTOR, llm.source_fingerprint), Scored()
    ),
    "generate": lambda llm, ids: models.generate(llm, [[2, 3], ids], "full", max_new_tokens=2),
}
RULE = "a prompt or text must be a list of token ids, whole numbers, got {}; encode it with"
UNKNOWN = r"token ids must be from 0 to 257, got 2\.\.{}; give those of the model"
WRONG_IDS = {
    "floats": ([1.5, 2.5], RULE.format(r"\[1.5, 2.5\]")),
    "NaN": ([float("nan"), 2], RULE.format(r"\[nan, 2\]")),
    "None among them": ([1, None], RULE.format(r"\[1, None\]")),
    "no list": (5, RULE.format("5")),
    "lists of several lengths": ([[1], [2, 3]], RULE.format(".*")),
    "two axes": (np.ones((9, 9), np.int32), RULE.format(r"array\(\[\[1, 1, .*")),
    "texts": (["a", "b"], RULE.format(r"\['a', 'b'\]")),
    "beyond int64": ([2**70, 1], RULE.format(r"\[11805.*")),
    "unknown": ([2, 258], UNKNOWN.format(258)),
    "unknown of int64": (np.array([2, 2**32 + 5]), UNKNOWN.format(2**32 + 5)),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", WRONG_IDS)
def test_wrong_ids(llm, unchecked, reader, name):
    ids, rule = WRONG_IDS[name]
    with pytest.raises(UserError, match=rf"^{rule}") as info:
        READERS[reader](llm, ids)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    "read",
    [
        kvzap.fit_kvzap,
        calibrate,
        lambda llm, text: llm.tokenizer.encode(text),
        lambda llm, text: models.Conversation(llm).say(text),
    ],
)
def test_a_text_is_a_str(llm, unchecked, read):
    with pytest.raises(UserError, match=r"text must be a str, got \[1, 2\]; give a text"):
        read(llm, [1, 2])


@pytest.mark.parametrize(
    "call, rule",
    [
        (lambda llm: calibrate(llm, "a" * 99, tokens=1.5), "tokens must be a whole number, got 1"),
        (lambda llm: context_scores(llm, [0, 5], None), "front must be a whole number, got None"),
        (lambda llm: models.Stream(llm).prefill(None), "a list of token ids per sequence, got No"),
        (lambda llm: models.Stream(llm).prefill([]), "got 0 for 1 sequences"),
        (lambda llm: kvzip_stream(llm, [0, 5], 1, "keydiff"), "a function, got 'keydiff'; give"),
        (lambda llm: kvzip_stream(llm, [0, 5], 1, Scored(function=max)), "a function, got Scored"),
        (lambda llm: kvzap.kvzap_stream(llm, [5], None, KeyDiff()), "a function, got KeyDiff"),
        (lambda llm: kvzap.kvzap_stream(llm, [5], None, Scored()), "be a KVzap, got None; fit_"),
        (lambda llm: kvzap.kvzap_scores(llm, "file", [5]), "must be a KVzap, got 'file'; fit_"),
    ],
)
def test_arguments_beside_the_ids(llm, unchecked, call, rule):
    with pytest.raises(UserError, match=rule):
        call(llm)
