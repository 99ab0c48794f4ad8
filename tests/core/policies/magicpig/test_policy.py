"""MagicPIG beyond the laws.

The paper's sizes, keys in a cone, empty and overfull samples, bytes, host memory, bad settings.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.contract import Chunk, Spec
from jaxkv.driver import step
from jaxkv.errors import UserError
from jaxkv.evals.magicpig import inclusion
from jaxkv.pallas_kernels import host_memory
from jaxkv.platform import gpu
from jaxkv.policies import Full, MagicPIG
from jaxkv.policies.magicpig import policy as magicpig
from jaxkv.policy_spec import bytes_by_memory, state_bytes
from jaxkv.rotary import Alibi, NoPosition, rotary
from jaxkv.state import batch
from tests.core.tokens import chunk, cut

HEADS, DIM = 2, 32
SPEC = Spec(kv_heads=HEADS, head_dim=DIM, scale=DIM**-0.5, encoding=NoPosition(), group=2)
jitted_step = jax.jit(step, static_argnums=(0, 1))
finish_prefill = jax.jit(
    lambda policy, spec, state: policy.finish_prefill(spec, state), static_argnums=(0, 1)
)


@partial(jax.jit, static_argnums=(0, 1))
def absorb(policy, spec, state, prompt):
    """The state alone: attention within a long prompt would take most of the time."""
    return policy.update(spec, state, prompt)[1]


def after(policy, prompt, spec=SPEC):
    """The state after prefill, with a slot for one more token."""
    size, tokens = prompt.valid.shape
    state = policy.reserve(spec, policy.init(spec, size, jax.random.key(0)), tokens)
    state = absorb(policy, spec, state, prompt)
    finishes = policy.min_prompt is not None
    if finishes:
        state = finish_prefill(policy, spec, state)
    return policy.reserve(spec, state, 1 if finishes else tokens + 1)


def output(policy, prompt, new):
    return np.asarray(jitted_step(policy, SPEC, after(policy, prompt), *new)[0])


@pytest.fixture
def use_form(monkeypatch):
    """A function that chooses the forms of a GPU or of a CPU, there the kernels' XLA references.

    Programs of the GPU's forms are dropped at the end.
    """

    def choose(on_gpu):
        reads = lambda spec, q, k: on_gpu and not isinstance(spec.encoding, Alibi)
        monkeypatch.setattr(gpu, "finds_at_once", lambda tables: on_gpu)
        monkeypatch.setattr(gpu, "reads_by_flash", reads)
        jax.clear_caches()

    yield choose
    monkeypatch.undo()
    jax.clear_caches()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"budget": 9, "sinks": 0},
        pytest.param({"hash_generated": False}, marks=pytest.mark.slow),
    ],
)
def test_the_form_for_gpus_changes_no_output(use_form, changes):
    """One token at a time, past the window and past the tail, which is then indexed; positions
    have gaps. One prompt is shorter than sinks and window."""
    policy = MagicPIG(**{"K": 3, "L": 8, "sinks": 2, "window": 4, "tail": 16} | changes)
    spec = dataclasses.replace(SPEC, encoding=rotary(DIM, 100.0))
    prompt, new = chunk(SPEC, 200, batch=3), chunk(SPEC, 40, 200, rng=1, batch=3)
    prompt = prompt._replace(valid=prompt.valid.at[2, 3:].set(False))
    new, outs = new._replace(valid=new.valid.at[1, 7:30:3].set(False)), []
    for on_gpu in (False, True):
        use_form(on_gpu)
        jitted, state = jax.jit(partial(step, policy, spec)), after(policy, prompt, spec)
        for at in range(40):
            state = policy.reserve(spec, state, at + 1)
            out, state = jitted(state, *cut(new, at, at + 1))
            outs.append(np.where(new.valid[:, at, None, None], out[:, 0], 0))
    np.testing.assert_allclose(outs[40:], outs[:40], atol=3e-6)


def test_keys_in_a_cone_opposite_the_query_are_found_once_centred():
    """Unit keys plus three times one direction, and queries opposite to it (Figure 8a)."""
    spec = Spec(kv_heads=1, head_dim=128, scale=128**-0.5, encoding=NoPosition())
    rng, keys = np.random.default_rng(0), 30_000
    k = rng.normal(size=(keys, 128))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    k[:, 0] += 3
    # Nearly opposite to the direction, so almost orthogonal to the centred keys.
    q = rng.normal(size=(4, 128)) * 0.01
    q[:, 0] = -1
    prompt = Chunk(
        np.zeros((1, keys, 4, 128), np.float32), k[None, :, None].astype(np.float32),
        np.zeros((1, keys, 1, 128), np.float32), np.arange(keys, dtype=np.uint32)[None],
        np.ones((1, keys), bool),
    )  # fmt: skip
    number = jnp.full((1,), keys, jnp.int32)
    share = {}
    for center in (False, True):
        policy = MagicPIG(center=center, sinks=0, window=1, budget=20_000, start=keys)
        state = after(policy, prompt, spec)
        selection = magicpig.find(
            state, policy.settings, policy.budget, jnp.asarray(q[None], jnp.float32), number,
            number.astype(jnp.uint32),
        )  # fmt: skip
        share[center] = float(np.mean(selection.total)) / keys
    centred = k - k.mean(axis=0)
    cosine = centred @ q.T / np.linalg.norm(centred, axis=1)[:, None] / np.linalg.norm(q, axis=1)
    predicted = inclusion.u(cosine, 10, 150).mean()
    assert share[False] < 1e-3
    assert 0.013 < predicted < 0.017 and abs(share[True] / predicted - 1) < 0.25


def test_a_chunk_after_the_end_of_prefill_equals_its_tokens_one_by_one():
    """A chunk gives the outputs of its tokens one by one, also where the chunk is scanned."""
    policy = MagicPIG(K=3, L=8, sinks=2, window=4, start=512)
    prompt, question = chunk(SPEC, 200), chunk(SPEC, 300, 200, rng=1)
    state = policy.reserve(SPEC, after(policy, prompt), 300)
    outs, chunk_state = jitted_step(policy, SPEC, state, *question)
    for at in (0, 3, 255, 256, 299):
        before = question._replace(valid=question.valid & (jnp.arange(300) < at)[None])
        _, token_state = jitted_step(policy, SPEC, state, *before)
        out, _ = jitted_step(policy, SPEC, token_state, *cut(question, at, at + 1))
        np.testing.assert_allclose(out, outs[:, at : at + 1], atol=1e-5)
    assert int(chunk_state.dense.count[0] + chunk_state.indexed.count[0]) == 500


def test_a_prompt_without_tokens_between_sinks_and_window_has_full_attention():
    """The center is then the mean of all keys, or 0 without keys."""
    policy = MagicPIG(K=2, L=4, sinks=4, window=64, start=8)
    prompt, new = chunk(SPEC, 67), chunk(SPEC, 1, 67, rng=1)
    expected = output(Full(max=512), prompt, new)
    np.testing.assert_allclose(output(policy, prompt, new), expected, atol=1e-5)
    empty = finish_prefill(policy, SPEC, policy.init(SPEC, 1, jax.random.key(0)))
    assert not np.asarray(empty.center).any()


@pytest.mark.parametrize("center, lost", [(True, 150), (False, 310)])
def test_a_nan_key_makes_the_output_nan(center, lost):
    """A NaN key in the prompt or among the generated tokens, even if its bucket never matches."""
    prompt, new = chunk(SPEC, 300), chunk(SPEC, 40, 300, rng=1)
    if lost < 300:
        prompt = prompt._replace(k=prompt.k.at[0, lost, 0].set(jnp.nan))
    else:
        new = new._replace(k=new.k.at[0, lost - 300, 0].set(jnp.nan))
    outs, _ = decode(MagicPIG(K=12, L=2, window=8, center=center, start=300), prompt, new)
    assert np.isnan(outs[0, -1, :2]).all() and np.isfinite(outs[0, -1, 2:]).all()


def decode(policy, prompt, new):
    """The outputs of tokens one by one, and the state after them."""
    state, outs = after(policy, prompt), []
    for at in range(new.valid.shape[1]):
        state = policy.reserve(SPEC, state, at + 1)
        out, state = jitted_step(policy, SPEC, state, *cut(new, at, at + 1))
        outs.append(np.asarray(out))
    return np.concatenate(outs, axis=1), state


def test_host_memory_gives_the_same_outputs():
    """With rebuilt tables, and with sequences taken and put."""
    prompt, new = chunk(SPEC, 200, batch=2), chunk(SPEC, 12, 200, rng=1, batch=2)
    device = MagicPIG(K=3, L=6, sinks=2, window=4, tail=8, start=200)
    on_host = dataclasses.replace(device, host_offload=True)
    leaves = jax.tree.leaves(on_host.leaves)
    assert {leaf.location for leaf in jax.tree.leaves(device.leaves)} == {"device"}
    assert sum(leaf.location == "host" for leaf in leaves) == 4  # indexed keys, values, both tables
    expected, reference = decode(device, prompt, new)
    actual, state = decode(on_host, prompt, new)
    np.testing.assert_array_equal(actual, expected)
    assert state.indexed.k.shape == reference.indexed.k.shape and int(state.indexed.count[0]) > 194
    assert host_memory.on_host(state.indexed.k) and host_memory.on_host(state.tables.entries)
    assert not host_memory.on_host(state.planes) and not host_memory.on_host(state.dense.k)
    swapped = batch.put(state, [1, 0], batch.take(state, [0, 1]))
    assert host_memory.on_host(swapped.indexed.k)
    np.testing.assert_array_equal(swapped.indexed.k, np.asarray(reference.indexed.k)[::-1])


def test_bytes_are_counted_by_memory():
    device = MagicPIG(K=3, L=6, start=1000)
    on_host = dataclasses.replace(device, host_offload=True)
    state = jax.eval_shape(
        lambda: on_host.finish_prefill(SPEC, on_host.init(SPEC, 1, jax.random.key(0)))
    )
    host_bytes = batch.nbytes([state.indexed.k, state.indexed.v, state.tables])
    device_bytes = batch.nbytes(state) - host_bytes
    assert bytes_by_memory([on_host, on_host], SPEC, 1) == (2 * device_bytes, 2 * host_bytes)
    assert bytes_by_memory([device], SPEC, 1) == (batch.nbytes(state), 0)
    assert state_bytes([on_host], SPEC, 1) == state_bytes([device], SPEC, 1) == batch.nbytes(state)


def test_a_platform_without_host_memory_is_refused(monkeypatch):
    class Bare:
        platform = "abacus"

        def addressable_memories(self):
            return [type("Beads", (), {"kind": "device"})]

    monkeypatch.setattr(jax, "local_devices", lambda: [Bare()])
    with pytest.raises(
        UserError, match=r"host_offload=true needs .* and abacus has device; leave it out"
    ):
        MagicPIG(host_offload=True).init(SPEC, 1, jax.random.key(0))


def test_tokens_without_slots_are_refused():
    policy = MagicPIG(K=2, L=4, tail=16, start=64)
    state = after(policy, chunk(SPEC, 60))
    with pytest.raises(UserError, match=r"slots and \d+ are needed"):
        policy.update(SPEC, state, chunk(SPEC, 117, 60))
    out, _ = jitted_step(policy, SPEC, state, *chunk(SPEC, 117, 60))
    assert np.isnan(out).all()
