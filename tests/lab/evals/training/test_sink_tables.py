"""Tables of trained variants: batched scores equal single ones, and runs must be comparable."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.evals.training import sink_tables
from jaxkv.models.network import uncached
from jaxkv.models.training import data, training
from jaxkv.models.training.export import export
from jaxkv.models.training.pretrain import setting_of
from tests.models.training_data import TEXT, small, write_tokens


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """A model with a sink token and weights large enough for attention to matter."""
    tokens = write_tokens(tmp_path_factory.mktemp("data"))
    folder = tmp_path_factory.mktemp("model") / "hf"
    setting = setting_of(small("layers=2", "sink_variant=token", "context=48"), tokens)
    weights = {n: 8 * w if w.ndim > 1 else w for n, w in training.begin(setting).weights.items()}
    tokenizer = tokens.folder / data.TOKENIZER
    export(folder, setting.config, weights, tokenizer, setting.front)
    return models.load(folder)


@partial(jax.jit, static_argnums=0)
def predicted(config, weights, inputs):
    decoder, hidden, _ = uncached.forward(
        config, weights, inputs, uncached.attend_with_probabilities
    )
    return decoder.logits(hidden)


def alone(llm, context, choice):
    """Mean log-likelihood of one choice, and whether greedy decoding generates it."""
    front, ids = list(llm.tokenizer.front), llm.tokenizer.encode(choice, bos=False)
    before = llm.tokenizer.encode(context, bos=False) or [llm.eos[0]]
    keep = max(1, llm.config.context + 1 - len(front) - len(ids))
    sequence = np.array([front + before[max(0, len(before) - keep) :] + ids], np.int32)
    inputs = np.pad(
        sequence[:, :-1], ((0, 0), (0, max(0, llm.config.context + 1 - sequence.shape[1])))
    )
    first = sequence.shape[1] - 1 - len(ids)
    logits = np.asarray(predicted(llm.config, llm.weights, inputs), np.float64)
    logits = logits[0, first : first + len(ids)]
    likely = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return likely[range(len(ids)), ids].mean(), list(logits.argmax(1)) == ids


def test_batched_scores_equal_those_of_single_pairs(llm):
    """Short and long pairs, without a context, and with contexts that must be cut."""
    pairs = [
        ("the cat", " sat on a mat"),
        ("", "dog"),
        (TEXT, " over the hill"),
        (TEXT * 4, " sun"),
        ("the cat sat", " " + TEXT * 4),
        ("the dog run over", " the hill to see what was there"),
    ]
    scores = sink_tables.score(llm, pairs * 9)  # more than one batch
    for (mean, greedy), pair in zip(scores, pairs * 9, strict=True):
        expected, writes = alone(llm, *pair)
        assert mean == pytest.approx(expected, rel=1e-4) and greedy == writes


def test_a_greedily_generated_choice_is_the_likeliest(llm):
    context = "the cat sat"
    text = models.generate(llm, context, "full", 3, ignore_eos=True, temperature=0).text
    # The text must tokenize to the generated tokens, or another text would be scored.
    assert llm.tokenizer.encode(context + text) == [
        *llm.tokenizer.encode(context), *llm.tokenizer.encode(text, bos=False)
    ]  # fmt: skip
    assert sink_tables.score(llm, [(context, text)])[0][1]
    assert not sink_tables.score(llm, [(context, " zzz")])[0][1]


def test_accuracy_counts_the_likeliest_choice(llm):
    choices = [" sat on a mat", " over the hill", " dog"]
    means = [alone(llm, "the", choice)[0] for choice in choices]
    rows = [{"context": "the", "choices": choices, "answer": answer} for answer in range(3)]
    row = {"context": "the cat", "choices": [" zzz"], "answer": 0}
    accuracy = sink_tables.accuracy(llm, [*rows, row])
    assert accuracy["accuracy"] == 0.25 and accuracy["chance"] == 0.25 and accuracy["rows"] == 4
    assert sink_tables.accuracy(llm, [rows[int(np.argmax(means))]])["accuracy"] == 1


@pytest.mark.slow
def test_table_3_reads_the_same_predictions_with_every_number_of_sinks(llm):
    text = llm.tokenizer.encode(TEXT * 3, bos=False)
    table = sink_tables.table_3(llm, text, cache=12)
    assert list(table) == ["0+12", "1+11", "2+10", "4+8"]
    ids = [*llm.tokenizer.front, *text]
    losses = np.concatenate(list(models.losses(llm, ids, "streaming:sinks=2,window=10")))
    # The token after the sink is predicted by some variants only.
    assert table["2+10"]["loss"] == pytest.approx(losses[1:].mean(), rel=1e-5)
    assert table["0+12"]["loss"] != table["2+10"]["loss"]
    assert table["4+8"]["loss_over_base"] == 0


def test_losses_are_paired_by_prediction():
    base = np.full(3_000, 2.0)
    line = sink_tables.line(base + 0.5, base)
    assert line["loss_over_base"] == 0.5 and line["standard_error"] == 0


def test_the_first_token_is_the_sink(llm):
    ids = np.array(llm.tokenizer.encode(TEXT * 30, bos=False))
    mass = sink_tables.first_token(llm, {"text": ids})
    runs = sink_tables.samples(llm, {"text": ids}, llm.config.context)
    assert runs.shape == (sink_tables.SAMPLES, 48) and set(runs[:, 0]) == {llm.tokenizer.front[0]}
    seen = sink_tables.maps(llm.config, llm.weights, runs)
    expected = [np.asarray(layer)[:, 24:, 0].mean(1) for layer in seen]
    np.testing.assert_allclose(mass, expected, rtol=1e-5)
    assert sink_tables.draw(llm, {"text": ids}, "token").startswith(b"\x89PNG")


def test_runs_must_differ_only_in_sinks_and_seed():
    recipe = {"sink_variant": "none", "seed": 0, "lr": 1.0}
    run = {"recipe": recipe, "data": "d", "dtype": "float32"}
    second_run = run | {"recipe": run["recipe"] | {"sink_variant": "token", "seed": 1}}
    sink_tables.check(["none-0", "token-1"], [run, second_run])
    with pytest.raises(UserError, match=r"differ: \['lr'\]"):
        sink_tables.check(["a", "b"], [run, run | {"recipe": run["recipe"] | {"lr": 2.0}}])
    with pytest.raises(UserError, match=r"differ: \['data'\]"):
        sink_tables.check(["a", "b"], [run, run | {"data": "e"}])
    with pytest.raises(UserError, match="of their own"):
        sink_tables.check(["a", "a"], [run, run])
