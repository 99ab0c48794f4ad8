"""Every law of jaxkv/contract.py on every policy of CASES."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import rows
from jaxkv.contract import Chunk, Policy, is_letters
from jaxkv.driver import step
from jaxkv.sharding import mesh_of, sharded_seal, sharded_step
from jaxkv.slots import Slots
from jaxkv.stack import formula_bytes
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
    jitted_kept,
    jitted_seal,
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
    """A state that has seen the prompt, sealed where the policy does so."""
    done = plain_run(case, case.sizes[0])
    state = done.after[done.seen.index(case.prompt)]
    return jitted_seal(case.policy, case.spec, state) if hasattr(case.policy, "seal") else state


def chunk(case, size, seed=5):
    """New tokens for `half(case)`; in the last row there are none."""
    new = stream(case, seed=seed, places=size).rows([0, 0, 0, 3])
    before = stream(case).valid[:, : case.prompt].sum(axis=1, keepdims=True)
    valid = np.arange(4)[:, None] < np.full((1, size), 3)
    positions = (before + np.arange(size)).astype(np.uint32)
    return Chunk(new.q, new.k, new.v, positions, valid)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def attend_then_extend(policy, spec, state, tokens):
    if getattr(policy, "needs_scores", False):
        partial, scores = policy.attend(spec, state, tokens)
        return partial, policy.extend(spec, state, tokens, scores=scores)
    return policy.attend(spec, state, tokens), policy.extend(spec, state, tokens)


@every
def test_the_state_is_what_its_axes_say(case):
    assert isinstance(case.policy, Policy)
    assert hash(case.policy) == hash(dataclasses.replace(case.policy))
    state = jax.eval_shape(lambda: begin(case, rows=3))
    known = {"B": 3, "K": case.spec.kv_heads, "H": case.spec.head_dim}
    letters = jax.tree.leaves(case.policy.axes, is_leaf=is_letters)
    for axes, leaf in zip(letters, jax.tree.leaves(state), strict=True):
        assert len(axes) == len(leaf.shape) and axes[0] == "B"
        for letter, size in zip(axes, leaf.shape, strict=True):
            assert known.get(letter, size) == size


@every
@pytest.mark.parametrize("size", [1, 3])
def test_law_1_extend_keeps_shapes(case, size):
    state, new = half(case), chunk(case, size)
    both = functools.partial(attend_then_extend.__wrapped__, case.policy, case.spec)
    _, after = jax.eval_shape(both, state, new)
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
    if hasattr(case.policy, "seal"):
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
    mixed = run(case, stream(case).rows(order), size, rows.take(begin(case), order))
    assert_same(mixed.after[-1], rows.take(straight.after[-1], order))
    close(mixed.outs, straight.outs[order], 1e-6)
    other = stream(case, seed=1)
    beside = [np.concatenate([a[:1], b[1:]]) for a, b in zip(stream(case), other, strict=True)]
    alone = run(case, cases.Stream(*beside), size)
    assert_same_bits(rows.take(alone.after[-1], [0]), rows.take(straight.after[-1], [0]))
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
    if hasattr(case.policy, "reserve"):
        state = case.policy.reserve(case.spec, state, case.places)
    out, after = jitted_step(case.policy, case.spec, state, *new)
    other, shards = split(state, *new)
    assert_same(after, shards)
    close(out, other, 1e-6)


@some(lambda case: hasattr(case.policy, "seal"))
def test_law_6_a_prompt_is_sealed_alike_when_sharded(case):
    state = plain_run(case, 1).after[case.prompt - 1]
    one = jitted_seal(case.policy, case.spec, state)
    split = functools.partial(sharded_seal, mesh_of("data=2,model=2"), case.policy, case.spec)
    assert_same(one, jax.jit(split, compiler_options=QUICK)(state))


@every
def test_law_7_take_put_and_host_are_exact(case, tmp_path):
    state = half(case)
    order = [3, 1, 0, 2]
    mixed = rows.take(state, order)
    assert_same_bits(rows.put(mixed, order, mixed), state)
    rows.save(tmp_path / "state", state)
    assert_same_bits(rows.load(tmp_path / "state", jax.eval_shape(lambda: state)), state)
    back = rows.to_device(rows.to_host(state))
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
    partial, state = attend_then_extend(case.policy, case.spec, begin(case), nobody)
    assert not np.asarray(partial.out).any() and (np.asarray(partial.lse) == -np.inf).all()
    assert_same_bits(state, begin(case))
    held = jitted_kept(case.policy, case.spec, begin(case))
    assert (np.asarray(held.log_weight) == -np.inf).all()
    # The first token of a row sees itself alone.
    partial, _ = attend_then_extend(case.policy, case.spec, begin(case), new)
    wanted = np.repeat(np.asarray(new.v, np.float32), case.group, axis=2)
    close(np.asarray(partial.out)[:3], wanted[:3], case.tolerance)


@every
def test_law_10_decode_is_attend_and_extend(case):
    if not hasattr(case.policy, "decode"):
        pytest.skip("has no decode of its own")
    fused = plain_run(case, 1)
    tokens = stream(case)
    for place in range(0, len(fused.after) - 1, 3):
        state, seen = fused.after[place], place + 2
        if hasattr(case.policy, "seal") and place + 1 >= case.prompt:
            last = place + 1 == case.prompt
            state = jitted_seal(case.policy, case.spec, state) if last else state
            seen -= case.prompt
        if hasattr(case.policy, "reserve"):
            state = case.policy.reserve(case.spec, state, seen)
        new = Chunk(*(leaf[:, place + 1 : place + 2] for leaf in tokens))
        partial, after = attend_then_extend(case.policy, case.spec, state, new)
        close(partial.out, fused.outs[:, place + 1 : place + 2], case.tolerance)
        assert_same(after, fused.after[place + 1])


@some(lambda case: hasattr(case.policy, "take"))
def test_law_10_take_is_attend_and_extend(case):
    state, new = half(case), chunk(case, case.sizes[-1])
    apart = attend_then_extend(case.policy, case.spec, state, new)
    fused = jax.jit(case.policy.take, static_argnums=0, compiler_options=QUICK)
    assert_same(fused(case.spec, state, new), apart, case.tolerance)


@every
def test_law_11_bytes_are_what_the_formula_says(case):
    state = jax.eval_shape(lambda: begin(case, rows=5))
    assert rows.nbytes(state) == 5 * formula_bytes(case.policy, case.spec)


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
    state, seals = begin(case, many), hasattr(case.policy, "seal")
    state = case.policy.reserve(case.spec, state, length) if seals else state
    state = jax.jit(functools.partial(case.policy.extend, case.spec))(
        state, Chunk(*(leaf[:, : length - 1] for leaf in tokens))
    )
    if seals:
        state = jitted_seal(case.policy, case.spec, state)
        state = case.policy.reserve(case.spec, state, 1)
    partial, _ = attend_then_extend(
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
    held = jitted_kept(case.policy, case.spec, done.after[-1])
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
    part = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, Slots))[0]
    return np.asarray(getattr(part, name))[0, :, :length]


@some(lambda case: hasattr(case.policy, "seal"))
def test_law_14_seal_keeps_rows_apart_and_sinks(case):
    done = plain_run(case, 1)
    state = done.after[case.prompt - 1]
    sealed = jitted_seal(case.policy, case.spec, state)
    order = [2, 0, 3, 1]
    mixed = jitted_seal(case.policy, case.spec, rows.take(state, order))
    assert_same_bits(mixed, rows.take(sealed, order))
    held = case.policy.kept(case.spec, sealed)
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
            kept = jitted_kept(case.policy, case.spec, state)
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
    if hasattr(case.policy, "reserve"):
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


@some(lambda case: getattr(case.policy, "shared", ()))
def test_shared_leaves_follow_from_positions_and_valid_alone(case):
    size = case.sizes[1]
    tokens, other = stream(case), stream(case, seed=1)
    other = other._replace(positions=tokens.positions, valid=tokens.valid)
    one, same = (run(case, t, size).after[-1] for t in (tokens, other))
    for path in case.policy.shared:
        assert_same_bits(*(functools.reduce(getattr, path.split("."), s) for s in (one, same)))


@some(lambda case: hasattr(case.policy, "appends"))
def test_law_17_what_is_appended_stays(case):
    done, tokens = plain_run(case, 1), stream(case)
    before = [state for state, seen in zip(done.after, done.seen, strict=True)
              if seen <= case.prompt]  # fmt: skip
    last = before[-1]
    axes = {
        name: functools.reduce(getattr, name.split("."), case.policy.axes)
        for name in case.policy.appends
    }
    assert {letters[-1] == "S" or "S" in letters for letters in axes.values()} == {True}
    for state, seen in zip(before, done.seen, strict=False):
        held = tokens.valid[:, :seen].sum(axis=1)
        for name, letters in axes.items():
            now, later = (
                np.moveaxis(np.asarray(functools.reduce(getattr, name.split("."), of)),
                            letters.index("S"), 1) for of in (state, last)
            )  # fmt: skip
            for row, count in enumerate(held):
                np.testing.assert_array_equal(now[row, :count], later[row, :count])
                assert not now[row, count:].any(), "slots that hold no token are as they began"
                if name.endswith("positions"):
                    there = tokens.positions[row, :seen][tokens.valid[row, :seen]]
                    np.testing.assert_array_equal(now[row, :count], there)


@some(lambda case: hasattr(case.policy, "settling"))
def test_law_17_what_is_settled_stays(case):
    """In the row without padding: a page changes when it is said to, and at no other token."""
    policy, done = case.policy, plain_run(case, 1)
    first, page = policy.settling.first, policy.settling.page
    pages = range(len(policy.settled(0)))
    changed = {number: 0 for number in pages}
    for seen, old, new in zip(done.seen[1:], done.after, done.after[1:], strict=False):
        for number in pages:
            slots = slice(first + number * page, first + (number + 1) * page)
            same = all(
                np.array_equal(*(
                    np.asarray(functools.reduce(getattr, name.split("."), of))[0, :, slots]
                    for of in (old, new)
                )) for name in policy.settling.leaves
            )  # fmt: skip
            changed[number] = changed[number] if same else seen
        assert tuple(changed.values()) == policy.settled(seen)
    assert all(changed.values()), "short of a round of all levels"
