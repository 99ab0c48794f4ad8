"""Flash attention: outputs equal numpy, and gradients those of a softmax in plain JAX.

The kernel runs on a GPU where the tests have it, and is interpreted elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.evals.lib.ahead import abstract_h100, reports_of, v5e
from jaxkv.pallas_kernels.flash_attention import KeySet, flash_attention, gpu, reference, tpu
from tests.core.pallas_kernels.test_sign_walk import interpreted

ON = {
    "xla": reference.attend,
    "gpu": partial(gpu.attend, interpret=interpreted("gpu")),
    "tpu": partial(tpu.attend, interpret=interpreted("tpu")),
}
KERNELS = {"gpu": gpu, "tpu": tpu}
DTYPES = {"float32": (0, 2e-6), "bfloat16": (2**-8, 6e-3)}  # relative and absolute tolerance
BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 6, 2, 16


def key_set(rng, queries, slots, kind, dtype="float32"):
    """A set as a cache has it. kind: ring, which has wrapped and has a window; chunk, with padding
    anywhere; sinks; or empty."""
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    keys = array(BATCH, KV_HEADS, slots, HEAD_DIM), array(BATCH, KV_HEADS, slots, HEAD_DIM)
    end = np.full((BATCH, queries), slots)
    first = np.array([2**32 - 7, 500], np.uint32)  # the position of the first query wraps
    positions = first[:, None] + np.arange(queries, dtype=np.uint32)
    keys = KeySet(array(BATCH, queries, HEADS, HEAD_DIM), *keys, end, query_positions=positions)
    if kind == "empty":
        return replace(keys, end=0 * end)
    if kind == "chunk":
        valid = rng.random((BATCH, slots)) < 0.8
        weight = np.where(valid, 0, -np.inf).astype("f4")[:, None]
        end = np.where(valid[:, :queries], np.arange(1, queries + 1), 0)
        return replace(keys, end=end, log_weight=weight, key_positions=positions, window=9)
    if kind == "ring":
        back = np.stack([rng.permutation(slots) for _ in range(BATCH)]).astype(np.uint32)
        return replace(keys, key_positions=first[:, None] - 1 - back, first=3, window=slots - 2)
    return replace(keys, log_weight=rng.normal(size=(BATCH, KV_HEADS, slots)).astype("f4"))


def plain(sets, scale, softcap):
    """The definition in numpy, query by query, in float64."""
    batch, queries, heads, _ = sets[0].q.shape
    out, lse = np.zeros(sets[0].q.shape), np.full((batch, queries, heads), -np.inf)
    for b, t, n in np.ndindex(batch, queries, heads):
        logits, values = [], []
        for keys in sets:
            q, k, v = (np.asarray(a, np.float64) for a in (keys.q, keys.k, keys.v))
            head = n // (heads // k.shape[1])
            for slot in range(keys.first, keys.end[b, t]):
                if keys.window is not None:
                    now, then = keys.query_positions[b, t], keys.key_positions[b, slot]
                    if not 0 <= (int(now) - int(then) + 2**31) % 2**32 - 2**31 < keys.window:
                        continue
                logit = scale * (k[b, head, slot] @ q[b, t, n])
                if softcap is not None:
                    logit = softcap * np.tanh(logit / softcap)
                weight = 0.0
                if keys.log_weight is not None:
                    weight = np.broadcast_to(keys.log_weight, k.shape[:3])[b, head, slot]
                if weight > -np.inf:
                    logits.append(logit + weight)
                    values.append(v[b, head, slot])
        if logits:
            top = max(logits)
            share = np.exp(np.array(logits) - top)
            out[b, t, n], lse[b, t, n] = share @ values / share.sum(), top + np.log(share.sum())
    return out, lse


CASES = {
    "one set": (5, [(5, "chunk")]),
    "a dense cache": (33, [(70, "sinks"), (33, "chunk")]),
    "an empty cache": (20, [(64, "empty"), (20, "chunk")]),
    "a wrapped ring": (70, [(64, "ring"), (70, "chunk"), (4, "sinks"), (70, "empty")]),
    "nothing in view": (3, [(8, "empty")]),
    "a token": (1, [(150, "ring"), (4, "sinks"), (40, "sinks"), (1, "chunk")]),
}


def sets_of(name, dtype="float32"):
    rng = np.random.default_rng(7)
    queries, sets = CASES[name]
    return [key_set(rng, queries, slots, kind, dtype) for slots, kind in sets]


def on_device(sets):
    return jax.tree.map(jnp.asarray, sets)


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", CASES)
def test_every_implementation_is_the_softmax(name, softcap, dtype, on):
    sets = sets_of(name, dtype)
    on_hardware = on in KERNELS and not interpreted(on)
    if on_hardware and (reason := KERNELS[on].refusal(HEAD_DIM, jnp.dtype(dtype))):
        pytest.skip(reason)
    attended = jax.jit(ON[on], static_argnums=(1, 2))(on_device(sets), 0.3, softcap)
    out, lse = plain(sets, 0.3, softcap)
    for actual, expected in ((attended.out, out), (attended.lse, lse)):
        np.testing.assert_allclose(actual, expected, *DTYPES[dtype])
    assert attended.out.dtype == attended.lse.dtype == jnp.float32


@pytest.mark.parametrize("name", CASES)
def test_blocks_of_any_size_give_the_softmax(name, monkeypatch):
    """The last block of keys is cut off, and blocks beyond all ends are skipped."""
    monkeypatch.setattr(tpu, "QUERIES", 16)
    monkeypatch.setattr(tpu, "KEYS", 16)
    monkeypatch.setattr(gpu, "QUERIES", 16)
    monkeypatch.setattr(gpu, "KEYS", 16)
    sets = sets_of(name)
    out, lse = plain(sets, 0.3, None)
    for kernel in (gpu, tpu):
        attended = kernel.attend(on_device(sets), 0.3, None, interpret=True)
        np.testing.assert_allclose(attended.out, out, *DTYPES["float32"])
        np.testing.assert_allclose(attended.lse, lse, *DTYPES["float32"])


@pytest.mark.parametrize("on", ON)
def test_hidden_keys_and_keys_beyond_the_end_change_no_bit(on):
    keys = key_set(np.random.default_rng(3), 24, 24, "chunk")
    keys = replace(keys, end=np.minimum(keys.end, 17))
    hidden = (keys.log_weight[:, 0] == -np.inf) | (np.arange(24) >= 17)
    change = lambda rows: jnp.where(hidden[:, None, :, None], 50.0, rows)
    expected = ON[on](on_device([keys]), 0.3, None)
    changed = replace(keys, k=change(keys.k), v=change(keys.v))
    jax.tree.map(np.testing.assert_array_equal, expected, ON[on](on_device([changed]), 0.3, None))


def test_gradients_are_those_of_a_softmax():
    """Of all sets at once, against attention to all keys side by side."""
    sets = on_device([replace(keys, window=None) for keys in sets_of("a dense cache")])
    sets = [replace(keys, query_positions=None, key_positions=None) for keys in sets]
    side = np.random.default_rng(1).normal(size=sets[0].q.shape).astype("f4")

    def loss(attend, arrays):
        attended = attend([replace(a, q=q, k=k, v=v) for a, (q, k, v) in zip(sets, arrays)])  # noqa: B905
        lse = jnp.where(attended.lse == -jnp.inf, 0.0, attended.lse)
        return jnp.sum(attended.out * side) + jnp.sum(jnp.sin(lse))

    def softmax(sets):
        repeat = lambda rows: jnp.repeat(rows, HEADS // KV_HEADS, axis=1)
        logits, values = [], []
        for keys in sets:
            weight = keys.log_weight
            weight = jnp.zeros((BATCH, 1, keys.k.shape[2])) if weight is None else weight
            weight = jnp.repeat(weight, HEADS // weight.shape[1], axis=1)[:, :, None]
            product = jnp.einsum("btnh,bnsh->bnts", keys.q, repeat(keys.k), precision="highest")
            seen = jnp.arange(keys.k.shape[2])[None, None] < keys.end[..., None]
            seen = seen[:, None] & (weight > -jnp.inf)
            weight = jnp.where(weight == -jnp.inf, 0.0, weight)
            logits.append(jnp.where(seen, 0.3 * product + weight, -jnp.inf))
            values.append(repeat(keys.v))
        logits = jnp.concatenate(logits, axis=-1)
        empty = jnp.all(logits == -jnp.inf, axis=-1, keepdims=True)
        logits = jnp.where(empty, 0.0, logits)
        share = jnp.where(empty, 0.0, jax.nn.softmax(logits, axis=-1))
        values = jnp.concatenate(values, axis=2)
        out = jnp.einsum("bnts,bnsh->btnh", share, values, precision="highest")
        lse = jnp.where(empty[..., 0], -jnp.inf, jax.nn.logsumexp(logits, axis=-1))
        return reference.AttentionOutput(out, lse.swapaxes(1, 2))

    arrays = [(keys.q, keys.k, keys.v) for keys in sets]
    expected = jax.jit(jax.grad(partial(loss, softmax)))(arrays)
    actual = jax.jit(jax.grad(partial(loss, partial(flash_attention, scale=0.3))))(arrays)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=2e-5), actual, expected)


@pytest.mark.parametrize(
    "name, dtype, reason",
    [("pallas_gpu", "float32", "the dtype is float32, not bfloat16 or float16"),
     ("pallas_tpu", "bfloat16", "the head dim is 16, not 64, 128, 256"),
     ("cudnn", "bfloat16", "the names are xla, pallas_tpu, pallas_gpu")],
)  # fmt: skip
def test_unsupported_implementations_are_refused_by_name(name, dtype, reason):
    sets = on_device(sets_of("one set", dtype))
    with pytest.raises(ValueError, match=f"cannot be computed by '{name}': {reason}; leave it out"):
        flash_attention(sets, 0.3, implementation=name)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")  # jax 0.12
def test_the_kernel_is_lowered_for_cuda_and_no_mask_lies_in_memory():
    sets = jax.eval_shape(lambda: on_device(sets_of("a wrapped ring", "bfloat16")))
    attend = jax.jit(partial(flash_attention, scale=0.3, implementation="pallas_gpu"))
    with abstract_h100():
        text = attend.trace(sets).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 1
    assert "70x64x" not in text and "70x70x" not in text and "128x64x" not in text


# Tokens, slots, head dim: more slots than a block and odd numbers, one slot, all head dims.
COMPILED = [(1024, 1024, 64), (70, 300, 64), (33, 37, 128), (1024, 1300, 256), (1, 1, 64)]


@pytest.mark.tpu_check
def test_the_kernel_is_compiled_for_a_tpu():
    reports = reports_of("tests.core.pallas_kernels.test_flash_attention")
    assert [report["shape"] for report in reports] == [list(shape) for shape in COMPILED]
    assert all(report["kernels"] == 3 for report in reports), "one for each set"


def compile_for_tpu() -> None:
    """Compile `tpu.attend` for a v5e, and print a line of JSON per shape."""
    place = jax.sharding.SingleDeviceSharding(v5e())
    struct = lambda *size, dtype="bfloat16": jax.ShapeDtypeStruct(size, dtype, sharding=place)
    for tokens, slots, head_dim in COMPILED:
        rows = [struct(1, 2, slots, head_dim)] * 2
        queries = struct(1, tokens, 4, head_dim), *rows, struct(1, tokens, dtype="int32")
        positions = struct(1, tokens, dtype="uint32"), struct(1, slots, dtype="uint32")
        keys = KeySet(*queries)
        weight = struct(1, 2, slots, dtype="float32")
        window = {"query_positions": positions[0], "key_positions": positions[1], "window": 9}
        sets = [keys, replace(keys, log_weight=weight), replace(keys, first=1, **window)]
        attend = jax.jit(partial(tpu.attend, scale=0.3, softcap=None))
        text = attend.lower(sets).compile().as_text()
        kernels = text.count('custom_call_target="tpu_custom_call"')
        print(json.dumps({"shape": (tokens, slots, head_dim), "kernels": kernels}), flush=True)


if __name__ == "__main__":
    compile_for_tpu()
