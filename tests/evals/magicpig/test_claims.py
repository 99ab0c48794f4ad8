"""Verdicts on MagicPIG by the numbers of a record."""

from __future__ import annotations

import pytest

from jaxkv.evals.lib.claim import HOLDS, NOT, PART, UNSEEN
from jaxkv.evals.magicpig import claims, error_claims


def line(error, over=1.0, spread=0.0, share=0.02):
    return {
        "share": share,
        "error": {"mean": error, "median": error, "standard_error": spread},
        "over_topk": {"mean": over, "standard_error": spread},
    }


def drawn(topk, oracle, crossing=0.7, magicpig=0.05, mass=0.75):
    by = {"K": 10, "L": 150, "magicpig": line(magicpig), "topk": line(topk), "oracle": line(oracle)}
    kinds = {"topk": topk, "oracle": oracle}
    return {
        **{kind: {"0.05": line(error), "0.2": line(error)} for kind, error in kinds.items()},
        "crossing": crossing, "mass_of_top_fifth": mass, "by_tables": [by],
    }  # fmt: skip


def layers(*errors, spread=0.0):
    """Errors by layer of a method, at one share."""
    by = {str(n): {"error": {"mean": x, "standard_error": spread}} for n, x in enumerate(errors)}
    return line(sum(errors) / len(errors)) | {"layers": by}


def model(topk, others, uncentred=0.0005, spread=0.0):
    """Errors by layer, of top-k and of every other method."""
    kinds = dict.fromkeys(error_claims.METHODS, layers(*others, spread=spread))
    kinds |= {"topk": layers(*topk, spread=spread)}
    captured = {kind: dict.fromkeys(("0.02", "0.05"), x) for kind, x in kinds.items()}
    worse = layers(*(2 * x for x in others)) | {"share": uncentred}
    captured["magicpig, uncentred"] = {"0.02": worse}
    return {"budgets": {kind: {"0.05": kinds[kind]} for kind in ("topk", "oracle")},
            "captured": captured}  # fmt: skip


def record(of_drawn, of_model):
    return {"drawn": {"2": of_drawn}, "models": {"ours": of_model}}


LOWER, HIGHER = (0.5, 0.5, 0.5), (0.1, 0.1, 0.1)  # errors of top-k, where those of others are 0.3
OTHERS = (0.3, 0.3, 0.3)


@pytest.mark.parametrize(
    ("of_drawn", "topk", "verdict"),
    [
        (drawn(0.5, 0.03), LOWER, HOLDS),
        (drawn(0.5, 0.03), (0.5, 0.5, 0.1), PART),
        (drawn(0.5, 0.03), (9.0, 0.1, 0.1), NOT),  # its mean is higher, by one layer of three
        (drawn(0.5, 0.03, crossing=0.2), LOWER, NOT),
        (drawn(0.02, 0.03), LOWER, NOT),
    ],
)
def test_oracle_and_top_k(of_drawn, topk, verdict):
    assert error_claims.oracle_beats_topk(record(of_drawn, model(topk, OTHERS)))[1] == verdict


@pytest.mark.parametrize("find", ["beats_topk", "vattention_beats_topk"])
@pytest.mark.parametrize(
    ("topk", "spread", "verdict"),
    [(LOWER, 0.01, HOLDS), ((0.5, 0.5, 0.1), 0.01, PART), ((9.0, 0.1, 0.1), 0.01, NOT),
     (LOWER, 0.1, NOT), (HIGHER, 0.0, NOT)],
)  # fmt: skip
def test_a_mean_that_one_layer_makes_decides_nothing(find, topk, spread, verdict):
    given = record(drawn(0.5, 0.03), model(topk, OTHERS, spread=spread))
    text, found = getattr(error_claims, find)(given)
    assert found == verdict and "layer 0 0.300" in text


