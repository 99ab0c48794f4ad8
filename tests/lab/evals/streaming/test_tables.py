"""StreamingLLM's tables: cases, and means over texts."""

import numpy as np

from jaxkv import models
from jaxkv.evals.lib import paired_losses
from jaxkv.evals.lib.paired_losses import Case
from jaxkv.evals.streaming import tables


def test_a_prefix_shifts_no_prediction(llm):
    ids = [int(x) for x in np.random.default_rng(0).integers(2, 250, 60)]
    plain = paired_losses.losses_of(llm, ids, Case("full"))
    front = paired_losses.losses_of(llm, ids, Case("full", ("a", "a")))
    assert plain.shape == front.shape == (59,)
    encoded = llm.tokenizer.encode("a", bos=False)
    expected = np.concatenate(list(models.losses(llm, [*encoded, *encoded, *ids], "full")))
    np.testing.assert_allclose(front, expected[2 * len(encoded) :], rtol=1e-6)


def test_the_curve_of_few_predictions_follows_the_base():
    random = np.random.default_rng(2)
    base = random.normal(size=9)
    bins = {name: {"loss": list(base + 0.1 * n)} for n, name in enumerate(tables.CURVES)}
    bins[tables.BASE] = {"loss": list(base)}
    # Few tokens: their losses have another mean, of the base too.
    number = tables.CURVES.index("re-computation")
    bins["re-computation"] = {"loss": list(base + 5 + 0.1 * number), "base": list(base + 5)}
    curve = tables.curve({"a text": {"bins": bins}})
    means = base[:8].reshape(-1, 2).mean(1)
    np.testing.assert_allclose(curve["re-computation"], means + 0.1 * number)
    np.testing.assert_allclose(curve[tables.BASE], means)
    assert curve["tokens"] == [256, 768, 1280, 1792]
