"""The bars of start-up follow from its seconds."""

import pytest

from jaxkv.evals.speed.startup import POLICIES, bars, variants


@pytest.mark.parametrize("slow", [1.0, 5.0])
def test_bars_compare_with_the_default_policy(slow):
    seconds = {name: [1.0] for name in variants("folder")}
    for name in seconds:
        if any(policy in name for policy in POLICIES):
            seconds[name] = [slow]
    depths = {depth: {"seconds": {"median": float(depth)}} for depth in ("12", "80")}
    met = {line["bar"]: line["met"] for line in bars(seconds, depths)}
    names = [name for name in met if "over streaming" in name]
    assert len(names) == 2 * len(POLICIES)
    assert all(met[name] == (slow == 1.0) for name in names)
    assert not met["seconds to compile prefill and decoding of 80 layers over 12 layers"]
    assert met["seconds to the first text of SmolLM2-135M, with nothing compiled"]