def test_the_lowest_error_of_all_methods():
    least = model(LOWER, OTHERS)
    least["captured"]["magicpig"] = dict.fromkeys(("0.02", "0.05"), layers(0.2, 0.2, 0.2))
    assert error_claims.at_equal_share(record({}, least))[1] == HOLDS
    least["captured"]["oracle"]["0.05"] = layers(0.1, 0.3, 0.3)
    text, verdict = error_claims.at_equal_share(record({}, least))
    assert verdict == PART and "5%, layer 0: magicpig 0.20, topk 0.50, oracle 0.10" in text


def geometry(cosine, value=0.2):
    pairs = ("sink keys of two stretches", "mean keys of two stretches")
    return {pair: {"mean": 1.0} for pair in pairs} | {
        "sink key with mean key": {"mean": cosine},
        "value of the sink over others": {"mean": value},
        "deviations": {"log |v - o|": 0.1, "logits": 2.0},
    }


@pytest.mark.parametrize(
    ("first", "keys", "values"), [(0.4, PART, PART), (0.1, HOLDS, HOLDS)]
)  # fmt: skip
def test_a_layer_without_a_sink_has_no_sink_key(first, keys, values):
    """The first layer has another geometry, and counts only if it has a sink."""
    given = {"models": {"ours": {"geometry": {"0": geometry(0.5, 0.9), "1": geometry(-0.9)}}}}
    maps = {"first_token": {"by_layer": [first, 0.5]}}
    text, verdict = error_claims.geometry_of_keys(given, maps)
    assert verdict == keys and ("no sink, not counted" in text) == (first < 0.3)
    assert error_claims.geometry_of_values(given, maps)[1] == values


@pytest.mark.parametrize(("share", "verdict"), [(0.0005, HOLDS), (0.009, PART)])
def test_centring(share, verdict):
    given = record(drawn(0.5, 0.03), model(LOWER, OTHERS, uncentred=share))
    assert error_claims.centring(given)[1] == verdict


@pytest.mark.parametrize(("times", "verdict"), [((3, 2), HOLDS), ((3, 1.2), PART), ((1, 1), NOT)])
def test_speed(times, verdict):
    sizes = {
        str(tokens): {
            "times_faster": {"median": ratio, "min": 1.0, "max": 4.0},
            "share_read": 0.1, "share_attended": 0.02, "seconds_to_make_tables": {"median": 1.0},
            "seconds_to_rebuild_tables": {"median": 0.5},
        }
        for tokens, ratio in zip((131072, 32768), times, strict=True)
    }  # fmt: skip
    assert claims.faster({"group": 4, "sizes": sizes})[1] == verdict


def loss(more, error=0.001):
    return {"over_full": {"mean": more, "two_errors": {"stretches": error, "seeds": error}}}


def perplexity(at_two, at_ten, quest=0.5, error=0.001):
    def variants(more):
        others = dict.fromkeys(error_claims.METHODS[1:], loss(quest))
        return {"magicpig": loss(more, error), **others}

    by_share = {"0.02": variants(at_two), "0.1": variants(at_ten)}
    found = {"prompt": 2048, "full": {"loss": 2.0}, "ends alone": loss(1.0), "shares": by_share}
    return {"perplexity": {"ours": found}}


@pytest.mark.parametrize(
    ("at_two", "at_ten", "error", "verdict"),
    [(0.05, 0.01, 0.01, HOLDS), (0.05, 0.01, 0.06, PART), (0.2, 0.05, 0.01, PART),
     (0.2, 0.2, 0.01, NOT)],
)  # fmt: skip
def test_little_is_lost(at_two, at_ten, error, verdict):
    assert claims.little_is_lost(perplexity(at_two, at_ten, error=error))[1] == verdict


@pytest.mark.parametrize(("quest", "verdict"), [(0.3, HOLDS), (0.1, PART), (0.01, NOT)])
def test_less_than_quest(quest, verdict):
    assert claims.less_than_others(perplexity(0.2, 0.05, quest))[1] == verdict


