"""Every law of jaxkv/contract.py on every policy of CASES, and some on VARIANTS.

`jaxkv.testing` has the laws. Here are also stronger tests of two of them, on a device mesh (6) and
against a numpy oracle (15).
"""

import functools

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv.cache.ring import Ring
from jaxkv.state.sharding import mesh_of, sharded_finish_prefill, sharded_step
from jaxkv.testing import check_law, make_subject
from jaxkv.testing.donation import shared_buffers
from jaxkv.testing.estimates import (
    estimates_are_unbiased,
    positions_may_wrap,
    protected_tokens_stay,
    with_larger_keys,
)
from jaxkv.testing.int8 import ROUNDED, parts_in_int8
from jaxkv.testing.laws import (
    LAWS,
    below_capacity_it_is_full_attention,
    chunking_changes_nothing,
    it_caches_what_it_means,
    kv_heads_are_independent,
    logits_may_be_penalised_and_capped,
)
from jaxkv.testing.subject import (
    QUICK,
    cached,
    close,
    finish_prefill,
    same_bits,
)
from tests.core.laws import cases
from tests.core.laws.cases import CASES, VARIANTS, expected, stream, subject

ALL = (*CASES, *VARIANTS)
MEANING = {below_capacity_it_is_full_attention, chunking_changes_nothing}
# Stronger tests below: a real mesh, and an oracle with log weights.
ELSEWHERE = {
    kv_heads_are_independent, it_caches_what_it_means, logits_may_be_penalised_and_capped,
}  # fmt: skip
FIRST = {type(case.policy): case for case in reversed(CASES)}.values()  # of each policy


def param(case, *values, name=""):
    """A case runs in one process, whose compiled programs its laws share (tests/schedule.py)."""
    marks = [pytest.mark.first] if case in FIRST else []
    return pytest.param(case, *values, id=":".join(filter(None, [case.name, name])), marks=marks)


def for_cases(condition, cases=CASES):
    return pytest.mark.parametrize("case", [param(case) for case in cases if condition(case)])


def applies(law, case):
    return law in MEANING if case in VARIANTS else law not in ELSEWHERE


@for_cases(lambda case: True)
def test_law_19_no_initial_state_shares_a_buffer(case):
    assert not shared_buffers(case.policy.init(case.spec, 1, jax.random.key(7)))


def test_every_policy_has_a_case():
    assert {type(case.policy) for case in CASES} == set(jaxkv.POLICIES.values())


@pytest.mark.parametrize(
    ("case", "law"),
    [param(c, law, name=law[2].__name__) for c in ALL for law in LAWS if applies(law[2], c)],
)
def test_law(case, law):
    assert_law(law, case)


def assert_law(law, case):
    result = check_law(law, subject(case))
    assert result is None or result.holds, result.reason


@pytest.mark.parametrize("case", [param(case) for case in FIRST])
def test_law_4_logits_may_be_penalised_and_capped(case):
    law = next(law for law in LAWS if law[2] is logits_may_be_penalised_and_capped)
    result = check_law(law, make_subject(case.policy, case.capacity))
    assert result.holds, result.reason


@for_cases(lambda case: True)
def test_law_6_sharded_is_unsharded(case):
    mesh, unsharded = mesh_for(case), subject(case)
    state, new = unsharded.after_prompt(), unsharded.next(1)
    one_shard = functools.partial(sharded_step, mesh, case.policy, case.spec)
    partial, after = subject(case).step(state, new)
    sharded = jax.jit(one_shard, compiler_options=QUICK)(state, *new)
    assert close(sharded, (partial.out, after))


@for_cases(lambda case: subject(case).finishes)
def test_law_6_finish_prefill_is_equal_when_sharded(case):
    state = end_of_prompt(case)
    split = functools.partial(sharded_finish_prefill, mesh_for(case), case.policy, case.spec)
    finished = finish_prefill(case.policy, case.spec, state)
    # Eigenvectors amplify the rounding of a covariance.
    assert close(finished, jax.jit(split, compiler_options=QUICK)(state), case.tolerance)


def mesh_for(case):
    """KV heads that share a budget stay on one device."""
    return mesh_of("data=4" if case.policy.heads_coupled else "data=2,model=2")


def end_of_prompt(case):
    run = subject(case).read(1)
    return run.states[run.counts.index(subject(case).prompt)]


@pytest.mark.parametrize(
    ("case", "length"), [param(c, n, name=str(n)) for c in ALL for n in c.unbiased]
)
def test_law_12_numerator_and_denominator_are_unbiased(case, length):
    assert_law((12, "", functools.partial(estimates_are_unbiased, tokens=length)), case)


