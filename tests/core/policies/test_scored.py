"""Scores from outside: the laws, scores that are set, budgets over all layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import UserError, rows
from jaxkv.contract import Spec
from jaxkv.policies.prompt_compression.scored import Scored, global_budgets
from jaxkv.rotary import rotary
from jaxkv.testing import check_policy
from tests.core.tokens import cached, chunk, state_after

SPEC = Spec(kv_heads=2, head_dim=8, scale=8**-0.5, encoding=rotary(8, 100.0), group=2)
ENDS = {"sinks": 2, "window": 3, "start": 16}
TOKENS = 30


def length_of_value(spec, tokens):
    v = rows.dequantise(tokens.stored.v).astype(jnp.float32)
    return jnp.sqrt(jnp.sum(v * v, axis=-1))[:, :, tokens.slots]


@pytest.mark.slow  # the laws of the other prompt compressors, which differ in their scores alone
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"budgets": "adaptive", "storage": "int8"},
        {"budgets": "global", "head_budgets": (4, 0, 9)},  # three heads, as the laws have
    ],
    ids=str,
)
def test_laws(fields):
    check_policy(Scored(capacity=12, function=length_of_value, **ENDS, **fields))


@pytest.mark.parametrize("budgets, numbers", [("equal", (4, 4)), ("adaptive", (4, 4)),
                                              ("global", (4, -1))])  # fmt: skip
def test_impossible_budgets_of_heads(budgets, numbers):
    with pytest.raises(UserError, match=rf"head_budgets are .* got .* with budgets={budgets}; lea"):
        Scored(budgets=budgets, head_budgets=numbers)


def read(policy):
    return state_after(policy, SPEC, chunk(SPEC, TOKENS, batch=2))


@pytest.mark.parametrize(
    "budgets",
    [{}, {"budgets": "adaptive"}, {"budgets": "global", "head_budgets": (11, 3)}],
    ids=str,
)
def test_scores_that_are_set_choose_as_a_function_does(budgets):
    policy = Scored(capacity=12, **ENDS, **budgets)
    by_function = Scored(capacity=12, **ENDS, **budgets, function=length_of_value)
    state = read(policy)
    scores = np.linalg.norm(state.dense.v[:, :, :TOKENS], axis=-1)
    state = jax.jit(policy.with_scores)(state, scores)
    assert cached(policy, SPEC, state) == cached(by_function, SPEC, read(by_function))
    best = np.argsort(-np.asarray(scores)[0, 0, 2:-3], kind="stable")[:7] + 2
    if not budgets:
        assert cached(policy, SPEC, state)[0][0] == {0, 1, *best.tolist(), 27, 28, 29}


def test_a_layer_may_keep_only_the_ends():
    policy = Scored(capacity=12, budgets="global", head_budgets=(0, 0), **ENDS)
    state = policy.with_scores(read(policy), np.ones((2, 2, TOKENS), "f4"))
    assert cached(policy, SPEC, state) == [[{0, 1, 27, 28, 29}] * 2] * 2
    finished = policy.finish_prefill(SPEC, state)
    with pytest.raises(UserError, match="finished already"):
        policy.finish_prefill(SPEC, finished)


def test_scores_that_do_not_fit():
    policy = Scored(capacity=12, **ENDS)
    state, scores = read(policy), np.ones((2, 2, TOKENS), "f4")
    for wrong in (scores[0], scores[:1], scores[:, :1], np.ones((2, 2, 33), "f4")):
        with pytest.raises(UserError, match=r"with B=2, K=2 and S of at most 32 slots, got \["):
            policy.with_scores(state, wrong)
    scores[1, 0, 5] = np.nan
    with pytest.raises(UserError, match="scores must be numbers, got NaN"):
        policy.with_scores(state, scores)
    with pytest.raises(UserError, match="each of 2 KV heads, got 0; use those of `global_budgets`"):
        read(Scored(budgets="global"))


@pytest.mark.parametrize("known", [0, TOKENS - 9])
def test_tokens_without_a_score_are_refused_or_give_nan_in_compiled_code(known):
    policy, scores = Scored(capacity=12, **ENDS), np.ones((2, 2, known), "f4")
    with pytest.raises(UserError, match=f"must be one for each of {TOKENS} tokens, got {known};"):
        policy.with_scores(read(policy), scores)
    state = jax.jit(policy.with_scores)(read(policy), scores)
    state = policy.reserve(SPEC, policy.finish_prefill(SPEC, state), 5)
    token = chunk(SPEC, 1, TOKENS, batch=2)
    assert np.isnan(policy.update(SPEC, state, token)[0].out).all()


def test_global_budgets_count_the_largest_scores_of_all_layers():
    scores = np.random.default_rng(0).random((3, 2, 50)).astype("f4") ** 3
    budgets = global_budgets(scores, 12)
    threshold = np.sort(scores, axis=None)[-6 * 12]
    assert budgets == [tuple((layer >= threshold).sum(axis=1)) for layer in scores]
    assert global_budgets(scores, 99) == [(50, 50)] * 3
    scores[1] = 0
    assert global_budgets(scores, 4)[1] == (0, 0)
