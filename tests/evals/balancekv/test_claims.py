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
            "model": "tiny", "stretches": 3, "tokens": 512, "layers": {"0": {}}, "rounds": [1],
            "by_stretch": errors, "saturated": {"walk": 0.1},
        })[1]  # fmt: skip

    assert graded() == "holds"
    assert graded(stratified=[0.3, 0.31, 0.32]) == "holds in part"
    assert graded(uniform_weighted=[0.2, 0.31, 0.42]) == "does not hold here"