@for_cases(lambda case: case.exact or case.window)
def test_law_13_protected_tokens_stay(case):
    check = functools.partial(protected_tokens_stay, first=case.exact, newest=case.window)
    assert_law((13, "", check), case)


@for_cases(lambda case: case.exact)
def test_law_13_sinks_are_stored_as_without_adversarial_keys(case):
    hostile, size = with_larger_keys(stream(case), case.exact), case.sizes[1]
    done = subject(case).read_tokens(hostile, size).states[-1]
    plain = subject(case).read(size).states[-1]
    for name in ("k", "v"):
        actual, expected = (sinks(state, name, case.exact) for state in (done, plain))
        np.testing.assert_array_equal(actual, expected)


def sinks(state, name, length):
    part = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, Ring))[0]
    return np.asarray(getattr(part.exact_sinks or part, name))[0, :, :length]


@for_cases(lambda case: subject(case).finishes)
def test_law_14_finish_prefill_keeps_the_sinks(case):
    finished = finish_prefill(case.policy, case.spec, end_of_prompt(case))
    held = case.policy.cached(case.spec, finished)
    lengths = stream(case).valid[:, : subject(case).prompt].sum(axis=1)
    for sequence, prompt in enumerate(lengths):
        positions, weight = (np.asarray(leaf)[sequence, 0] for leaf in held)
        positions = positions[weight == 0]
        assert set(positions) >= set(range(min(case.exact, prompt)))
        kept = len(positions) == prompt if case.lossless else len(positions) < prompt
        assert kept or prompt <= case.capacity


@for_cases(lambda case: case.in_int8)
def test_law_17_rows_are_the_same_bits_in_chunks_of_any_size(case):
    by_token = subject(case).read(1)
    for size in case.sizes[1:]:
        by_chunk = subject(case).read(size)
        states = by_token.states[-1], by_chunk.states[-1]
        for first, second in zip(*map(parts_in_int8, states), strict=True):
            assert same_bits(first[:2], second[:2])


@for_cases(lambda case: True, ALL)
def test_law_15_the_oracle_agrees(case):
    expected_outs, _ = expected(case)
    for size in case.sizes:
        outs = subject(case).read(size).outs
        assert close(outs.astype(np.float64), expected_outs, case.tolerance), f"in chunks of {size}"


@for_cases(lambda case: True, ALL)
def test_law_15_the_oracle_caches_the_same_tokens(case):
    _, expected_tokens = expected(case)
    valid = stream(case).valid
    for size in case.sizes[:2]:
        run = subject(case).read(size)
        for state, seen in zip(run.states, run.counts, strict=True):
            kept = cached(case.policy, case.spec, state)
            positions, weight = np.asarray(kept.positions), np.asarray(kept.log_weight)
            for sequence in range(4):
                count = int(valid[sequence, :seen].sum())
                for head in range(cases.KV_HEADS):
                    pairs = np.stack([positions[sequence, head], weight[sequence, head]], axis=1)
                    finite = pairs[pairs[:, 1] > -np.inf]
                    want = expected_tokens[sequence][count - 1][head] if count else []
                    np.testing.assert_allclose(
                        finite[np.argsort(finite[:, 0])], np.reshape(want, (-1, 2)), 1e-6, 1e-6
                    )


@for_cases(lambda case: True)
def test_positions_wrap_without_a_trace(case):
    for size, start in ((1, 2**32 - 5), (case.sizes[-1], 2**31 - 5)):
        outs = subject(case).read_tokens(stream(case, start), size).outs.astype(np.float64)
        # Where draws follow from positions, other tokens are drawn: those that the oracle draws.
        expected_outs = expected(case, start)[0] if case.drawn else subject(case).read(size).outs
        # Keys are rounded after rotation, so in int8 other positions round them otherwise.
        tolerance = max(2e-6, case.tolerance / 3, ROUNDED * case.in_int8)
        assert close(outs, expected_outs.astype(np.float64), tolerance)


# Without draws by the position. Keys in int8 are rounded after their rotation.
WRAPPING = ("full", "window-5", "streaming-4-5", "stratified", "uniform", "snapkv",
            "balance-stream-cache-relative", "keydiff", "h2o", "topk", "loki", "tova", "rkv",
            "triattention")  # fmt: skip


@for_cases(lambda case: case.name in WRAPPING)
def test_law_18_positions_may_wrap(case):
    for error_message, passes in positions_may_wrap(subject(case)):
        assert passes, error_message