@pytest.mark.parametrize(
    ("by_tables", "quest", "verdict"),
    [((0.9, 0.85), 0.5, HOLDS), ((0.5, 0.9), 0.4, PART), ((0.9, 0.9), 0.95, NOT),
     ((0.9, 0.9), 0.9, NOT), ((0.5, 0.5), 0.1, NOT)],
)  # fmt: skip
def test_answers(by_tables, quest, verdict):
    by_ratio = {
        ratio: {"magicpig": {"score": own},
                **{name: {"score": quest} for name in (*error_claims.METHODS[1:], "snapkv")}}
        for ratio, own in zip(("0.125", "0.5"), by_tables, strict=True)
    }  # fmt: skip
    case = {"scored": True, "full": {"score": 0.9}, "ratios": by_ratio}
    record = {"samples": 20, "tasks": {"needle": {"1024": case}}}
    text, found = claims.answers(record)
    assert found == verdict and "needle, 1,024 tokens, 50%: full 90%, magicpig" in text
    assert "snapkv" not in text
    missed = {"needle": {"1024": case | {"scored": False}}}
    assert claims.answers(record | {"tasks": missed})[1] == UNSEEN


def test_bytes_of_magicpig_are_those_over_full():
    bytes_ = {"full": 100, "magicpig": 171}
    text, verdict = claims.of_bytes({"32768": {"state_bytes": bytes_}})
    assert "32,768 tokens 1.71" in text and verdict == claims.COUNTED


@pytest.mark.parametrize(("times", "verdict"), [((2.0, 3.0), HOLDS), ((1.1, 3.0), PART),
                                                ((0.5, 1.0), NOT)])  # fmt: skip
def test_tokens(times, verdict):
    def found(faster):
        spread = {"median": faster, "min": faster, "max": faster}
        return {
            "layers": 1, "of": 12, "tokens_per_second": {"full": spread}, "times_faster": spread,
            "share_attended": {"mean": 0.02}, "seconds_to_index": 3.0,
        }  # fmt: skip

    record = {str(i + 1): found(x) for i, x in enumerate(times)}
    assert claims.written_faster(record)[1] == verdict


def point(hash_, size, share=0.1, error=0.09):
    return {
        "hash": hash_, "K": 4, "L": 9, "share": share, "of_cache": size / 1000, "table_bytes": size,
        "error": {"mean": error, "standard_error": 0.001},
    }  # fmt: skip


def tuning(*cross):
    """A record of one point of simhash, and others."""
    points = [point("simhash", 100), *cross]
    line = [{"share": 0.01, "error": 0.2}, {"share": 0.25, "error": 0.05}]
    frontier = {"simhash": line, "crosspolytope": [x | {"error": 2 * x["error"]} for x in line]}
    found = {"points": points, "frontier": frontier}
    return {"target": 0.1, "models": {"ours": found}}, {"models": {"ours": model(LOWER, OTHERS)}}


@pytest.mark.parametrize(
    ("cross", "verdict"),
    [
        ([point("crosspolytope", 50)], HOLDS),
        ([point("crosspolytope", 200)], NOT),
        ([point("crosspolytope", 50, share=0.3)], PART),  # smaller only if it may read more
        ([], NOT),
    ],
)
def test_tuning(cross, verdict):
    record, sampled = tuning(*cross)
    sampled["models"]["ours"]["captured"]["topk"]["0.2"] = layers(0.11)
    text, found = error_claims.tuned(record, sampled)
    assert found == verdict, text
    assert "2% 2.00, 5% 2.00, 10% 2.00, 20% 2.00" in text and "top-k has an error of 0.11" in text


def test_the_error_at_a_share_is_between_the_points_of_a_frontier():
    line = [{"share": 0.01, "error": 0.4}, {"share": 0.04, "error": 0.1}]
    assert error_claims.error_at(line, 0.02) == pytest.approx(0.2)
