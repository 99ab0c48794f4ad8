"""The comparison with kvpress: budgets, our losses without shortcuts, and rows."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.benchmarks import kvpress_cases as cases
from jaxkv.evals.benchmarks import kvpress_ours as our_losses
from jaxkv.evals.benchmarks import kvpress_parity as compare
from jaxkv.policies import SnapKV
from tests.tiny import write_tiny

PROMPT, SCORED = 160, 8


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return models.load(write_tiny(tmp_path_factory.mktemp("peers") / "model"))


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(2, 250, PROMPT + SCORED + 1).tolist()


def test_budgets_are_those_of_kvpress():
    """By hand from its formula: 30 layers, a window of 64, beta 20."""
    assert [cases.budget(1024, ratio) for ratio in cases.RATIOS] == [768, 512, 256, 128]
    assert cases.budget(10, 0.99) == 1
    half = cases.pyramid_budgets(1024, 0.5, 30)
    assert (half[0], half[-1], np.mean(half)) == (960, 64, 512)
    assert half[1] == round(960 - (960 - 64) / 29)
    assert cases.pyramid_budgets(1024, 0.25, 30)[-1] == 2 * 768 - 960
    # The last layer would get 256 / 20 tokens, less than the window.
    assert cases.pyramid_budgets(1024, 0.75, 30) == [256] * 30
    long = cases.pyramid_budgets(32_768, 0.875, 30)  # the first layer is below its cap
    assert (long[0], long[-1]) == (round(2 * 4096 - 204.8), 205)


def test_every_case_has_a_press_and_its_budget():
    for prompt in (1024, 2048):
        keys = cases.keys(prompt, 30)
        assert {name for name, _ in keys} == {*cases.PRESSES, *cases.HALVED}
        assert {name for name, _ in cases.with_press(keys)} == set(cases.PRESSES)
    assert ("streaming", 0.5) not in cases.keys(1024, 30, ["streaming"])
    policies = cases.policies(1024, 0.75, 30)
    assert cases.BUDGETS not in policies  # kvpress then has no pyramid
    for name in cases.HALVED:  # 146 + (1024 - 146) / 2^3 tokens
        ends = policies[name].sinks + policies[name].window
        assert (policies[name].rounds, ends) == (3, 146)
    assert policies["snapkv"] == SnapKV(256, 64, 5, "mean", 1024)
    assert policies["streaming"].window == policies[cases.ENDS].window == 252
    assert cases.press("keydiff", 0.5)["fields"] == {"compression_ratio": 0.5}


@pytest.mark.slow
def test_one_reading_of_the_prompt_serves_every_policy(llm, ids):
    """The losses of every case equal those of its own prefill, scored in its own state."""
    read = our_losses.read_prompt(llm, ids[:PROMPT])
    chosen = cases.policies(PROMPT, 0.5, llm.config.layers)
    chosen |= {"full": cases.PromptEnds(0, PROMPT, PROMPT)}
    full = np.concatenate(list(models.losses(llm, ids, "full")))[PROMPT:]
    for name, policy in chosen.items():
        if name == "streaming":
            continue
        cached, losses = our_losses.losses_of(policy, read, ids[PROMPT:])
        if name == "full":
            np.testing.assert_allclose(losses, full, rtol=2e-5)
            continue
        stream = models.Stream(llm, policy, tokens=len(ids))
        stream.prefill([ids[:PROMPT]])
        stream.finish_prefill()
        plain = np.concatenate(list(models.losses(llm, ids[PROMPT:], stream=stream)))
        np.testing.assert_allclose(losses, plain, rtol=2e-5, err_msg=name)
        assert cached < PROMPT and np.abs(losses - full).max() > 1e-4, name


def test_the_ends_of_a_prompt_are_kept(llm, ids):
    stream = models.Stream(llm, cases.PromptEnds(4, 16, PROMPT), tokens=len(ids))
    stream.prefill([ids[:PROMPT]])
    stream.finish_prefill()
    (policy, *_), (state, *_) = stream.policies, stream.decoding.states
    positions, weight = (np.asarray(x)[0, 0] for x in policy.cached(llm.spec, state))
    assert sorted(positions[weight == 0]) == [*range(4), *range(PROMPT - 16, PROMPT)]


@pytest.mark.slow
def test_streaming_is_scored_after_its_prompt(llm, ids):
    cached, losses = our_losses.streamed(
        cases.policies(PROMPT, 0.5, 2)["streaming"], llm, ids[:PROMPT], ids[PROMPT:]
    )
    chunks = models.losses(llm, ids, "streaming:sinks=4,window=76,positions=absolute", chunk=16)
    np.testing.assert_allclose(losses, np.concatenate(list(chunks))[PROMPT:], rtol=2e-5)
    assert cached == 80


KEYS = [("snapkv", 0.5), ("keydiff", 0.5)]


def arrays(shift=0.0):
    """Two texts, three tokens each: cases, full, and for kvpress the checked case."""
    first = np.array([[80, 3, 3, 3], [80, 4, 4, 4], [160, 2, 2, 2]], float)
    jaxkv_rows = [first, first + np.array([0, 1, 1, 1])]
    kvpress_rows = [rows[[0, 1, 2, 0]] + [0, shift, shift, 4 * shift] for rows in jaxkv_rows]
    kvpress_rows[1][-1, 1] += 0.25
    return jaxkv_rows, kvpress_rows


def test_a_case_without_a_press_has_our_side_alone():
    jaxkv_rows, kvpress_rows = arrays()
    jaxkv_rows = [np.insert(rows, 1, rows[0] + 1, axis=0) for rows in jaxkv_rows]
    compared = compare.table([KEYS[0], ("balance", 0.5), KEYS[1]], jaxkv_rows, kvpress_rows)
    case = compared["cases"]["balance"]["0.5"]
    assert case["losses"] == {"ours": [4, 5]} and case["over_full"]["ours"]["by_text"] == [2, 2]
    assert case["cached"] == {"ours": 81} and "difference" not in case
    assert compared["cases"]["keydiff"]["0.5"]["difference"]["mean"] == 0


def test_rows_compare_text_by_text():
    compared = compare.table(KEYS, *arrays(0.5))
    case = compared["cases"]["keydiff"]["0.5"]
    assert case["losses"]["ours"] == [4, 5] and case["cached"] == {"ours": 80, "theirs": 80}
    assert case["difference"]["mean"] == -1 and case["difference"]["standard_error"] == 0
    assert case["over_full"]["ours"]["by_text"] == [2, 2]
    assert case["largest_difference_of_a_token"] == 2
    assert compared["full"]["difference"]["by_text"] == [-1, -1]
    assert compared["checked"]["largest_difference"] == 0.25


def test_the_peer_script_imports_nothing_of_jaxkv():
    tree = ast.parse(Path(compare.SCRIPT).read_text("utf-8"))
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    assert "kvpress" in names and not {n for n in names if n.startswith(("jax", "numpy"))}


def test_a_failing_peer_ends_the_run():
    with pytest.raises(SystemExit, match="nothing is written"):
        compare.called(sys.executable, "-c", "raise ValueError")
