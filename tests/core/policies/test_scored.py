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
    ],
    ids=str,
)
def test_laws(fields):
    check_policy(Scored(capacity=12, function=length_of_value, **ENDS, **fields))


@pytest.mark.parametrize("budgets, rows", [("equal", 4), ("adaptive", 4), ("global", -1)])
def test_impossible_rows(budgets, rows):
    with pytest.raises(UserError, match=rf"rows must be .* got {rows} with budgets={budgets}; lea"):
        Scored(budgets=budgets, rows=rows)


def test_global_budgets_need_scores_of_all_layers():
    with pytest.raises(UserError, match="got a function; take adaptive"):
        Scored(budgets="global", function=length_of_value)


@pytest.mark.parametrize(
    "heads, words",
    [
        (None, "got None with budgets=global; give"),
        (np.zeros((2, 3), int), r"got \[2, 3\] with"),
        (np.array([[4, 9], [7, 8]]), "at most rows=14 together, got 15; raise rows"),
        (np.array([[4, 9], [-7, 8]]), "must be 0 or more"),
    ],
)
def test_budgets_of_heads_that_do_not_fit(heads, words):
    policy, scores = Scored(capacity=12, budgets="global", rows=14, **ENDS), np.ones((2, 2, TOKENS))
    with pytest.raises(UserError, match=words):
        policy.with_scores(read(policy), scores, heads)
    with pytest.raises(UserError, match="with budgets=equal; give"):
        Scored(**ENDS).with_scores(read(Scored(**ENDS)), scores, np.zeros((2, 2), int))


def read(policy):
    return state_after(policy, SPEC, chunk(SPEC, TOKENS, batch=2))


@pytest.mark.parametrize(
    "budgets",
    [{}, {"budgets": "adaptive"}],
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


@pytest.mark.parametrize("rows", [14, 20, 99])
def test_each_head_of_a_sequence_keeps_its_number(rows):
    policy = Scored(capacity=12, budgets="global", rows=rows, **ENDS)
    state, heads = read(policy), np.array([[11, 3], [0, 9]])
    scores = np.random.default_rng(0).random((2, 2, TOKENS)).astype("f4")
    state = jax.jit(policy.with_scores)(state, scores, heads)
    ends = {0, 1, 27, 28, 29}
    for sequence, kept in enumerate(cached(policy, SPEC, state)):
        for head, positions in enumerate(kept):
            order = np.argsort(-scores[sequence, head, 2:-3], kind="stable") + 2
            assert positions == ends | {*order[: heads[sequence, head]].tolist()}


def test_a_layer_may_keep_only_the_ends():
    policy = Scored(capacity=12, budgets="global", **ENDS)
    none = np.zeros((2, 2), int)
    state = policy.with_scores(read(policy), np.ones((2, 2, TOKENS), "f4"), none)
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
    assert budgets.tolist() == (scores >= threshold).sum(axis=2).tolist()
    assert global_budgets(scores, 99).tolist() == [[50, 50]] * 3
    scores[1] = 0
    assert global_budgets(scores, 4)[1].tolist() == [0, 0]


@pytest.mark.parametrize("rows", [0, 14])
@pytest.mark.parametrize("head_budgets", [None, [[10, 5], [0, 15]]])
def test_global_budgets_that_are_not_set_or_too_many_give_nan(rows, head_budgets):
    """In one head of each sequence. In compiled code nothing can be refused."""
    policy = Scored(capacity=12, budgets="global", rows=rows, **ENDS)
    state = read(policy)
    if head_budgets is None:
        state = state._replace(statistics=jnp.zeros_like(state.statistics))
    else:
        scores = np.ones((2, 2, TOKENS), "f4")
        state = jax.jit(policy.with_scores)(state, scores, np.array(head_budgets))
    state = policy.reserve(SPEC, policy.finish_prefill(SPEC, state), 5)
    out = policy.update(SPEC, state, chunk(SPEC, 1, TOKENS, batch=2))[0].out
    assert np.isnan(out).any(axis=(1, 2, 3)).all()


def test_a_function_gives_a_score_for_each_token_between_the_ends():
    policy = Scored(capacity=12, function=lambda spec, tokens: tokens.stored.k[..., 0], **ENDS)
    with pytest.raises(UserError, match=r"function must return \[B,K,C\], .*; cut it by"):
        policy.finish_prefill(SPEC, read(policy))
