"""Every law of jaxkv/contract.py on every policy of CASES."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache.ring import Ring
from jaxkv.contract import Chunk, Policy
from jaxkv.driver import step
from jaxkv.state import batch
from jaxkv.state.sharding import mesh_of, sharded_finish_prefill, sharded_step
from tests import oracle
from tests.laws import cases
from tests.laws.cases import (
    ASKED,
    CASES,
    QUICK,
    SELDOM,
    VARIANTS,
    begin,
    expected,
    jitted_cached,
    jitted_finish_prefill,
    jitted_step,
    plain_run,
    run,
    stream,
)
from tests.seldom import seldom


def some(wanted, seldom_are=SELDOM, variants=False):
    def param(case):
        return (seldom if case.name in seldom_are else pytest.param)(case, id=case.name)

    asked = [case for case in CASES if wanted(case) and (variants or case.name not in VARIANTS)]
    return pytest.mark.parametrize("case", [param(case) for case in asked])


every = some(lambda case: True)
of_meaning = some(lambda case: True, variants=True)


def leaves(*trees):
    return zip(*(map(np.asarray, jax.tree.leaves(tree)) for tree in trees), strict=True)


def assert_same_bits(one, other):
    for a, b in leaves(one, other):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_same(one, other, tolerance=1e-6):
    """Whole numbers equal, others to the rounding of two compiled programs."""
    for a, b in leaves(one, other):
        assert a.dtype == b.dtype
        if a.dtype.kind in "iu":
            np.testing.assert_array_equal(a, b)
        else:
            close(a, b, 8e-3 if a.dtype == jnp.bfloat16 else tolerance)


def close(a, b, tolerance):
    np.testing.assert_allclose(
        np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance
    )


def half(case):
    """A state that has seen the prompt, after the end of prefill where the policy has one."""
    done = plain_run(case, case.sizes[0])
    state = done.after[done.seen.index(case.prompt)]
    return jitted_finish_prefill(case.policy, case.spec, state) if case.finishes else state


def chunk(case, size, seed=5):
    """New tokens for `half(case)`; in the last row there are none."""
    new = stream(case, seed=seed, places=size).rows([0, 0, 0, 3])
    before = stream(case).valid[:, : case.prompt].sum(axis=1, keepdims=True)
    valid = np.arange(4)[:, None] < np.full((1, size), 3)
    positions = (before + np.arange(size)).astype(np.uint32)
    return Chunk(new.q, new.k, new.v, positions, valid)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def update(policy, spec, state, tokens):
    return policy.update(spec, state, tokens)


def arrays_where(case, state, wanted):
    """The arrays of a state whose `Leaf` is wanted, with their leaves."""
    pairs = zip(jax.tree.leaves(case.policy.leaves), jax.tree.leaves(state), strict=True)
    return [(leaf, np.asarray(array)) for leaf, array in pairs if wanted(leaf)]


def any_leaf(case, wanted):
    return any(map(wanted, jax.tree.leaves(case.policy.leaves)))


@every
def test_law_11_leaves_describe_the_state(case):
    assert isinstance(case.policy, Policy)
    assert hash(case.policy) == hash(dataclasses.replace(case.policy))
    state = jax.eval_shape(lambda: begin(case, batch=3))
    known = {"B": 3, "K": case.spec.kv_heads, "H": case.spec.head_dim}
    assert type(state) is type(case.policy.leaves)
    described = jax.tree.leaves(case.policy.leaves)
    for leaf, array in zip(described, jax.tree.leaves(state), strict=True):
        assert len(leaf.letters) == len(array.shape) and leaf.letters[0] == "B"
        for letter, size in zip(leaf.letters, array.shape, strict=True):
            assert known.get(letter, size) == size


@every
@pytest.mark.parametrize("size", [1, 3])
def test_law_1_update_keeps_shapes(case, size):
    state, new = half(case), chunk(case, size)
    _, after = jax.eval_shape(functools.partial(case.policy.update, case.spec), state, new)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for old, leaf in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        assert (old.shape, old.dtype) == (leaf.shape, leaf.dtype)


@every
def test_law_2_padding_changes_no_bit(case):
    for size in case.sizes[:2]:
        state, new = half(case), chunk(case, size)
        out, after = jitted_step(
            case.policy, case.spec, state, *new._replace(valid=np.zeros_like(new.valid))
        )
        assert_same_bits(after, state)
        assert not np.asarray(out).any()
    if case.finishes:
        return  # where a row's prompt ends depends on its padding
    # Nor does it matter where the padding stands, or what it holds.
    tokens = stream(case)
    for row in (1, 2):
        whole = tokens.rows([row])
        length = int(whole.valid.sum())
        cut = [np.zeros_like(leaf) for leaf in whole]
        for old, new in zip(whole, cut, strict=True):
            new[0, :length] = old[0][whole.valid[0]]
        one, other = (run(case, _four(t), 1).after[-1] for t in (cases.Stream(*cut), whole))
        assert_same(one, other)


def _four(one):
    return one.rows([0, 0, 0, 0])


@every
def test_law_3_rows_are_independent_and_permutable(case):
    order, size = [2, 0, 3, 1], case.sizes[-1]
    straight = plain_run(case, size)
    mixed = run(case, stream(case).rows(order), size, batch.take(begin(case), order))
    assert_same(mixed.after[-1], batch.take(straight.after[-1], order))
    close(mixed.outs, straight.outs[order], 1e-6)
    other = stream(case, seed=1)
    beside = [np.concatenate([a[:1], b[1:]]) for a, b in zip(stream(case), other, strict=True)]
    alone = run(case, cases.Stream(*beside), size)
    assert_same_bits(batch.take(alone.after[-1], [0]), batch.take(straight.after[-1], [0]))
    np.testing.assert_array_equal(alone.outs[0], straight.outs[0])


@of_meaning
def test_law_4_below_capacity_it_is_full_attention(case):
    tokens = stream(case)
    q, k, v = (x[: case.capacity] for x in tokens.compact(0))
    wanted, _ = oracle.attention(
        q,
        k,
        v,
        oracle.full(),
        **case.positions,
        scale=cases.SCALE,
        softcap=case.softcap,
    )
    close(plain_run(case, 1).outs[0, : case.capacity], wanted, case.tolerance)


@some(lambda case: not case.scored, variants=True)
def test_law_5_the_state_does_not_depend_on_chunking(case):
    first, *others = (plain_run(case, size) for size in case.sizes)
    for other in others:
        for boundary in set(first.seen) & set(other.seen):
            one, same = (r.after[r.seen.index(boundary)] for r in (first, other))
            if all(a.shape == b.shape for a, b in leaves(one, same)):  # else: reserved more
                assert_same(one, same)
        if not case.scored:
            close(other.outs, first.outs, case.tolerance)


@every
def test_law_6_sharded_is_unsharded(case):
    mesh = mesh_of("data=2,model=2")
    one_shard = functools.partial(sharded_step, mesh, case.policy, case.spec)
    split = jax.jit(one_shard, compiler_options=QUICK)
    state, new = half(case), chunk(case, 1)  # longer chunks: tests/test_sharding.py
    state = case.policy.reserve(case.spec, state, case.places)
    out, after = jitted_step(case.policy, case.spec, state, *new)
    other, shards = split(state, *new)
    assert_same(after, shards)
    close(out, other, 1e-6)


@some(lambda case: case.finishes)
def test_law_6_finish_prefill_is_equal_when_sharded(case):
    state = plain_run(case, 1).after[case.prompt - 1]
    one = jitted_finish_prefill(case.policy, case.spec, state)
    split = functools.partial(
        sharded_finish_prefill, mesh_of("data=2,model=2"), case.policy, case.spec
    )
    assert_same(one, jax.jit(split, compiler_options=QUICK)(state))


@every
def test_law_7_take_put_and_host_are_exact(case, tmp_path):
    state = half(case)
    order = [3, 1, 0, 2]
    mixed = batch.take(state, order)
    assert_same_bits(batch.put(mixed, order, mixed), state)
    batch.save(tmp_path / "state", state)
    assert_same_bits(batch.load(tmp_path / "state", jax.eval_shape(lambda: state)), state)
    back = batch.to_device(batch.to_host(state))
    assert_same_bits(back, state)
    new = chunk(case, 1)
    one, other = (jitted_step(case.policy, case.spec, s, *new) for s in (state, back))
    assert_same_bits(one, other)


@every
def test_law_8_equal_settings_compile_once(case):
    policy = dataclasses.replace(case.policy)
    again = case._replace(policy=policy)
    run(case, stream(case, seed=3), 1)  # traced anew where caches were dropped between two tests
    before = _traced(case)
    run(again, stream(again, seed=4), 1)
    assert before and _traced(again) == before


def _traced(case):
    return {key: n for key, n in cases.TRACED.items() if key[:2] == (case.policy, case.spec)}


@every
def test_law_9_nothing_seen(case):
    new = chunk(case, 1)
    nobody = new._replace(valid=np.zeros_like(new.valid))
    partial, state = update(case.policy, case.spec, begin(case), nobody)
    assert not np.asarray(partial.out).any() and (np.asarray(partial.lse) == -np.inf).all()
    assert_same_bits(state, begin(case))
    held = jitted_cached(case.policy, case.spec, begin(case))
    assert (np.asarray(held.log_weight) == -np.inf).all()
    # The first token of a row sees itself alone.
    partial, _ = update(case.policy, case.spec, begin(case), new)
    wanted = np.repeat(np.asarray(new.v, np.float32), case.group, axis=2)
    close(np.asarray(partial.out)[:3], wanted[:3], case.tolerance)


@every
def test_law_10_bytes_are_those_of_the_arrays(case):
    for tokens in (0, case.capacity):
        state = jax.eval_shape(
            lambda tokens=tokens: case.policy.reserve(case.spec, begin(case, batch=5), tokens)
        )
        assert batch.nbytes(state) == 5 * case.policy.bytes_per_sequence(case.spec, tokens)


@some(lambda case: case.scored)
def test_law_5_up_to_capacity_a_chunk_is_its_tokens_though_scored(case):
    tokens = stream(case, places=case.capacity)
    whole, together = jitted_step(case.policy, case.spec, begin(case), *tokens)
    apart, outs = begin(case), []
    for place in range(case.capacity):
        one = (leaf[:, place : place + 1] for leaf in tokens)
        out, apart = jitted_step(case.policy, case.spec, apart, *one)
        outs.append(out)
    close(whole, np.concatenate(outs, axis=1), case.tolerance)
    assert_same(*map(_in_order, (together, apart)))


def _in_order(state):
    """Tokens and scores by their positions: a chunk leaves them in another order of slots."""
    filled = np.arange(state.score.shape[2]) < np.asarray(state.count)[:, None, None]
    positions = np.where(filled, np.asarray(state.sample.positions, np.int64), 2**32)
    order = np.argsort(positions, axis=2)
    take = lambda leaf: np.take_along_axis(np.where(filled, leaf, 0), order, 2)  # noqa: E731
    k, v = (np.moveaxis(leaf, 3, 0) for leaf in state.sample[:2])
    return [take(leaf) for leaf in (*k, *v, positions, state.score)], state.count


@pytest.mark.parametrize(
    ("case", "length"),
    [
        (seldom if case.name in SELDOM else pytest.param)(case, n, id=f"{case.name}-{n}")
        for case in CASES
        for n in case.unbiased
    ],
)
def test_law_12_numerator_and_denominator_are_unbiased(case, length):
    # 4,000 rows of one text, each with its own key: their mean must be full attention.
    many = 4000
    one = stream(case, places=length).rows([0])
    tokens = Chunk(*(np.broadcast_to(leaf, (many, *leaf.shape[1:])) for leaf in one))
    state = case.policy.reserve(case.spec, begin(case, many), length)
    first = Chunk(*(leaf[:, : length - 1] for leaf in tokens))
    # Without its output: XLA then drops the attention of the first tokens.
    absorb = jax.jit(lambda state, chunk: case.policy.update(case.spec, state, chunk)[1])
    state = absorb(state, first)
    if case.finishes:
        state = jitted_finish_prefill(case.policy, case.spec, state)
        state = case.policy.reserve(case.spec, state, 1)
    partial, _ = update(
        case.policy, case.spec, state, Chunk(*(leaf[:, length - 1 :] for leaf in tokens))
    )
    out, lse = np.asarray(partial.out, np.float64)[:, 0], np.asarray(partial.lse, np.float64)[:, 0]
    q, k, v = one.compact(0)
    k = np.repeat(oracle.rotate_heads(k, np.arange(length), cases.THETA), case.group, axis=1)
    q = oracle.rotate_heads(q, np.arange(length), cases.THETA)[-1]
    weights = np.exp(np.einsum("nh,tnh->nt", q, k) * cases.SCALE)
    denominator = weights.sum(axis=1)
    numerator = np.einsum("nt,tnh->nh", weights, np.repeat(v, case.group, axis=1))
    for estimate, truth in (
        (np.exp(lse), denominator),
        (out * np.exp(lse)[..., None], numerator),
    ):
        error = estimate.std(axis=0) / np.sqrt(many)
        assert (error > 0).all()
        assert (np.abs(estimate.mean(axis=0) - truth) < 4 * error).all()


@some(lambda case: case.exact)
def test_law_13_protected_slots_survive_adversarial_keys(case):
    tokens, size = stream(case), 7  # by law 5 one size of chunks tells of all
    length = case.exact
    k = np.array(tokens.k, np.float32)
    k[:, length:] *= 1e3  # every later key outweighs all that came before
    hostile = tokens._replace(k=k.astype(tokens.k.dtype))
    done = run(case, hostile, size)
    held = jitted_cached(case.policy, case.spec, done.after[-1])
    positions, weight = np.asarray(held.positions), np.asarray(held.log_weight)
    for row in (0, 1, 2):
        for head in range(cases.KV_HEADS):
            sure = set(positions[row, head][weight[row, head] == 0])
            assert sure >= set(range(length))
    # What is stored of them is what was stored at first.
    first = run(case, Chunk(*(leaf[:, : case.places] for leaf in tokens)), size)
    for name in ("k", "v"):
        one, other = (_sinks(r.after[-1], name, length) for r in (done, first))
        np.testing.assert_array_equal(one, other)


def _sinks(state, name, length):
    part = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, Ring))[0]
    return np.asarray(getattr(part, name))[0, :, :length]


@some(lambda case: case.finishes)
def test_law_14_finish_prefill_keeps_sequences_apart_and_sinks(case):
    done = plain_run(case, 1)
    state = done.after[case.prompt - 1]
    finished = jitted_finish_prefill(case.policy, case.spec, state)
    order = [2, 0, 3, 1]
    mixed = jitted_finish_prefill(case.policy, case.spec, batch.take(state, order))
    assert_same_bits(mixed, batch.take(finished, order))
    held = case.policy.cached(case.spec, finished)
    for row, prompt in enumerate(stream(case).valid[:, : case.prompt].sum(axis=1)):
        positions = np.asarray(held.positions)[row, 0][np.asarray(held.log_weight)[row, 0] == 0]
        assert set(positions) >= set(range(min(case.exact, prompt)))
        kept = len(positions) == prompt if case.whole else len(positions) < prompt
        assert kept or prompt <= case.capacity


@some(lambda case: True, SELDOM - ASKED, variants=True)
def test_law_15_the_oracle_agrees(case):
    wanted, _ = expected(case)
    for size in case.sizes:
        if case.scored and size > 1:  # a larger chunk shows more keys
            continue
        close(plain_run(case, size).outs, wanted, case.tolerance)


@some(lambda case: True, SELDOM - ASKED, variants=True)
def test_law_15_the_oracle_holds_the_same_tokens(case):
    _, held = expected(case)
    tokens = stream(case)
    for size in case.sizes[: 1 if case.scored else 2]:
        done = plain_run(case, size)
        for state, seen in zip(done.after, done.seen, strict=True):
            kept = jitted_cached(case.policy, case.spec, state)
            positions, weight = np.asarray(kept.positions), np.asarray(kept.log_weight)
            for row in range(4):
                count = int(tokens.valid[row, :seen].sum())
                for head in range(cases.KV_HEADS):
                    there = weight[row, head] > -np.inf
                    found = np.stack([positions[row, head], weight[row, head]], axis=1)[there]
                    want = held[row][count - 1][head] if count else []
                    close(found[np.argsort(found[:, 0])], np.reshape(want, (-1, 2)), 1e-6)


@every
def test_positions_wrap_without_a_trace(case):
    for size, start in ((1, 2**32 - 5), (case.sizes[-1], 2**31 - 5)):
        # Where draws follow from positions, others are drawn: those that the oracle draws.
        wanted = expected(case, start)[0] if case.drawn else plain_run(case, size).outs
        close(plain_run(case, size, start).outs, wanted, max(2e-6, case.tolerance / 3))


@every
def test_law_16_gradients_reach_the_chunk(case):
    size = case.sizes[1]
    state, new = half(case), chunk(case, size)
    state = case.policy.reserve(case.spec, state, case.places)
    positions, valid = jnp.asarray(new.positions), jnp.asarray(new.valid)
    direction = np.random.default_rng(9).normal(size=new.q.shape).astype(np.float32)

    def loss(q, k, v):
        out, _ = step(case.policy, case.spec, state, q, k, v, positions, valid)
        return jnp.sum(out * direction)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), compiler_options=QUICK)
    grads = gradient(*map(jnp.asarray, new[:3]))
    for grad in grads:
        grad = np.asarray(grad, np.float32)
        assert np.isfinite(grad).all()
        assert not grad[3].any()  # padding
    q, k, v = (np.abs(np.asarray(g, np.float32)[:3]).sum(axis=(1, 2, 3)) for g in grads)
    assert (v > 0).all()
    assert case.capacity == 1 or ((q > 0).all() and (k > 0).all())


@some(lambda case: any_leaf(case, lambda leaf: leaf.shared))
def test_law_11_shared_leaves_follow_from_positions_and_valid_alone(case):
    size = case.sizes[1]
    tokens, other = stream(case), stream(case, seed=1)
    other = other._replace(positions=tokens.positions, valid=tokens.valid)
    one, same = (run(case, t, size).after[-1] for t in (tokens, other))
    found = [arrays_where(case, state, lambda leaf: leaf.shared) for state in (one, same)]
    for (_, a), (_, b) in zip(*found, strict=True):
        assert_same_bits(a, b)


@some(lambda case: any_leaf(case, lambda leaf: leaf.append_only))
def test_law_11_append_only_leaves_stay(case):
    done, tokens = plain_run(case, 1), stream(case)
    before = [state for state, seen in zip(done.after, done.seen, strict=True)
              if seen <= case.prompt]  # fmt: skip
    last = arrays_where(case, before[-1], lambda leaf: leaf.append_only)
    for state, seen in zip(before, done.seen, strict=False):
        stored = tokens.valid[:, :seen].sum(axis=1)
        now = arrays_where(case, state, lambda leaf: leaf.append_only)
        for (leaf, array), (_, latest) in zip(now, last, strict=True):
            slots = leaf.letters.index("S")
            array, latest = (np.moveaxis(a, slots, 1) for a in (array, latest))
            for row, count in enumerate(stored):
                np.testing.assert_array_equal(array[row, :count], latest[row, :count])
                assert not array[row, count:].any(), "empty slots are as they began"
                if leaf.axes == "B S":
                    there = tokens.positions[row, :seen][tokens.valid[row, :seen]]
                    np.testing.assert_array_equal(array[row, :count], there)


@some(lambda case: any_leaf(case, lambda leaf: leaf.page))
def test_law_11_pages_change_when_they_say(case):
    """In the sequence without padding, at those tokens and at no other."""
    done = plain_run(case, 1)
    pages = next(leaf.page for leaf in jax.tree.leaves(case.policy.leaves) if leaf.page)
    numbers = range(len(pages.last_write(0)))
    changed = {number: 0 for number in numbers}
    paged = functools.partial(arrays_where, case, wanted=lambda leaf: leaf.page)
    for seen, old, new in zip(done.seen[1:], done.after, done.after[1:], strict=False):
        for number in numbers:
            slots = slice(
                pages.first + number * pages.size, pages.first + (number + 1) * pages.size
            )
            same = all(
                np.array_equal(before[0, :, slots], after[0, :, slots])
                for (_, before), (_, after) in zip(paged(old), paged(new), strict=True)
            )
            changed[number] = changed[number] if same else seen
        assert tuple(changed.values()) == pages.last_write(seen)
    assert all(changed.values()), "short of a round of all levels"
