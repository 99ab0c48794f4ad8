"""Tables of trained variants: one text for all, and runs must be comparable."""

from __future__ import annotations

import numpy as np
import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.evals.training import sink_tables
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
    weights = {n: 8 * w if w.ndim > 1 else w for n, w in training.init(setting).weights.items()}
    tokenizer = tokens.folder / data.TOKENIZER
    export(folder, setting.config, weights, tokenizer, setting.front)
    return models.load(folder)


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
