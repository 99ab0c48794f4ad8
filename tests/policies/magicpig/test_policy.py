"""What the laws cannot see of MagicPIG: sizes of the paper, keys in a cone, samples that are empty
or too large, and what cannot be set."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.contract import Chunk, Spec
from jaxkv.driver import step
from jaxkv.errors import UserError
from jaxkv.evals.magicpig import inclusion
from jaxkv.pallas_kernels import host
from jaxkv.policies import Full, MagicPIG
from jaxkv.policies.magicpig import policy as magicpig
from jaxkv.policy_spec import bytes_by_memory, state_bytes
from jaxkv.rotary import Alibi, NoPosition
from jaxkv.state import batch
from tests.seldom import seldom

HEADS, DIM = 2, 32
SPEC = Spec(kv_heads=HEADS, head_dim=DIM, scale=DIM**-0.5, encoding=NoPosition())
jitted_step = jax.jit(step, static_argnums=(0, 1))
finish_prefill = jax.jit(
    lambda policy, spec, state: policy.finish_prefill(spec, state), static_argnums=(0, 1)
)


def chunk(tokens, first=0, seed=0, batch=1):
    """Random tokens, two query heads a kv head, from position `first` on."""
    rng = np.random.default_rng(seed)
    heads = (2 * HEADS, HEADS, HEADS)
    q, k, v = (rng.normal(size=(batch, tokens, n, DIM)).astype(np.float32) for n in heads)
    positions = np.broadcast_to(np.arange(first, first + tokens, dtype=np.uint32), (batch, tokens))
    return Chunk(*map(jnp.asarray, (q, k, v, positions, np.ones((batch, tokens), bool))))


def after(policy, prompt, spec=SPEC):
    """The sealed state of a prompt, with room for what follows."""
    size, tokens = prompt.valid.shape
    state = policy.reserve(spec, policy.init(spec, size, jax.random.key(0)), tokens)
    _, state = jax.jit(functools.partial(policy.update, spec))(state, prompt)
    finishes = policy.min_prompt is not None
    if finishes:
        state = finish_prefill(policy, spec, state)
    return policy.reserve(spec, state, 1 if finishes else tokens + 1)


def answer(policy, prompt, new):
    return np.asarray(jitted_step(policy, SPEC, after(policy, prompt), *new)[0])


@pytest.mark.parametrize("center", [True, seldom(False)])
def test_where_every_key_is_found_it_is_full_attention(center):
    prompt, new = chunk(300), chunk(1, 300, seed=1)
    every = MagicPIG(K=1, L=200, center=center, start=300)  # u is 1 but for keys opposite to q
    wanted = answer(Full(max=512), prompt, new)
    np.testing.assert_allclose(answer(every, prompt, new), wanted, atol=2e-5)


@pytest.mark.slow
def test_where_none_is_found_the_ends_are_left():
    prompt, new = chunk(300), chunk(1, 300, seed=1)
    rare = MagicPIG(K=16, L=2, sinks=3, window=5, start=300)
    place = jnp.arange(300)[None]
    ends = prompt._replace(valid=(place < 3) | (place >= 296))
    wanted = answer(Full(max=512), ends, new)
    np.testing.assert_allclose(answer(rare, prompt, new), wanted, atol=1e-5)


def test_tables_find_what_comparing_all_codes_finds():
    """Of tables, of the zone behind them, and of both once they are made anew."""
    policy = MagicPIG(K=4, L=30, sinks=2, window=6, tail=64, start=2000)
    prompt, rest = chunk(2000), chunk(300, 2000, seed=1)
    state = after(policy, prompt)
    grown = policy.reserve(SPEC, state, 64)
    grown = policy.extend(SPEC, grown, Chunk(*(leaf[:, :64] for leaf in rest)))
    made_anew = policy.reserve(SPEC, grown, 300)
    made_anew = policy.extend(SPEC, made_anew, Chunk(*(leaf[:, 64:] for leaf in rest)))
    for held, indexed in ((state, 1992), (grown, 1992), (made_anew, 2056)):
        count = int(held.dense.count[0]) + indexed
        assert int(held.indexed.count[0]) == indexed
        q = np.asarray(chunk(1, count, seed=2).q)[:, 0]
        number = jnp.full((1,), count, jnp.int32)
        found = magicpig.find(
            held, policy.settings, 4096, jnp.asarray(q), number, number.astype(jnp.uint32)
        )
        for head in range(2 * HEADS):
            kv = head // 2
            planes = np.asarray(held.planes)[0, kv]
            ends, far = np.asarray(held.dense.k)[0, kv], np.asarray(held.indexed.k)[0, kv, :indexed]
            keys = np.concatenate([ends[:2], far, ends[2 : count - indexed]])
            keys -= np.asarray(held.center)[0, kv]
            sides = [(x @ planes > 0).reshape(-1, 30, 4) for x in (keys, q[:, head])]
            agree = (sides[0] == sides[1]).all(axis=2).sum(axis=1)
            agree[: policy.sinks] = agree[count + 1 - policy.window :] = 0
            chosen = np.asarray(found.places)[0, head, : int(found.count[0, head])]
            places, wanted = held.indexed.positions.shape[1], np.flatnonzero(agree >= 2) - 2
            wanted = np.where(wanted < indexed, wanted, wanted - indexed + places)
            np.testing.assert_array_equal(chosen, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("far", [2.0, 3.0, 4.0])
def test_keys_in_a_cone_opposite_the_query_are_found_once_centred(far):
    """Unit keys and `far` times one direction, the query against it (Figure 8a)."""
    spec = Spec(kv_heads=1, head_dim=128, scale=128**-0.5, encoding=NoPosition())
    rng, keys = np.random.default_rng(0), 100_000
    k = rng.normal(size=(keys, 128))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    k[:, 0] += far
    # Nearly opposite: at right angles to what is left of a key once it is centred.
    q = rng.normal(size=(4, 128)) * 0.01
    q[:, 0] = -1
    prompt = Chunk(
        np.zeros((1, keys, 4, 128), np.float32), k[None, :, None].astype(np.float32),
        np.zeros((1, keys, 1, 128), np.float32), np.arange(keys, dtype=np.uint32)[None],
        np.ones((1, keys), bool),
    )  # fmt: skip
    number = jnp.full((1,), keys, jnp.int32)
    found = {}
    for center in (False, True):
        policy = MagicPIG(center=center, sinks=0, window=1, budget=60_000, start=keys)
        held = after(policy, prompt, spec)
        met = magicpig.find(
            held, policy.settings, policy.budget, jnp.asarray(q[None], jnp.float32), number,
            number.astype(jnp.uint32),
        )  # fmt: skip
        found[center] = float(np.mean(met.total)) / keys
    centred = k - k.mean(axis=0)
    cosine = centred @ q.T / np.linalg.norm(centred, axis=1)[:, None] / np.linalg.norm(q, axis=1)
    predicted = inclusion.u(cosine, 10, 150).mean()
    assert found[False] < 1e-3
    assert 0.013 < predicted < 0.017 and abs(found[True] / predicted - 1) < 0.25


@pytest.mark.slow
def test_a_question_behind_the_prompt_meets_a_sample():
    """It is read as it would be one token after another, in pieces too."""
    policy = MagicPIG(K=3, L=8, sinks=2, window=4, start=512)
    prompt, question = chunk(200), chunk(300, 200, seed=1)
    state = policy.reserve(SPEC, after(policy, prompt), 300)
    outs, whole = jitted_step(policy, SPEC, state, *question)
    for at in (0, 3, 255, 256, 299):
        before = question._replace(valid=question.valid & (jnp.arange(300) < at)[None])
        _, one = jitted_step(policy, SPEC, state, *before)
        out, _ = jitted_step(policy, SPEC, one, *(leaf[:, at : at + 1] for leaf in question))
        np.testing.assert_allclose(out, outs[:, at : at + 1], atol=1e-5)
    assert int(whole.dense.count[0] + whole.indexed.count[0]) == 500


@pytest.mark.slow
def test_a_prompt_without_a_middle_is_attended_exactly():
    """The mean of no keys is that of what there is, and of nothing at all 0."""
    policy = MagicPIG(K=2, L=4, sinks=4, window=64, start=8)
    for tokens in (1, 5, 67):
        prompt, new = chunk(tokens), chunk(1, tokens, seed=1)
        wanted = answer(Full(max=512), prompt, new)
        np.testing.assert_allclose(answer(policy, prompt, new), wanted, atol=1e-5)
    empty = finish_prefill(policy, SPEC, policy.init(SPEC, 1, jax.random.key(0)))
    assert not np.asarray(empty.center).any()


@pytest.mark.slow
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("lost", [150, 310])
def test_a_key_that_is_no_number_is_not_passed_over(center, lost):
    """Of the prompt, or of what followed and has left the window: no query has its code."""
    prompt, new = chunk(300), chunk(40, 300, seed=1)
    if lost < 300:
        prompt = prompt._replace(k=prompt.k.at[0, lost, 0].set(jnp.nan))
    else:
        new = new._replace(k=new.k.at[0, lost - 300, 0].set(jnp.nan))
    outs, _ = written(MagicPIG(K=12, L=2, window=8, center=center, start=300), prompt, new)
    assert np.isnan(outs[0, -1, :2]).all() and np.isfinite(outs[0, -1, 2:]).all()


def test_a_prompt_is_sealed_once():
    state = after(MagicPIG(K=1, L=2, start=64), chunk(100))
    with pytest.raises(UserError, match="prefill is finished already"):
        MagicPIG(K=1, L=2).finish_prefill(SPEC, state)


def test_bytes_of_a_sealed_prompt_are_those_told():
    """Counted anew: 2,000 slots, of which all but the ends are in the tables."""
    policy = MagicPIG(K=6, L=20, sinks=4, window=60, tail=96, start=2000)
    begun = policy.init(SPEC, 1, jax.random.key(0))
    state = jax.eval_shape(lambda: policy.finish_prefill(SPEC, begun))
    far, near, wide = 1936, 160, 4  # a block has a quarter of what a bucket holds on average
    keys = (far + near) * (HEADS * 2 * DIM * 4 + 4) + 2 * 4
    blocks = (far + 64 * (wide - 1)) // wide
    tables = 20 * (2 * wide * blocks + 4 * (64 + 1))
    a_head = tables + 4 * DIM * 6 * 20 + 2 * 20 * (near - 4) + 4 * (far + near) + 4 * DIM + 8
    assert batch.nbytes(state) == keys + HEADS * a_head


def written(policy, prompt, new):
    """What tokens see one after another, and the state behind them."""
    state, outs = after(policy, prompt), []
    for at in range(new.valid.shape[1]):
        state = policy.reserve(SPEC, state, at + 1)
        out, state = jitted_step(policy, SPEC, state, *(leaf[:, at : at + 1] for leaf in new))
        outs.append(np.asarray(out))
    return np.concatenate(outs, axis=1), state


@pytest.mark.slow
def test_what_lies_in_the_memory_of_the_host_is_met_alike():
    """New tables are made once; rows are taken and put; a prompt's question is read."""
    prompt, new = chunk(200, batch=2), chunk(12, 200, seed=1, batch=2)
    device = MagicPIG(K=3, L=6, sinks=2, window=4, tail=8, start=200)
    far = dataclasses.replace(device, memory="host")
    leaves = jax.tree.leaves(far.leaves)
    assert {leaf.memory for leaf in jax.tree.leaves(device.leaves)} == {"device"}
    assert sum(leaf.memory == "host" for leaf in leaves) == 4  # indexed keys, values, both tables
    wanted, held = written(device, prompt, new)
    found, state = written(far, prompt, new)
    np.testing.assert_array_equal(found, wanted)
    assert state.indexed.k.shape == held.indexed.k.shape and int(state.indexed.count[0]) > 194
    assert host.is_there(state.indexed.k) and host.is_there(state.tables.entries)
    assert not host.is_there(state.planes) and not host.is_there(state.dense.k)
    turned = batch.put(state, [1, 0], batch.take(state, [0, 1]))
    assert host.is_there(turned.indexed.k)
    np.testing.assert_array_equal(turned.indexed.k, np.asarray(held.indexed.k)[::-1])
    question = chunk(3, 212, seed=2, batch=2)
    answers = [jitted_step(p, SPEC, s, *question)[0] for p, s in ((device, held), (far, state))]
    np.testing.assert_array_equal(*answers)


