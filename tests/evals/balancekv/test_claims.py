"""BalanceKV's claims: which differences of errors are sure."""

from __future__ import annotations

from jaxkv.evals.balancekv import claims


def test_a_difference_is_sure_over_the_same_stretches():
    uniform = [0.3, 0.5, 0.7, 0.9]
    assert claims.surely_below([x - 0.1 for x in uniform], uniform)  # although stretches differ
    assert not claims.surely_below([0.2, 0.6, 0.6, 0.9], uniform)
    assert not claims.surely_below([x + 0.1 for x in uniform], uniform)
    assert claims.of_stretches([0.1, 0.3]) == "0.200 ± 0.200"


def test_the_walk_must_be_below_both_uniform_samplings_and_stratified():
    names = (*claims.PAPERS, *claims.OTHERS)

    def graded(**of):
        errors = {name: {"1": [0.4, 0.41, 0.42]} for name in names}
        errors["balance, walk"] = {"1": [0.3, 0.31, 0.32]}
        errors |= {name.replace("_", ", "): {"1": values} for name, values in of.items()}
        return claims.nearer_than_uniform({
            "model": "tiny", "stretches": 3, "tokens": 512, "layers": {"0": errors}, "rounds": [1],
            "by_stretch": errors, "saturated": {"walk": 0.1},
        })[1]  # fmt: skip

    assert graded() == "holds"
    assert graded(stratified=[0.3, 0.31, 0.32]) == "holds in part"
    assert graded(uniform_weighted=[0.2, 0.31, 0.42]) == "does not hold here"


def tree_record(chosen, without_holes, cached=224.0):
    """A record of two texts: losses of two levels by text, and without holes minus with them."""
    line = lambda by_text, cached=0.0: {  # noqa: E731
        "loss_over_base": sum(by_text) / len(by_text), "standard_error": 0.001,
        "loss_over_base_by_text": by_text, "cached": cached,
    }  # fmt: skip
    error = {"streaming": {"error": 0.2}}
    error |= {f"{x} x 64, {y}": {"error": 0.2} for x in (2, 3) for y in (0, 1)}
    return {
        "model": "a model", "texts": {"a": 1, "b": 1}, "tokens": [512, 9_984],
        "rows": {
            "3 x 64": line([0.04] * len(chosen), 208.0), "2 x 64": line(chosen, cached),
            "reservoir": line([0, 0]),
        },
        "equal_tokens": {"2 x 64, equal tokens": line([0.02, 0.02])},
        "trees": {"3 x 64": {"used": 80.0, "slots": 128}, "2 x 64": {"used": 64.0, "slots": 96}},
        "errors": {"rows": error, "layers": [0, 6]},
        "holes": {"widest": 1, "share": 0.47, "over_holes": line([without_holes] * 2)},
    }  # fmt: skip


def test_two_levels_must_cache_more_and_lower_the_loss_of_every_text():
    found, verdict = claims.uses_more(tree_record([0.03, 0.02, 0.025, 0.025, 0.025], 0))
    assert verdict == "holds"
    assert "2 x 64 +0.0250 ± 0.0020 (224 tokens cached, 64 of the tree's 96" in found
    assert "error of attention in layers 0, 6 (absolute positions)" in found
    assert claims.uses_more(tree_record([0.03, 0.02], 0))[1] == "holds in part"  # too few texts
    assert claims.uses_more(tree_record([0.03, 0.05], 0))[1] == "holds in part"
    assert claims.uses_more(tree_record([0.06, 0.05], 0))[1] == "does not hold here"
    assert claims.uses_more(tree_record([0.03, 0.02], 0, cached=200.0))[1] == "does not hold here"


def test_holes_raise_the_loss_if_it_is_surely_lower_without_them():
    assert claims.holes_cost(tree_record([0, 0], -0.003))[1] == "holds"
    assert claims.holes_cost(tree_record([0, 0], -0.001))[1] == "does not hold here"
    assert "47% of all steps, 1 position wide" in claims.holes_cost(tree_record([0, 0], 0))[0]
