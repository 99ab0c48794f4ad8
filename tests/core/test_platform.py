"""Each workaround computes what its plain form computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Spec
from jaxkv.contract import Chunk
from jaxkv.platform import cpu, gpu
from jaxkv.policies import Streaming
from jaxkv.rotary import NoPosition, rotary
from jaxkv.rows import Int8Rows
from tests.core.tokens import chunk, run


@pytest.mark.parametrize("batch", [1, 3])
def test_map_sequences_is_vmap(rng, batch):
    x, at = rng.normal(size=(batch, 5, 2)), rng.integers(0, 5, batch)
    rows = cpu.map_sequences(lambda x, at: x[at], jnp.asarray(x, jnp.float32), jnp.asarray(at))
    np.testing.assert_array_equal(rows, x.astype(np.float32)[np.arange(batch), at])


def test_order_after_changes_no_bit_whatever_was_read(rng):
    """Neither a NaN, an infinity nor a negative zero in the cache may reach the chunk."""
    q, k, v = (jnp.asarray(rng.normal(size=(4, 2, 1, 3)), jnp.float32) for _ in range(3))
    chunk = Chunk(q, k, v, jnp.zeros((4, 2), jnp.uint32), jnp.ones((4, 2), bool))
    read = jnp.asarray([np.nan, -np.nan, -np.inf, -0.0], jnp.float32)[:, None]
    after = jax.jit(cpu.order_after)(chunk, read, read[:, :, None])
    for old, new in zip(chunk, after, strict=True):
        np.testing.assert_array_equal(old, new)


def test_argmax_is_the_first_of_the_largest():
    logits = jnp.asarray([[1.0, 3.0, 3.0], [np.nan, 1.0, 2.0], [-2.0, -1.0, -np.inf]])
    index, largest = cpu.argmax(logits)
    assert index.tolist() == [1, 2, 1]
    np.testing.assert_array_equal(largest, [3.0, np.nan, -1.0])


@pytest.mark.parametrize("sharded", [False, True])
def test_restore_heads_is_the_inverse_of_flatten_heads(sharded):
    spec = Spec(kv_heads=2, head_dim=4, scale=0.5, encoding=NoPosition())
    states = (Streaming(sinks=1, window=4).init(spec, 3, jax.random.key(0)),)
    flat = cpu.flatten_heads(states, sharded)
    assert flat[0].k.ndim == (4 if sharded else 3)
    back = cpu.restore_heads(flat, states)
    assert jax.tree.structure(back) == jax.tree.structure(states)
    for actual, expected in zip(jax.tree.leaves(back), jax.tree.leaves(states), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (8, 1)])
def test_linear_is_the_product_with_the_transposed_weight(rng, shape):
    x, weight = (
        jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((*shape, 24), (40, 24))
    )
    product = jax.jit(lambda *a: cpu.linear(*a, jnp.float32))(x, weight)
    np.testing.assert_allclose(product, np.asarray(x) @ np.asarray(weight).T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [None, 3])
def test_scatter_slot_writes_one_slot_of_each_sequence(rng, kv_heads):
    old = rng.normal(size=(5, 7, 2) if kv_heads is None else (5, kv_heads, 7, 2)).astype("f4")
    fresh = rng.normal(size=(*old.shape[:-2], 1, 2)).astype("f4")
    if kv_heads is None:  # positions [B,S] have no last axis
        old, fresh = old[..., 0], fresh[..., 0]
    slot, hit = np.array([0, 6, 3, 3, 6], "i4"), np.array([True, False, True, False, True])
    expected = old.copy()
    for b in np.flatnonzero(hit):
        of_sequence = expected[b] if kv_heads is None else expected[b].swapaxes(0, 1)
        of_sequence[slot[b]] = fresh[b, 0] if kv_heads is None else fresh[b, :, 0]
    arrays = (jnp.asarray(a) for a in (old, fresh, slot, hit[:, None]))
    np.testing.assert_array_equal(gpu.scatter_slot(*arrays), expected)


CHUNKED = {  # the first are everyday cases
    "full": [1, 36], "streaming:sinks=2,window=5": [1, 2, 5, 13, 36], "window:window=6": [1, 13],
    "streaming:sinks=2,window=5,positions=absolute": [1, 5], "snapkv:capacity=8,window=3": [13],
    "reservoir:sinks=3,window=4,sample=5": [1, 36], "keydiff:capacity=8,every=4": [5],
    "reservoir:sinks=3,window=4,sample=5,positions=absolute,weighted=true": [1],
    "reservoir:sinks=3,window=4,sample=5,storage=int8": [1],
    "balance-stream:sinks=2,window=4,levels=2,block=4": [1, 13],
    "stratified:sinks=2,window=4,sample=8,positions=absolute,weighted=true": [1],
}  # fmt: skip
SEVERAL = [(policy, chunk) for policy, chunks in CHUNKED.items() for chunk in chunks]


@pytest.mark.parametrize("policy, size", SEVERAL)
def test_reading_by_flash_attention_changes_no_output(rng, monkeypatch, policy, size):
    """Below the capacity and up to three times beyond it, padding among the tokens."""
    spec = Spec(2, 8, 8**-0.5, rotary(8, 100.0), group=2)
    chosen, count = jaxkv.policy(policy), 36
    valid = np.stack([np.ones(count, bool), rng.random(count) < 0.7])
    tokens, outputs = chunk(spec, count, rng=rng, valid=valid), []
    for flash in (False, True):
        by_kernel = lambda spec, q, k, flash=flash: flash and not isinstance(k, Int8Rows)
        monkeypatch.setattr(gpu, "reads_by_flash", by_kernel)
        outs, states = run(chosen, spec, tokens, size)
        outputs.append((outs, jax.tree.leaves(states[-1])))
    (plain, states), (by_flash, others) = outputs
    np.testing.assert_allclose(by_flash, plain, atol=3e-6)
    for first, second in zip(states, others, strict=True):
        np.testing.assert_allclose(np.asarray(first, "f4"), np.asarray(second, "f4"), atol=3e-6)


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_scatter_per_head_writes_one_slot_of_each_head(rng, kv_heads):
    old, fresh = (rng.normal(size=(4, kv_heads, n, 2)).astype("f4") for n in (7, 1))
    slot = rng.integers(0, 7, (4, kv_heads)).astype("i4")
    hit, expected = rng.random((4, kv_heads)) < 0.6, old.copy()
    for b, n in np.argwhere(hit):
        expected[b, n, slot[b, n]] = fresh[b, n, 0]
    arrays = (jnp.asarray(a) for a in (old, fresh, slot, hit))
    np.testing.assert_array_equal(gpu.scatter_per_head(*arrays), expected)
