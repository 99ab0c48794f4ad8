"""A key and a value per layer and KV head that are trained as a sink in front of a frozen model."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from jaxkv.models import continued, data, training
from jaxkv.models.recipes import recipe_from
from tests.models.training_data import write_tokens
from tests.tiny import write_tiny

pytestmark = pytest.mark.usefixtures("optax_promotes_dtypes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("model") / "model", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def texts(folder, tmp_path_factory) -> data.DataFolder:
    """A data folder with the tokenizer of that model."""
    return write_tokens(tmp_path_factory.mktemp("tokens"), vocab=None, tokenizer=folder)


def test_a_pair_starts_as_a_constant_token(folder, texts):
    """The first loss is that of the model with the token of the pair in front of every sample."""
    base = continued.open_base(folder)
    recipe = recipe_from(base.config, ["context=16", "rows=8", "train=sinks", "sinks=kv"])
    setting = base.setting(recipe, texts)
    weights, frozen = base.weights(setting, texts.id_of(data.END))
    assert weights.keys() == {"sink_keys", "sink_values"}
    assert {w.shape for w in weights.values()} == {setting.shapes["sink_keys"]}
    runs = data.batch(texts, "valid", 0, 0, 4, 16)
    found = training.mean_loss(setting, weights, jnp.asarray(runs), frozen)
    (first,), llm = base.tokenizer.front, models.load(folder)
    rows = [[first, first, *row[1:]] for row in runs.tolist()]
    wanted = [np.concatenate(list(models.losses(llm, ids, "full")))[1:] for ids in rows]
    assert float(found) == pytest.approx(np.mean(wanted), rel=1e-5)
    mass = np.asarray(training.first_token_mass(setting, weights | frozen, jnp.asarray(runs)))
    assert mass.shape == (2, 4) and np.all((mass > 0) & (mass < 1))
    before = {name: np.asarray(weight) for name, weight in weights.items()}
    trained = training.begin(setting, weights)
    trained, _ = training.update(setting, trained, setting.split(runs), frozen)
    changed = {name: np.asarray(weight) != before[name] for name, weight in trained.weights.items()}
    assert all(np.all(np.any(one, axis=3)) for one in changed.values())
