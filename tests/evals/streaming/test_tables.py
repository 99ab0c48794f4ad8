"""StreamingLLM's tables: cases, means over texts, and verdicts on synthetic records."""

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.lib import paired_losses
from jaxkv.evals.lib.claim import HOLDS, NOT, PART
from jaxkv.evals.lib.paired_losses import Case
from jaxkv.evals.streaming import claims, tables
from tests.tiny import write_tiny


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return models.load(write_tiny(tmp_path_factory.mktemp("sinks") / "model"))


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
    found = {name: {"loss": list(base + 0.1 * n)} for n, name in enumerate(tables.CURVES)}
    found[tables.BASE] = {"loss": list(base)}
    # Few tokens: their losses have another mean, of the base too.
    number = tables.CURVES.index("re-computation")
    found["re-computation"] = {"loss": list(base + 5 + 0.1 * number), "base": list(base + 5)}
    curve = tables.curve({"a text": {"bins": found}})
    means = base[:8].reshape(-1, 2).mean(1)
    np.testing.assert_allclose(curve["re-computation"], means + 0.1 * number)
    np.testing.assert_allclose(curve[tables.BASE], means)
    assert curve["tokens"] == [256, 768, 1280, 1792]


def row(gaps):
    return {
        "perplexity": 30.0,
        "loss_over_base": float(np.mean(gaps)),
        "standard_error": 0.001,
        "loss_over_base_by_text": gaps,
    }


def record(window=0.5, few=0.05, eight=0.0, larger=0.1, recomputed=0.0, **others):
    """A record with these losses over those of 4 sinks; others: by case."""
    gaps = {0: window, 1: few, 2: few, 4: 0.0, 8: eight}
    by_size = {
        str(size): table({f"{n}+{size - n}": gaps[n] for n in tables.COUNTS})
        for size in tables.SIZES
    }
    cases = dict.fromkeys((tables.BASE, *tables.OTHERS), 0.0) | {"full": 1.0}
    cases |= {claims.ABSOLUTE: others.pop("absolute", 0.5)}
    places = ("others", "within_context", "beyond_context")
    return {
        "model": "a model",
        "texts": dict.fromkeys("abcde"),
        "tables": by_size,
        "table_6": table({name: number * larger for number, name in enumerate(tables.TABLE_6)}),
        "larger": table({tables.LARGE_BASE: 0.0, tables.LARGE: recomputed}),
        **{place: table(cases | others) for place in places},
    }


def table(gaps):
    return {"tokens": [256, 8192], "rows": {name: row([gap] * 5) for name, gap in gaps.items()}}


RECOMPUTED = {"re-computation": -0.03}
NEWLINES = {"4 newlines+252": 0.05}


@pytest.mark.parametrize(
    "says, fails, verdict",
    [
        ("Full attention fails", record(full=0.0), NOT),
        ("A window alone", record(window=0.0), NOT),
        ("With sinks", record(**RECOMPUTED), PART),
        ("With sinks", record(recomputed=-0.03), PART),
        ("With sinks", record(recomputed=-0.03, **RECOMPUTED), NOT),
        ("The first tokens", record(**NEWLINES), NOT),
        ("One or two sinks", record(few=0.0), PART),
        ("One or two sinks", record(few=0.0, eight=0.03), NOT),
        ("A larger cache", record(larger=-0.1), NOT),
        ("Positions must", record(absolute=0.0), NOT),
        ("Evicting after", record(**{"4+253": 0.01}), NOT),
    ],
)
def test_verdicts_follow_the_losses(says, fails, verdict):
    (claim,) = [
        c for c in claims.STREAMING if c.record == "streaming_tables" and c.says.startswith(says)
    ]
    assert claim.find(record())[1] == HOLDS
    assert claim.find(fails)[1] == verdict


def test_re_computation_may_not_be_better_within_two_standard_errors():
    (claim,) = [c for c in claims.STREAMING if c.says.startswith("With sinks")]

    def verdict(*gaps):
        found = record()
        found["others"]["rows"]["re-computation"] = row(list(gaps))
        found["larger"]["rows"][tables.LARGE] = row(list(gaps))
        return claim.find(found)[1]

    assert verdict(-0.018, -0.019, -0.018, -0.019) == HOLDS
    assert verdict(0.0, -0.03, 0.0, -0.03) == NOT  # a mean of -0.015 with an error of 0.009
    assert verdict(-0.01) == NOT  # one text


def test_every_claim_finds_its_rows():
    found = [c.find(record())[0] for c in claims.STREAMING if c.record == "streaming_tables"]
    assert len(found) >= 8 and all("a model, 5 novels" in text for text in found)
