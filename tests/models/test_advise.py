"""`jaxkv advise`: budgets, losses and divergence, repeats, errors, and what it concludes."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.generation.score import Score
from jaxkv.models.tools import advise, advise_report, budgets, choices, measurement
from jaxkv.models.tools.measurement import Stretches, is_noise
from jaxkv.policies import POLICIES as POLICIES_BY_NAME
from jaxkv.policy_spec import parse_policy

POLICIES = ["window:window=16", "keydiff:capacity=8", "topk:share=0.2,sinks=2,window=6"]
PROMPT, SCORED = 32, 16


@pytest.fixture(scope="module")
def ids():
    return [1, *np.random.default_rng(0).integers(2, 12, 8 * (PROMPT + SCORED)).tolist()]


@pytest.fixture(scope="module")
def parts(llm, ids):
    return advise.cut(llm, ids, PROMPT, SCORED, None)


@contextlib.contextmanager
def watch(label, total, unit):
    yield lambda done: None


@pytest.fixture(scope="module")
def measured(llm, parts):
    return advise.measure(llm, parts, POLICIES, 0, watch)


def test_the_shapes_have_the_default_fields_at_256_slots():
    assert set(budgets.SHAPES) == {*POLICIES_BY_NAME, "streaming-int8"} - {"full"}
    assert set(budgets.DEFAULT) < set(budgets.SHAPES)
    for name in ("window", "streaming", "h2o", "reservoir", "stratified", "balance-stream"):
        assert parse_policy(budgets.shape(name, 256)) == parse_policy(name)


@pytest.mark.parametrize("name", budgets.SHAPES)
def test_the_shapes_use_all_slots(llm, name):
    """Cached tokens after the prompt and the scored ones, or those that a query attends to."""
    prompt, scored = 300, 20
    for slots in (60, 100, 150):
        policies = llm.policies(budgets.shape(name, slots, prompt, scored))
        if not budgets.acts_on_prompt(policies):
            assert budgets.slots_of(llm, policies) == slots
            continue
        if budgets.caches_all(policies):
            (policy,) = set(policies)
            share = getattr(policy, "share", None)
            if share is not None:
                near = policy.sinks + policy.window
                assert near + share * (prompt - near) == pytest.approx(slots, rel=0.02)
            continue
        counts = []
        for policy in policies:
            state = replace(policy, start=prompt).init(llm.spec, 1, jax.random.key(0))
            dense = getattr(state, "prompt", state).dense._replace(count=np.int32([prompt]))
            filled = {"prompt": state.prompt._replace(dense=dense)} if hasattr(
                state, "prompt") else {"dense": dense}  # fmt: skip
            after = policy.finish_prefill(llm.spec, state._replace(**filled))
            weight = np.asarray(policy.cached(llm.spec, after).log_weight)
            counts.append((weight > -np.inf).sum(axis=2).mean() + scored)
        assert slots - 16 <= np.mean(counts) <= slots + 1, (slots, counts)


def test_a_policy_gets_the_largest_cache_that_fits(llm):
    config = llm.config
    token = config.layers * (2 * config.kv_heads * config.head_dim * 4 + 4)
    rest = 4 * config.layers
    for slots in (16, 40, 41):
        for spare in (0, token - 1):
            (policy,) = budgets.fit(llm, slots * token + rest + spare, ["streaming"], 100, 20)
            assert policy == f"streaming:sinks=4,window={slots - 4}"
    limit = 100 * token + rest
    names = [name for name in budgets.SHAPES if name != "magicpig"]
    chosen = dict(zip(names, budgets.fit(llm, limit, names, 300, 20), strict=True))
    for name, policy in chosen.items():
        size = budgets.bytes_of(llm, policy, 300, 20)
        if budgets.caches_all(llm.policies(policy)):
            assert size > 3 * limit
        else:
            assert 0.85 * limit < size <= limit, name
    assert budgets.fit(llm, 10**9, ["window"], 300, 20) == ["window:window=300"]
    assert len(budgets.fit(llm, limit, [], 300, 20)) == len(budgets.DEFAULT)


@pytest.mark.parametrize(
    "policy",
    ["uniform:sinks=2,window=5,rounds=2", "keydiff:capacity=12", "pyramidkv:capacity=12,window=5",
     "expected-attention:capacity=12", "streaming:sinks=2,window=5", "full"],
)  # fmt: skip
def test_bytes_are_those_of_cached_tokens(llm, policy):
    """A row of each token: key and value of each head, and positions."""
    prompt, scored = 43, 4
    stream = models.Stream(llm, policy, tokens=prompt + scored)
    stream.prefill([list(range(2, 2 + prompt))])
    stream.finish_prefill()
    stream.prefill([list(range(2, 2 + scored))])
    tokens = [
        (np.asarray(layer.cached(llm.spec, state).log_weight)[0] > -np.inf).sum(axis=1).mean()
        for layer, state in zip(stream.policies, stream.decoding.states, strict=True)
    ]
    row = 2 * llm.spec.kv_heads * llm.spec.head_dim * 4
    ratio = budgets.bytes_of(llm, policy, prompt, scored) / (row * sum(tokens))
    assert 1 <= ratio < 1.3


@pytest.mark.parametrize("policy", ["keydiff:capacity=12", "snapkv:capacity=12,window=5"])
def test_every_cached_token_counts(llm, policy):
    """Sampled tokens have a position and a log weight in each head, exact ones share a position."""
    (policy_of_layer,) = set(llm.policies(policy))
    heads, row = llm.spec.kv_heads, 2 * llm.spec.head_dim * 4
    window = getattr(policy_of_layer, "window", 0)
    tokens = (12 - window) * heads * (row + 8) + (window + 4) * (heads * row + 4)
    fixed = 8 * heads + 4  # seeds and a count
    assert budgets.bytes_of(llm, policy, 43, 4) == llm.config.layers * (tokens + fixed)


@pytest.mark.filterwarnings("ignore:.*needs a prompt of at least 16 tokens")
@pytest.mark.parametrize("prompt", [15, 16, 17])
@pytest.mark.parametrize(
    "policy", ["snapkv:capacity=15,window=5", "pyramidkv:capacity=12,window=5"]
)
def test_bytes_where_a_prompt_is_hardly_compressed(llm, policy, prompt):
    """The queries that a method gathers are dropped after the prompt, compressed or not."""
    stream = models.Stream(llm, policy, tokens=prompt)
    stream.prefill([list(range(2, 2 + prompt))])
    stream.finish_prefill()
    layers = zip(stream.policies, stream.decoding.states, strict=True)
    count = sum(
        int((np.asarray(layer.cached(llm.spec, state).log_weight)[0] > -np.inf).sum())
        for layer, state in layers
    )
    row, heads = 2 * llm.spec.head_dim * 4, llm.spec.kv_heads
    size = budgets.bytes_of(llm, policy, prompt)
    assert count * row < size <= count * (row + 8) + llm.config.layers * (8 * heads + 4)


@pytest.mark.parametrize("split", [False, True])
def test_the_policies_for_facts_are_those_that_a_mesh_can_split(split):
    texts = re.findall(r'take "(.*?)"', "\n".join(choices.facts_lines(split)))
    assert len(texts) == 2 - split
    for text in texts:
        assert parse_policy(text.replace("FILE", "default")).heads_coupled != split


@pytest.mark.parametrize("fields", ["", ",budgets=equal", ",budgets=adaptive"])
def test_slots_of_a_cache_that_compresses_again_and_again(llm, fields):
    """On average over KV heads: those of a layer may share its budget."""
    policies = llm.policies(f"retrieval:capacity=24,sinks=2,window=8,every=4{fields}")
    assert budgets.slots_of(llm, policies) == 24 + 4


def test_the_default_budget(llm):
    streaming = budgets.bytes_of(llm, "streaming:sinks=4,window=124", 448, 64)
    assert budgets.budget_of(llm, [], 448, 64) == streaming
    names = ["window:window=20", "window:window=30", "h2o", "topk:window=9"]
    assert budgets.budget_of(llm, names, 448, 64) == budgets.bytes_of(llm, names[1], 448, 64)


def test_growing_layers_count_at_the_size_of_the_stretch(llm):
    """A layer of full attention has the bytes of its tokens, not those of its first slots."""
    config = llm.config
    policy = "0=full:start=16;*=window:window=16"
    token = 2 * config.kv_heads * config.head_dim * 4 + 4
    needed = (100 + 20 + 16) * token + 4 * config.layers  # two layers
    assert budgets.bytes_of(llm, policy, 100, 20) == needed


def test_the_caches_of_all_policies_must_fit_together(llm, parts, monkeypatch):
    """Each fits alone; it is refused before the first reading."""
    monkeypatch.setattr("jaxkv.state.memory.available", lambda *_, **__: 10)
    with pytest.raises(UserError, match="the caches of 4 policies for 96 tokens would take"):
        advise.measure(llm, parts, POLICIES, 0, None)


def test_sizes_follow_the_context(llm):
    body = [1] + [5] * 5000
    assert advise.cut(llm, body, None, None, None).tokens.shape == (8, 513)
    short = replace(llm, config=replace(llm.config, context=64))
    assert advise.cut(short, body, None, None, None).tokens.shape == (8, 65)
    with pytest.raises(UserError, match=r"trained context of 64 tokens.* got 60 of prompt and 8"):
        advise.cut(short, body, 60, None, None)


def test_blocks_are_stretches_unless_these_are_few(llm, parts):
    assert len(parts.tokens) == 8 and advise.block_of(parts, None) == SCORED
    two, three = (advise.cut(llm, [1] + [5] * 300, 32, 64, count) for count in (2, 3))
    assert advise.block_of(two, None) == 16 and advise.block_of(two, 8) == 8
    assert advise.block_of(three, None) == 16  # not 21, which leaves a rest
    for text, block in ((two, 17), (two, 32), (three, 21), (parts, 5)):
        with pytest.raises(UserError, match=rf"got --block {block}; give a divisor of"):
            advise.block_of(text, block)
    with pytest.raises(UserError, match="has 1 stretches with 64; give a longer text"):
        advise.block_of(advise.cut(llm, [1] + [5] * 100, 32, 64, None), None)


def test_full_attention_is_the_reference(measured):
    assert [run.policy for run in measured] == ["full", *POLICIES]
    full, *compressed = measured
    assert (full.kl == 0).all() and (full.agreement == 1).all()
    assert all(run.kl.mean() > 1e-4 for run in compressed)
    for run in measured:
        assert len(run.milliseconds) == measurement.ROUNDS and min(run.milliseconds) > 0


def test_the_distance_of_a_repeat():
    ids = np.random.default_rng(0).integers(0, 3, 60).tolist()
    distances = advise.repeat_distances(ids)
    words = [tuple(ids[end - advise.REPEAT + 1 : end + 1]) for end in range(60)]  # empty at first
    for end in range(1, 60):
        back = [d for d in range(1, end + 1) if words[end] and words[end - d] == words[end]]
        assert distances[end - 1] == min(back, default=0)


BEST, OTHER = "reservoir:sinks=4,window=14,sample=14", "window:window=32"
STREAMING, KEYDIFF = "streaming:sinks=4,window=28", "keydiff:capacity=12"


def result(policy: str, losses: np.ndarray, *milliseconds: float):
    zeros = np.zeros(losses.shape)
    return Score(policy, losses, 100, 1.0, 1.0, 64, 0, zeros, zeros, milliseconds or (1.0,))


@pytest.fixture(scope="module")
def drawn():
    """Ten stretches of a random text, with losses of 20 tokens after each prompt, and noise."""
    rng = np.random.default_rng(1)
    text = Stretches(rng.integers(2, 200, (10, 61)).astype(np.int32), 40)
    base, noise = rng.normal(size=(2, 10, 20))
    return text, base, noise - noise.mean()


def ranked(llm, drawn, *results):
    """The report on readings, with a budget below the bytes of all tokens."""
    limit = budgets.bytes_of(llm, "full", 40, 20) - 1
    return advise.rank(llm, drawn[0], results, limit, 20)


def told(*arguments):
    return advise_report.sentences(ranked(*arguments))


def test_policies_are_ranked_and_noise_is_told(llm, drawn):
    _, base, noise = drawn
    results = ranked(
        llm, drawn, result("full", base),
        result(OTHER, base + 1 + 0.01 * noise),
        result(STREAMING, base + 0.1 + 0.01 * noise, 9.0),
        result(BEST, base + 0.1001 - 0.01 * noise, 2.0),
        result("topk", base + 0.001 * noise),
    )  # fmt: skip
    rows = {row["policy"]: row for row in results["policies"]}
    assert next(iter(rows)) == "full" and list(rows)[-2:] == [OTHER, "topk"]
    assert results["counted"] == 200 and results["block"] == 20
    assert rows[OTHER]["over_full"]["mean"] == pytest.approx(1, abs=0.01)
    assert rows[OTHER]["loss"] == pytest.approx((base + 1 + 0.01 * noise).mean())
    assert not is_noise(rows[OTHER]["over_best"])
    # Without topk, which saves no memory.
    assert [{*level} for level in results["levels"]] == [{STREAMING, BEST}, {OTHER}]
    lines = " ".join(advise_report.sentences(results))
    for words in ("within noise of it: ", f"Then {OTHER}, which is worse by +0.", "without a rank"):
        assert words in lines
    table = advise_report.table(results).splitlines()
    assert [line.split()[0] for line in table[1:]] == ["-", "1", "2", "3", "-"]
    assert table[-2].endswith(OTHER) and "+1.0" in table[-2]


def test_ties_within_two_standard_errors_are_ties(llm, drawn):
    """The same difference of means, with less and with more noise over stretches."""
    _, base, _ = drawn
    by_stretch = np.random.default_rng(2).normal(size=(10, 1))
    by_stretch = by_stretch - by_stretch.mean()
    for scale, levels in ((0.01, 2), (1.0, 1)):
        results = ranked(llm, drawn, result("full", base), result(STREAMING, base),
                         result(BEST, base + 0.05 + scale * by_stretch))  # fmt: skip
        assert len(results["levels"]) == levels
        expected = 2 * scale * by_stretch.std(ddof=1) / 10**0.5
        over = {row["policy"]: row["over_best"] for row in results["policies"]}[BEST]
        assert over["mean"] == pytest.approx(0.05)
        assert over["two_errors"] == pytest.approx(expected)


H2O, INT8 = "h2o:heavy=16,window=16", "streaming:sinks=4,window=60,storage=int8"
SLOW, NEAR, FAST = (9.0, 9.5, 10.0), (8.8, 9.5, 10.0), (2.0, 3.0, 8.9)  # NEAR and FAST overlap
# Two readings: the policy with the lower loss and its times; another, whose times are FAST, and its
# mean loss over the first. Then the policy to take, the reason, and other words.
CHOICES = [
    (BEST, SLOW, OTHER, 0.001, OTHER, "(the fastest of these)", "be up to +0.018 above that of"),
    (BEST, NEAR, OTHER, 0.001, BEST, "(the lowest loss of the 2 fastest, whose times overlap)", ""),
    (BEST, NEAR, STREAMING, 0.001, STREAMING, "(the default of the 2 fastest", ""),
    (INT8, NEAR, STREAMING, 0.001, STREAMING, "(the default of the 2 fastest", ""),  # in floats
    (H2O, NEAR, OTHER, 0.001, OTHER, "for endless text (by its loss)", ""),
    (H2O, NEAR, OTHER, 0.5, H2O, "(by its loss)", "absolute, so it fails beyond the trained"),
    (KEYDIFF, NEAR, OTHER, 0.5, KEYDIFF, "(by its loss)", "whole prompt, "),
]


@pytest.mark.parametrize("best, times, challenger, mean, chosen, reason, words", CHOICES)
def test_the_policy_to_take(llm, drawn, best, times, challenger, mean, chosen, reason, words):
    _, base, noise = drawn
    over = result(challenger, base + mean + 0.1 * noise, *FAST)
    advice = " ".join(told(llm, drawn, result(best, base, *times), over))
    assert f"Take {chosen} {reason}" in advice and words in advice
    assert ("Its loss may be" in advice) == (chosen != best)
    assert (f"For endless text take {OTHER}, which is worse by +0.5" in advice) == (mean == 0.5)


def test_the_loss_at_repeats_by_distance(llm):
    """A policy whose loss is 2 higher at repeats from 64 tokens on, and nowhere else."""
    rng = np.random.default_rng(3)
    text = Stretches(rng.integers(0, 6, (2, 301)).astype(np.int32), 100)
    distances = np.stack([advise.repeat_distances(ids) for ids in text.tokens])[:, 100:]
    base = rng.normal(size=(2, 200))
    results = [result("full", base), result(OTHER, base + 2 * (distances >= 64))]
    row = advise.rank(llm, text, results, 10**6, 200)["policies"][1]
    counts = {bucket["from"]: (bucket["count"], bucket["mean"]) for bucket in row["recall"]}
    near, middle = ((distances > 0) & (distances < 32)).sum(), (distances >= 32) & (distances < 64)
    assert counts[1] == (near, pytest.approx(0, abs=1e-12))
    assert counts[32] == (middle.sum(), pytest.approx(0, abs=1e-12))
    assert counts[64] == (((distances >= 64) & (distances < 128)).sum(), pytest.approx(2))
    far_distances = distances[distances >= 32]
    assert row["far_recall"]["mean"] == pytest.approx(2 * (far_distances >= 64).mean())
