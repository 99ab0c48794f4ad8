"""The comparison of numbers before and after a change: its cases, and what it tells apart."""

import numpy as np

from jaxkv.evals.correctness.numerics import CASES, compare, digest
from jaxkv.policies import POLICIES
from jaxkv.policy_spec import parse_policy


def test_every_policy_has_a_case():
    assert {name.partition(" ")[0] for name in CASES} == set(POLICIES)
    for name, text in CASES.items():
        assert parse_policy(text) and text.startswith(name.partition(" ")[0])


def test_bits_sums_and_tokens_are_told_apart():
    array = np.linspace(-1, 2, 50, dtype=np.float32)
    before = {"states": [digest(array)], "tokens": [3, 4]}

    def outcomes(change, tokens=(3, 4)):
        after = {"states": [digest(array + np.float32(change))], "tokens": [*tokens]}
        return [same for _, same in compare(after, before)]

    assert outcomes(0) == ["equal to the bit"] * 2
    assert outcomes(1e-6) == ["close", "equal to the bit"]
    assert outcomes(1e-2, (3, 5)) == ["different"] * 2
