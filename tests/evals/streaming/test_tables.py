"""StreamingLLM's tables: cases, means over texts, and verdicts on synthetic records."""

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.lib import paired_losses
from jaxkv.evals.lib.claim import HOLDS, NOT
from jaxkv.evals.lib.paired_losses import Case
from jaxkv.evals.streaming import claims, tables
from tests.tiny import write_tiny


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return models.load(write_tiny(tmp_path_factory.mktemp("sinks") / "model"))


def test_a_front_shifts_no_prediction(llm):
    ids = [int(x) for x in np.random.default_rng(0).integers(2, 250, 60)]
    plain = paired_losses.losses_of(llm, ids, Case("full"))
    front = paired_losses.losses_of(llm, ids, Case("full", front="a"))
    assert plain.shape == front.shape == (59,)
    encoded = llm.tokenizer.encode("a")
    expected = np.concatenate(list(models.losses(llm, [*encoded, *ids], "full")))
    np.testing.assert_allclose(front, expected[len(encoded) :], rtol=1e-6)


def test_the_curve_of_few_predictions_follows_the_base():
    random = np.random.default_rng(2)
    base = random.normal(size=9)
    found = {name: {"loss": list(base + 0.1 * n)} for n, name in enumerate(tables.CURVES)}
    found[tables.BASE] = {"loss": list(base)}
    # Few tokens: their losses have another mean, of the base too.
    number = tables.CURVES.index("re-computation")
    found["re-computation"] = {"loss": list(base + 5 + 0.1 * number), "base": list(base + 5)}
    curve = tables.curve({"a text": {"bins": found}})
    means = base[:8].reshape(-1, 2).mean(1)
    np.testing.assert_allclose(curve["re-computation"], means + 0.1 * number)
    np.testing.assert_allclose(curve[tables.BASE], means)
    assert curve["tokens"] == [512, 1024, 1536, 2048]


def row(gaps):
    return {
        "perplexity": 30.0,
        "loss_over_base": float(np.mean(gaps)),
        "standard_error": 0.001,
        "loss_over_base_by_text": gaps,
    }


def record(window=0.5, absolute=0.5, full=1.0, two=0.0):
    """A record with these losses over those of 4 sinks."""
    by_size = {
        str(size): {
            f"{n}+{size - n}": row([{0: window, 1: two, 2: two}.get(n, 0.0)] * 5)
            for n in tables.COUNTS
        }
        for size in tables.SIZES
    }
    others = {name: row([0.0] * 5) for name in (tables.BASE, *tables.OTHERS)}
    others[claims.ABSOLUTE] = row([absolute] * 5)
    table_6 = {name: row([0.1 * -number] * 5) for number, name in enumerate(tables.TABLE_6)}
    return {
        "model": "a model",
        "texts": dict.fromkeys("abcde"),
        "tables": by_size,
        "others": others,
        "beyond_context": others | {"full": row([full] * 5)},
        "table_6": table_6,
    }


@pytest.mark.parametrize(
    "says, holds, fails",
    [
        ("Full attention fails", record(), record(full=0.0)),
        ("A window alone", record(), record(window=0.0)),
        ("One or two sinks", record(two=0.05), record(two=0.0)),
        ("Positions must", record(), record(absolute=0.0)),
    ],
)
def test_verdicts_follow_the_losses(says, holds, fails):
    (claim,) = [
        c for c in claims.STREAMING if c.record == "streaming_tables" and c.says.startswith(says)
    ]
    assert claim.find(holds)[1] == HOLDS
    assert claim.find(fails)[1] == NOT


def test_every_claim_finds_its_rows():
    found = [c.find(record())[0] for c in claims.STREAMING if c.record == "streaming_tables"]
    assert len(found) >= 8 and all("a model, 5 novels" in text for text in found)
