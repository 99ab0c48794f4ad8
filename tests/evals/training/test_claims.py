"""Verdicts on training with sinks by the numbers of a record; open without them."""

from __future__ import annotations

import math

import pytest

from jaxkv.evals.lib.claim import HOLDS, NOT, OPEN, PART, UNSEEN
from jaxkv.evals.training import claims


def variant(sinks, gaps=(0.0, 0.0, 0.0, 0.0), loss=4.0, seed=0, accuracy=None, chance=0.25):
    """A trained variant; gaps: loss with 0, 1, 2 and 4 sinks minus that with 4."""
    names = ("0+8", "1+7", "2+6", "4+4")
    lines = {
        name: {"perplexity": 50.0, "loss_over_base": gap, "standard_error": 0.001}
        for name, gap in zip(names, gaps, strict=True)
    }
    task = {"accuracy": accuracy, "standard_error": 0.01, "chance": chance}
    return {
        "recipe": {"sinks": sinks, "seed": seed},
        "weights": 3_000_000,
        "tokens": 5_000_000,
        "valid_loss": loss,
        "perplexity": {"book": {"predictions": 100, **lines}},
        "zeroshot": {} if accuracy is None else {"task": task},
    }


def paper(*perplexities):
    """A row of the paper's Table 3, as gaps."""
    return tuple(math.log(one / perplexities[-1]) for one in perplexities)


def verdict(number, *variants):
    """The verdict on the claim of that number, by a record of these variants."""
    record = {"variants": {f"{a['recipe']['sinks']}-{a['recipe']['seed']}": a for a in variants}}
    return claims.TRAINING[number].find(record)[1]


def both_seeds(loss):
    """Plain softmax, and a sink token with that loss; two seeds each."""
    variants = (("none", 4.0), ("token", loss))
    return [variant(sinks, loss=of, seed=seed) for sinks, of in variants for seed in (0, 1)]


NEEDS = (3.0, 0.1, 0.05, 0.0)  # as plain softmax in the paper
ONE = (3.0, 0.0, 0.0, 0.0)
CASES = {
    "several are needed": (0, [variant("none", NEEDS)], HOLDS),
    "one is needed": (0, [variant("none", ONE)], PART),
    "none is needed": (0, [variant("none")], NOT),
    "the paper's plain softmax": (0, [variant("none", paper(27.87, 18.49, 18.05, 18.05))], HOLDS),
    "the paper's zero sink": (1, [variant("zero", paper(29214, 19.90, 18.27, 18.01))], HOLDS),
    "the paper's sink token": (
        2,
        [variant("none", paper(27.87, 18.49, 18.05, 18.05)),
         variant("token", paper(1235, 18.01, 18.01, 18.02))],
        HOLDS,
    ),
    "zero needs one": (1, [variant("zero", ONE)], PART),
    "zero needs none": (1, [variant("zero")], UNSEEN),
    "zero is better without": (1, [variant("zero", (-0.1, 0, 0, 0))], NOT),
    "one token is enough": (2, [variant("none", NEEDS), variant("token", ONE)], HOLDS),
    "enough, but nothing gained": (2, [variant("none"), variant("token", ONE)], PART),
    "not enough": (2, [variant("none", NEEDS), variant("token", NEEDS)], NOT),
    "nothing to see": (2, [variant("none"), variant("token")], UNSEEN),
    "no worse": (3, both_seeds(4.01), HOLDS),
    "worse": (3, both_seeds(4.03), NOT),
    "worse, by one seed": (3, both_seeds(4.03)[::2], UNSEEN),
    "worse at one seed": (
        3,
        [variant("none", loss=4.0), variant("none", loss=4.2, seed=1), variant("token", loss=4.1),
         variant("token", loss=4.0, seed=1)],
        NOT,
    ),
    "as right": (4, [variant("none", accuracy=0.4), variant("token", accuracy=0.39)], HOLDS),
    "less right": (4, [variant("none", accuracy=0.4), variant("token", accuracy=0.3)], NOT),
    "by chance": (4, [variant("none", accuracy=0.26), variant("token", accuracy=0.2)], UNSEEN),
    "no tasks": (4, [variant("none"), variant("token")], OPEN),
    "no token": (2, [variant("none")], OPEN),
    "no plain": (0, [variant("token")], OPEN),
    "other seeds": (3, [variant("none"), variant("token", seed=1)], OPEN),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_verdicts_depend_on_the_numbers(case):
    number, variants, wanted = CASES[case]
    assert verdict(number, *variants).split(":")[0] == wanted


def small(**first):
    """A record of evals.training.backcopy; first: by variant, the gaps of 0 and 1 sinks."""
    line = lambda x: {"median": x, "min": x, "max": x, "n": 3}  # noqa: E731
    variants = {}
    for name in ("none", "zero", "logit", "token", "two_tokens"):
        none, one = first.get(name, (0.0, 0.0))
        over = {"0+24": line(none), "1+23": line(one), "2+22": line(0.0), "4+20": line(0.0)}
        variants[name] = {"summary": {"loss_over_base": over, "first_token": line(0.1)}}
    return {"variants": variants}


def test_verdicts_on_the_smallest_models():
    assert claims.small_one_enough(small(token=(0.3, 0.0), none=(0.5, 0.1)))[1] == HOLDS
    assert claims.small_one_enough(small(token=(0.3, 0.0)))[1] == PART
    assert claims.small_one_enough(small(token=(0.3, 0.1)))[1] == NOT
    assert claims.small_one_enough(small())[1] == NOT
    assert claims.small_two_needed(small(two_tokens=(0.9, 0.2)))[1] == HOLDS
    assert claims.small_two_needed(small(two_tokens=(0.9, 0.0)))[1] == NOT


def logits(text, distilled):
    """A record of sinks_distilled; the losses with no first token."""
    found = {"plain": 0.6, "zero": 0.3, "text": text, "distilled": distilled}
    variants = {
        f"{name}-0": {size: {"loss_over_base": gap} for size in ("0+256", "1+255", "4+252")}
        for name, gap in found.items()
    }
    run = {"steps": 160, "rows": 1, "context": 512}
    return {"variants": variants, "runs": {"distilled-0": run}, "stretches": {"a": 2048}}


def test_verdicts_on_sink_logits():
    text, verdict = claims.logits_replace(logits(0.01, 0.5))
    assert verdict == HOLDS and "81,920 tokens" in text
    assert claims.logits_replace(logits(0.06, 0.0))[1] == PART
    assert claims.logits_replace(logits(0.5, 0.0))[1] == NOT
    assert claims.distilled_better(logits(0.06, 0.03))[1] == HOLDS
    assert claims.distilled_better(logits(0.06, 0.05))[1] == NOT