@pytest.mark.slow
def test_in_the_memory_of_the_host_keys_with_a_bias_are_weighed_alike():
    spec = dataclasses.replace(SPEC, encoding=Alibi.of(2 * HEADS))
    device = MagicPIG(K=3, L=6, sinks=2, window=4, tail=8, start=200)
    far = dataclasses.replace(device, memory="host")
    found = [
        jitted_step(policy, spec, after(policy, chunk(200), spec), *chunk(1, 200, seed=1))[0]
        for policy in (device, far)
    ]
    np.testing.assert_allclose(*found, atol=1e-6)


def test_bytes_are_counted_by_the_memory_they_lie_in():
    device = MagicPIG(K=3, L=6, start=1000)
    far = dataclasses.replace(device, memory="host")
    sealed = jax.eval_shape(lambda: far.finish_prefill(SPEC, far.init(SPEC, 1, jax.random.key(0))))
    lies = batch.nbytes([sealed.indexed.k, sealed.indexed.v, sealed.tables])
    assert bytes_by_memory([far, far], SPEC, 1) == (2 * (batch.nbytes(sealed) - lies), 2 * lies)
    assert bytes_by_memory([device], SPEC, 1) == (batch.nbytes(sealed), 0)
    assert state_bytes([far], SPEC, 1) == state_bytes([device], SPEC, 1) == batch.nbytes(sealed)


