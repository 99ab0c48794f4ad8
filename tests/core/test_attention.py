"""Attention in parts equals numpy, for every division into parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import rows
from jaxkv.attention import local_attention, masked_bias, merge, sink_logit, slot_attention
from jaxkv.contract import Partial, Spec
from jaxkv.platform import cpu as xla_cpu
from jaxkv.rotary import Alibi, NoPosition
from tests.core import oracle
from tests.core.tokens import chunk


def problem(rng, batch=2, queries=3, slots=10, kv_heads=2, group=3, head_dim=8, dtype=jnp.float32):
    shapes = [
        (batch, queries, kv_heads * group, head_dim),
        (batch, kv_heads, slots, head_dim),
        (batch, kv_heads, slots, head_dim),
    ]
    q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    bias = rng.normal(size=(batch, kv_heads, group, queries, slots))
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    return q, k, v, jnp.asarray(bias, jnp.float32)


attend = jax.jit(slot_attention, static_argnums=(4, 5, 6))


def assert_partial(actual, expected, tolerance=3e-6):
    for actual_leaf, expected_leaf in zip(actual, expected, strict=True):
        np.testing.assert_allclose(actual_leaf, expected_leaf, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("group", [1, 3])
def test_slot_attention_is_softmax(rng, softcap, group):
    q, k, v, bias = problem(rng, group=group)
    actual = attend(q, k, v, bias, 0.5, softcap)
    assert_partial(actual, oracle.softmax_attention(q, k, v, bias, 0.5, softcap))


@pytest.mark.parametrize("slots", [10, 2100])  # the second is read in blocks without weights
def test_slot_attention_returns_the_softmax_weights(rng, slots):
    q, k, v, bias = problem(rng, queries=3, slots=slots)
    bias = bias.at[0, 0, 0, 0].set(-jnp.inf)  # a query that sees no slot
    actual, weights = attend(q, k, v, bias, 0.5, 1.5, True)
    assert_partial(actual, attend(q, k, v, bias, 0.5, 1.5))
    logits = np.einsum("btkgh,bksh->bkgts", np.reshape(q, (2, 3, 2, 3, 8)), k, dtype=np.float64)
    exponentials = np.exp(1.5 * np.tanh(logits * 0.5 / 1.5) + np.asarray(bias, np.float64))
    totals = exponentials.sum(axis=-1, keepdims=True)
    expected = exponentials / np.where(totals == 0, 1, totals)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-7)


def test_a_masked_bias_may_differ_by_kv_head(rng):
    spec = Spec(2, 8, 1.0, Alibi.of(4))
    visible = rng.random((3, 2, 5, 7)) < 0.5  # [B,K,T,S]
    queries = rng.integers(0, 2**32, (3, 5), np.uint32)
    keys = (queries[:, None, :1] - rng.integers(0, 50, (3, 2, 7))).astype(np.uint32)  # [B,K,S]
    bias = masked_bias(spec, jnp.asarray(visible), jnp.asarray(queries), jnp.asarray(keys), 2)
    distance = (queries[:, None, :, None] - keys[:, :, None]).astype(np.int32)
    slopes = np.asarray(spec.encoding.slopes).reshape(1, 2, 2, 1, 1)
    expected = np.where(visible[:, :, None], -slopes * distance[:, :, None], -np.inf)
    np.testing.assert_allclose(bias, expected, rtol=1e-6)
    # The same slots in all heads.
    of_all = map(jnp.asarray, (visible[:, 0], queries, keys[:, 0]))
    alike = masked_bias(spec, *of_all, 2)
    np.testing.assert_allclose(alike[:, :1], bias[:, :1], rtol=1e-6)


@pytest.mark.parametrize("slots", [2049, 3072])
@pytest.mark.parametrize("wide", [True, False])
def test_many_slots_are_read_in_blocks(rng, slots, wide):
    q, k, v, bias = problem(rng, batch=1, queries=2, slots=slots, kv_heads=1, group=2, head_dim=4)
    bias = bias.at[..., 1024:2048].set(-jnp.inf)  # a block that no query sees
    bias = bias if wide else bias[..., :1] * np.float32(0)
    assert_partial(attend(q, k, v, bias, 0.5), oracle.softmax_attention(q, k, v, bias, 0.5))


@pytest.mark.parametrize("like, slots", [((2, 2, 3, 3, 1), 10), ((2, 1, 1, 3, 1), 2560)])
def test_attention_by_head_equals_attention_at_once(rng, monkeypatch, slots, like):
    """The version for large logits on a CPU, head by head, has equal values and gradients."""
    q, k, v, bias = problem(rng, slots=slots)
    bias = None if like is None else bias[tuple(slice(0, n) for n in like[:4])]

    def loss(q, k, v):
        part = slot_attention(q, k, v, bias, 0.5)
        return jnp.sum(part.out**2) + jnp.sum(part.lse), part

    def run():  # compiles each time
        return jax.jit(jax.value_and_grad(lambda *a: loss(*a), (0, 1, 2), has_aux=True))(q, k, v)

    (_, together), gradients = run()
    monkeypatch.setattr(xla_cpu, "CACHED_LOGITS", 0)
    (_, apart), gradients_by_head = run()
    assert "platform_index" in str(jax.make_jaxpr(loss)(q, k, v))
    assert_partial(apart, together)
    for actual, expected in zip(gradients, gradients_by_head, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
    batched = jax.vmap(lambda q: slot_attention(q, k, v, bias, 0.5))(jnp.stack([q, 2 * q]))
    assert_partial([leaf[0] for leaf in batched], together)


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("filled", [0, 3, 512, 513, 1100])
@pytest.mark.parametrize("slots", [1500, 2048])
def test_slots_that_no_query_sees_change_no_bit(rng, storage, filled, slots):
    """Nor does a sequence beside it, which sees more slots."""
    q, k, v, bias = problem(rng, batch=3, queries=1, slots=slots, head_dim=16)
    seen = np.arange(slots) < np.array([filled, filled, slots])[:, None]
    bias = jnp.where(seen[:, None, None, None], bias, -jnp.inf)
    q, k, v = (x.astype("float32" if storage == "int8" else storage) for x in (q, k, v))
    if storage == "int8":
        k, v = map(rows.quantise, (k, v))
    expected = oracle.softmax_attention(q, rows.dequantise(k), rows.dequantise(v), bias, 0.5)
    cases = [(3, slots), (2, slots)]
    cases += [(2, size) for size in (1024, 512) if slots == 2048 and size >= filled]
    attended = []
    for batch, size in cases:
        arrays = q[:batch], *(x[:batch, :, :size] for x in jax.tree.leaves((k, v)))
        arrays = jax.tree.unflatten(jax.tree.structure((q, k, v)), arrays)
        attended.append(attend(*arrays, bias[:batch, ..., :size], 0.5))
        tolerance = 2e-2 if storage == "bfloat16" else 1e-5
        assert_partial(attended[-1], [x[:batch] for x in expected], tolerance)
    for out, lse in attended[1:]:
        np.testing.assert_array_equal(out, attended[0].out[:2])
        np.testing.assert_array_equal(lse, attended[0].lse[:2])


def test_a_bias_may_be_a_function_of_the_block(rng):
    q, k, v, bias = problem(rng, slots=2560)
    sizes = []

    def block_bias(start, size):
        sizes.append(size)
        return jax.lax.dynamic_slice_in_dim(bias, start, size, 4)

    assert_partial(slot_attention(q, k, v, block_bias, 0.5), slot_attention(q, k, v, bias, 0.5))
    assert set(sizes) == {1024, 512}


def test_without_visible_keys_out_is_0_and_lse_is_minus_infinity(rng):
    q, k, v, bias = problem(rng)
    bias = bias.at[0].set(-jnp.inf)
    empty = attend(q, k, v, bias, 1.0)
    assert not np.asarray(empty.out)[0].any() and (np.asarray(empty.lse)[0] == -np.inf).all()
    assert_partial(empty, oracle.softmax_attention(q, k, v, bias))
    none = attend(q, k[:, :, :0], v[:, :, :0], bias[..., :0], 1.0)
    assert not np.asarray(none.out).any() and (np.asarray(none.lse) == -np.inf).all()
    for actual, expected in zip(merge(none, empty, none), empty, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_parts_merge_to_the_whole(rng):
    q, k, v, bias = problem(rng)
    cuts = [(0, 3), (3, 4), (4, 4), (4, 10)]
    parts = [slot_attention(q, k[:, :, a:b], v[:, :, a:b], bias[..., a:b], 1.0) for a, b in cuts]
    expected = attend(q, k, v, bias, 1.0)
    assert_partial(merge(*parts), expected, 1e-6)
    assert_partial(merge(*reversed(parts)), expected, 1e-6)
    assert_partial(merge(merge(parts[0], parts[1]), merge(parts[2], parts[3])), expected, 1e-6)
    assert_partial(merge(parts[0], merge(parts[1], merge(parts[2], parts[3]))), expected, 1e-6)
    assert merge(expected) is expected


def test_sink_logit_is_a_sigmoid_gate(rng):
    q, k, v, bias = problem(rng)
    logits = jnp.asarray(rng.normal(size=6), jnp.float32)
    plain = attend(q, k, v, bias, 1.0)
    gated = merge(plain, sink_logit(logits, plain))
    lse = np.asarray(plain.lse, np.float64)
    gate = 1 / (1 + np.exp(np.asarray(logits) - lse))
    np.testing.assert_allclose(gated.out, np.asarray(plain.out) * gate[..., None], atol=1e-6)
    np.testing.assert_allclose(gated.lse, np.logaddexp(lse, logits), atol=1e-6)
    zero = merge(plain, sink_logit(jnp.zeros(6), plain))
    np.testing.assert_allclose(
        zero.out, np.asarray(plain.out) * (np.exp(lse) / (1 + np.exp(lse)))[..., None], atol=1e-6
    )


def test_gradients_are_those_of_the_formula(rng):
    q, k, v, bias = problem(rng, batch=1, slots=6)
    bias = bias.at[:, :, :, 0].set(-jnp.inf)  # a query that sees nothing
    direction = rng.normal(size=q.shape)

    def loss(q, k, v):
        parts = [
            slot_attention(q, k[:, :, a:b], v[:, :, a:b], bias[..., a:b], 0.5, 2.0)
            for a, b in ((0, 2), (2, 6))
        ]
        return jnp.sum(merge(*parts).out * jnp.asarray(direction, jnp.float32))

    def value(*args):
        return (oracle.softmax_attention(*args, bias, 0.5, 2.0)[0] * direction).sum()

    args = [np.asarray(x, np.float64) for x in (q, k, v)]
    for i, grad in enumerate(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)):
        along = rng.normal(size=args[i].shape)
        up, down = ([*args[:i], args[i] + s * 1e-5 * along, *args[i + 1 :]] for s in (1, -1))
        slope = (value(*up) - value(*down)) / 2e-5
        np.testing.assert_allclose((np.asarray(grad) * along).sum(), slope, rtol=1e-4)


@pytest.mark.parametrize("tokens", [5, 1280])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("encoding", [NoPosition(), Alibi((0.5, 0.1))], ids=["none", "alibi"])
def test_local_attention_equals_numpy(rng, tokens, window, encoding):
    spec = Spec(kv_heads=1, head_dim=4, scale=0.5, encoding=encoding, group=2)
    new = chunk(spec, tokens, rng=rng)
    hidden = jnp.asarray(rng.random((1, tokens)) < 0.2)
    actual = jax.jit(lambda c, h: local_attention(spec, c, window, h))(new, hidden)
    distance = np.arange(tokens)[:, None] - np.arange(tokens)[None]
    seen = (distance >= 0) & ~np.asarray(hidden)
    if window is not None:
        seen &= distance < window
    bias = np.where(seen, 0.0, -np.inf)[None, None, None]
    if isinstance(encoding, Alibi):
        bias = bias - np.reshape(encoding.slopes, (1, 1, 2, 1, 1)) * distance
    k, v = (np.asarray(x).transpose(0, 2, 1, 3) for x in (new.k, new.v))
    assert_partial(actual, oracle.softmax_attention(new.q, k, v, bias, 0.5))


def test_memory_of_local_attention_is_linear_in_the_chunk():
    spec = Spec(kv_heads=1, head_dim=4, scale=0.5, encoding=NoPosition(), group=2)

    def temporary(tokens):
        shapes = jax.eval_shape(lambda: chunk(spec, tokens))
        compiled = jax.jit(lambda chunk: local_attention(spec, chunk)).lower(shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(4096) / temporary(2048) < 2.6


def test_an_empty_partial_is_neutral_in_gradients(rng):
    q, k, v, bias = problem(rng)
    nothing = Partial(jnp.zeros(q.shape), jnp.full(q.shape[:3], -jnp.inf))

    def loss(q, *parts):
        return jnp.sum(merge(slot_attention(q, k, v, bias, 1.0), *parts).out[..., 0])

    gradient = jax.jit(jax.grad(loss))
    np.testing.assert_allclose(gradient(q, nothing), gradient(q), atol=1e-6)