def test_a_platform_without_memory_of_the_host_is_told(monkeypatch):
    class Bare:
        platform = "abacus"

        def addressable_memories(self):
            return [type("Beads", (), {"kind": "device"})]

    monkeypatch.setattr(jax, "local_devices", lambda: [Bare()])
    with pytest.raises(
        UserError, match=r"memory=host wants .* and abacus has device; leave it out"
    ):
        MagicPIG(memory="host").init(SPEC, 1, jax.random.key(0))


@pytest.mark.slow
def test_more_tokens_than_room_are_refused():
    policy = MagicPIG(K=2, L=4, tail=16, start=64)
    state = after(policy, chunk(60))
    with pytest.raises(UserError, match=r"slots a row and \d+ are needed"):
        policy.extend(SPEC, state, chunk(117, 60))
    out, _ = jitted_step(policy, SPEC, state, *chunk(117, 60))
    assert np.isnan(out).all()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"K": 0}, r"K must be from 1 to 16, got 0; try K=10"),
        ({"K": 17}, r"K must be from 1 to 16, got 17"),
        ({"L": 1}, r"L must be from 2 to 4096, got 1; try L=150"),
        ({"budget": 0}, r"budget must be from 1 to 65535, got 0; try budget=4096"),
        ({"budget": 65536}, r"budget must be from 1 to 65535, got 65536"),
        ({"min_tables": 0}, r"min_tables must be 1 or 2, got 0"),
        ({"u_floor": -1.0}, r"u_floor must be from 0 to less than 1, got -1.0"),
        ({"window": 0}, r"window must be at least 1, got 0"),
        ({"sinks": -1}, r"sinks must be 0 or more, got -1"),
        ({"tail": 0}, r"tail must be from 1 to 1073741824, got 0; try tail=1024"),
        ({"start": 0}, r"start must be from 1 to 1073741824, got 0; try start=512"),
    ],
)
def test_settings_that_cannot_be(settings, says):
    with pytest.raises(UserError, match=says):
        MagicPIG(**settings)
