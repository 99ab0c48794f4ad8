"""Sampled attention: outputs equal numpy, gradients equal those of a masked softmax.

The kernels run on their hardware where the tests have it, and are interpreted elsewhere. They are
also compiled for TPU and GPU ahead of time, without the hardware.
"""

from __future__ import annotations

import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from jaxkv.evals.lib.ahead import abstract_h100, reports_of
from jaxkv.evals.magicpig import inclusion
from jaxkv.pallas_kernels import host_memory
from jaxkv.pallas_kernels.sampled_attention import (
    Angles,
    LogitSettings,
    dense,
    gpu,
    reference,
    sampled_attention,
    shapes,
    tpu,
)
from jaxkv.policies.magicpig.lsh import Hashing
from tests.core.pallas_kernels.test_sign_walk import interpreted

ON = {
    "xla": reference.attend,
    "dense": dense.attend,
    "gathered": reference.gathered,
    "gpu": partial(gpu.attend, interpret=interpreted("gpu")),
    "tpu": partial(tpu.attend, interpret=interpreted("tpu")),
}
ON = {name: jax.jit(attend, static_argnums=0) for name, attend in ON.items()}
CHECKED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
DTYPES = "float32", "bfloat16"
WEIGHTS = "none", "log", "angles"


def settings_of(weight, softcap=None):
    return LogitSettings(0.5, softcap, Hashing() if weight == "angles" else None)


def plain(settings, q, k, v, slots, count, weight):
    """The definition in numpy, head by head, in float64."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    slots, count = np.asarray(slots), np.asarray(count)
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for b, n in np.argwhere(count > 0):
        kv, at, sample = n // (q.shape[1] // k.shape[1]), slots[b, n], slice(count[b, n])
        product = k[b, kv, at] @ q[b, n]
        logits = settings.scale * product
        if settings.softcap is not None:
            logits = settings.softcap * np.tanh(logits / settings.softcap)
        if isinstance(weight, Angles):
            norms, shift, length = (np.asarray(a, np.float64) for a in weight)
            size = norms[b, kv, at] * length[b, n]
            c = np.divide(product - shift[b, n], size, out=np.zeros_like(size), where=size > 0)
            logits -= inclusion.log_u(
                c.clip(-1, 1), settings.weight_fn.bits, settings.weight_fn.tables
            )
        elif weight is not None:
            logits += np.asarray(weight, np.float64)[b, n]
        top = logits[sample].max()
        share = np.exp(logits[sample] - top)
        out[b, n] = share @ v[b, kv, at[sample]] / share.sum()
        lse[b, n] = top + np.log(share.sum())
    return out, lse


def check(actual, settings, args, atol):
    out, lse = plain(settings, *args)
    np.testing.assert_allclose(actual.out, out, rtol=0, atol=atol)
    np.testing.assert_allclose(actual.lse, lse, rtol=0, atol=atol)
    assert actual.out.dtype == actual.lse.dtype == jnp.float32


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize(
    "name, dtype, weight, softcap",
    [
        ("alone", "float32", "none", None),
        ("threes", "float32", "angles", 2.0),
        ("tiles", "float32", "log", 2.0),
        ("wide", "float32", "log", None),
        ("tiles", "bfloat16", "angles", None),
        *(
            (name, DTYPES[(i + j) % 2], weight, (None, 2.0)[(i + j // 2) % 2])
            for i, name in enumerate(shapes.SMALL)
            for j, weight in enumerate(WEIGHTS)
        ),
    ],
)
def test_every_implementation_is_the_softmax(name, dtype, weight, softcap, on):
    shape = shapes.SMALL[name]._replace(dtype=dtype)
    args = shapes.inputs(shape, weight)
    if on == "tpu" and name != "tiles":
        assert not tpu.supports(args[1], shape.sample)
        return
    settings = settings_of(weight, softcap)
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    check(ON[on](settings, *args), settings, args, tolerance)


@pytest.mark.parametrize("on", ON)
def test_entries_after_the_count_change_no_bit(on):
    shape, settings = shapes.SMALL["tiles"], settings_of("log")
    q, k, v, slots, count, weight = shapes.inputs(shape, "log")
    after = ~reference.in_sample(slots, count)
    changed = jnp.where(after, slots[..., ::-1], slots), count, jnp.where(after, 50.0, weight)
    expected = ON[on](settings, q, k, v, slots, count, weight)
    check_same(expected, ON[on](settings, q, k, v, *changed))


def check_same(expected, actual):
    jax.tree.map(np.testing.assert_array_equal, expected, actual)


@pytest.mark.parametrize("weight", ["log", "angles"])
def test_sequences_are_independent_bit_for_bit(weight):
    """A sequence gives the same bits beside larger samples, and on a CPU in any batch.

    On a GPU the program of another batch size adds up the parts in another order.
    """
    shape = shapes.SMALL["threes"]._replace(slots=1165, sample=700, batch=3)
    attend = jax.jit(partial(sampled_attention, settings=settings_of(weight)))
    args = shapes.inputs(shape, weight)
    expected = attend(*args)
    fuller = args[4].at[1:].set(np.int32(700))
    check_same(
        *(jax.tree.map(lambda a: a[0], x) for x in (expected, attend(*args[:4], fuller, args[5])))
    )
    for b in range(3):
        alone = attend(*jax.tree.map(lambda a: a[b : b + 1], args))  # noqa: B023
        row = jax.tree.map(lambda a: a[b : b + 1], expected)  # noqa: B023
        if jax.default_backend() == "gpu":
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), row, alone)
        else:
            check_same(row, alone)


def test_slots_and_counts_out_of_bounds_are_clipped():
    q, k, v, slots, count, _ = shapes.inputs(shapes.SMALL["alone"])
    attend = jax.jit(partial(sampled_attention, q, k, v, settings=settings_of("none")))
    wild = jnp.where(reference.in_sample(slots, count), slots, np.int32(-(2**30)))
    check_same(attend(slots, count), attend(wild, count))
    check_same(attend(slots, count), attend(jnp.where(wild < 0, np.int32(2**30), wild), count))
    full = jnp.full_like(count, slots.shape[-1])
    check_same(attend(slots, full), attend(slots, full + 5))
    check_same(attend(slots, full * 0), attend(slots, full * 0 - 5))


@pytest.mark.parametrize("on", ON)
def test_empty_samples_give_out_0_and_lse_minus_infinity(on):
    """Without slots, and with weights of -inf. Zero queries and keys equal numpy."""
    shape = shapes.SMALL["tiles"]
    q, k, v, slots, count, weight = shapes.inputs(shape, "log")
    for none in ((slots, count * 0, weight), (slots, count, jnp.full_like(weight, -jnp.inf))):
        empty = ON[on](settings_of("log"), q, k, v, *none)
        assert np.all(np.asarray(empty.out) == 0) and np.all(np.asarray(empty.lse) == -np.inf)
    angles = shapes.inputs(shape, "angles")[5]
    angles = angles._replace(norms=angles.norms.at[:, :, ::3].set(0), length=angles.length * 0)
    args, settings = (q, k, v, slots, count, angles), settings_of("angles")
    check(ON[on](settings, *args), settings, args, 1e-5)


def test_dense_counts_repeated_slots():
    q, k, v, slots, count, weight = shapes.inputs(shapes.SMALL["alone"], "log")
    weights = jnp.zeros((1, 2, 65), jnp.float32).at[*reference.cache_index(slots, 2)].set(weight)
    slots = slots // 2
    weight = weights[*reference.cache_index(slots, 2)]
    settings = settings_of("log")
    args = q, k, v, slots, jnp.full_like(count, 33), weight
    check(dense.attend(settings, *args), settings, args, 1e-5)


@pytest.mark.parametrize("implementation", [None, "xla", "dense"])
@pytest.mark.parametrize("weight", ["log", "angles"])
def test_gradients_are_those_of_a_masked_softmax(weight, implementation):
    args = shapes.inputs(shapes.SMALL["alone"]._replace(batch=2, heads=4), weight)
    slots, count = args[3:5]
    settings = settings_of(weight, 2.0)

    def loss(attend, q, k, v, log_weight):
        out, lse = attend(q, k, v, log_weight)
        lse = jnp.where(count == 0, np.float32(0), lse)  # the cosine of -inf would be NaN
        return jnp.sum(jnp.sin(3 * out)) + jnp.sum(jnp.cos(lse))

    def sampled(q, k, v, log_weight):
        return sampled_attention(
            q, k, v, slots, count, log_weight, settings=settings, implementation=implementation
        )

    def masked(q, k, v, log_weight):
        """Attention to all keys, with a bias of -inf outside the sample."""
        product = jnp.einsum("bnh,bnsh->bns", q, jnp.repeat(k, 2, 1), precision="highest")
        if weight == "angles":
            a = Angles(*(x[..., None] for x in log_weight[1:]), None)
            a = Angles(jnp.repeat(log_weight.norms, 2, 1), a.norms, a.shift)
            log_weight = jax.lax.stop_gradient(settings.weight_fn(reference.cosine(product, a)))
            log_weight = log_weight[np.ogrid[:2, :4, :1][0], np.ogrid[:2, :4, :1][1], slots]
        at = reference.cache_index(slots, 4)
        log_weight = jnp.where(reference.in_sample(slots, count), log_weight, -jnp.inf)
        bias = jnp.full(product.shape, -jnp.inf).at[at].set(log_weight)
        logits = 2 * jnp.tanh(product * np.float32(0.5) / 2) + bias
        empty = (count == 0)[..., None]
        share = jax.nn.softmax(jnp.where(empty, np.float32(0), logits), axis=-1)
        share = jnp.where(empty, np.float32(0), share)
        out = jnp.einsum("bns,bnsh->bnh", share, jnp.repeat(v, 2, 1), precision="highest")
        return out, jax.nn.logsumexp(jnp.where(empty, np.float32(0), logits), axis=-1)

    floats = (*args[:3], args[5])
    gradient = jax.jit(jax.grad(loss, (1, 2, 3, 4)), static_argnums=0)
    expected, actual = gradient(masked, *floats), gradient(sampled, *floats)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=5e-5)
    jax.tree.map(close, actual[:3], expected[:3])
    if weight == "log":
        close(actual[3], jnp.where(reference.in_sample(slots, count), expected[3], np.float32(0)))
    else:
        assert not any(np.any(a) for a in actual[3]), "a sampling probability has no gradient"


def test_unsupported_implementations_are_refused_by_name():
    args = shapes.inputs(shapes.SMALL["alone"])
    attend = partial(sampled_attention, *args, settings=settings_of("none"))
    with pytest.raises(
        ValueError, match=r"33 of 65 slots of head dim 16, float32, is supported by xla, d"
    ):
        attend(implementation="pallas_tpu")
    with pytest.raises(ValueError, match=r"got 'cuda'; leave it out"):
        attend(implementation="cuda")
    with pytest.raises(ValueError, match=r"go together"):
        sampled_attention(*args, settings=settings_of("angles"))
    if jax.default_backend() == "cpu":
        check_same(attend(), attend(implementation="xla"))


def test_equal_settings_are_compiled_once():
    args = shapes.inputs(shapes.SMALL["alone"], "angles")
    attend = jax.jit(sampled_attention, static_argnames=("settings", "implementation"))
    for _ in range(2):
        attend(*args, settings=LogitSettings(0.5, None, Hashing()))
    assert attend._cache_size() == 1


def test_when_dense_attention_is_cheaper_on_a_tpu():
    """MagicPIG's sample size (its section 6), with four query heads per KV head and with one."""
    cheaper = partial(tpu.dense_is_cheaper, slots=131_072, head_dim=128)
    assert cheaper(2621, 4, itemsize=2) and cheaper(2621, 4, itemsize=4)
    assert not cheaper(2621, 1, itemsize=2) and not cheaper(2621, 1, itemsize=4)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")  # jax 0.12
@pytest.mark.parametrize("weight", ["none", "log", "angles"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_is_lowered_for_cuda(dtype, weight):
    shape = shapes.LARGEST._replace(dtype=dtype)
    with abstract_h100():
        for implementation in ("pallas_gpu", None):
            function, args = call(shape, weight, implementation)
            text = function.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
            assert text.count("__gpu$xla.gpu.triton") == 2  # attention to parts, and their merge
            assert not has_gathered_array(text, shape)


def call(shape, weight, implementation, place=None):
    """The jitted public function and the shapes of its arguments."""
    function = partial(
        sampled_attention, settings=settings_of(weight), implementation=implementation
    )
    return jax.jit(function), structs(shape, weight, place)


def structs(
    shape: shapes.BenchShape, weight: str = "none", sharding: jax.sharding.Sharding | None = None
) -> tuple:
    """The shapes and dtypes of `shapes.inputs`."""
    batch, heads, kv_heads, slots, head_dim, sample, dtype = shape

    def struct(*size: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, dtype, sharding=sharding)

    cache = struct(batch, kv_heads, slots, head_dim, dtype=dtype)
    norms = struct(batch, heads)
    weights = {
        "none": None,
        "log": struct(batch, heads, sample),
        "angles": Angles(struct(batch, kv_heads, slots), norms, norms),
    }
    chosen, count = struct(batch, heads, sample, dtype="int32"), struct(batch, heads, dtype="int32")
    return struct(batch, heads, head_dim, dtype=dtype), cache, cache, chosen, count, weights[weight]


def has_gathered_array(text, shape):
    """Whether a program has an array as large as all gathered slots."""
    sizes = (
        re.findall(r"\d+(?=x)", dimensions)
        for dimensions in re.findall(r"tensor<([\dx]+x)[a-z]", text)
    )
    gathered = shape.batch * shape.heads * shape.sample * shape.head_dim
    return any(np.prod([int(x) for x in size]) == gathered for size in sizes)


def test_only_blocks_of_slots_are_gathered():
    args = structs(shapes.LARGEST)
    for function, expected in ((reference.attend, False), (reference.gathered, True)):
        text = jax.jit(partial(function, settings_of("none"))).lower(*args).as_text()
        assert has_gathered_array(text, shapes.LARGEST) == expected


@pytest.mark.slow
@pytest.mark.parametrize("dtype, weight", [("float32", "log"), ("bfloat16", "angles")])
def test_the_tpu_kernel_has_no_race_and_no_uninitialized_read(capfd, dtype, weight):
    shape = shapes.SMALL["tiles"]._replace(dtype=dtype, slots=400, sample=300)
    args = shapes.inputs(shape, weight)
    settings = settings_of(weight)
    actual = tpu.attend(settings, *args, interpret=CHECKED)
    check(actual, settings, args, 1e-5 if dtype == "float32" else 1e-2)
    assert "RACE" not in capfd.readouterr().out, "jax only prints races"


def test_only_xla_reads_host_memory():
    shape = shapes.SMALL["tiles"]
    args = list(shapes.inputs(shape, "log"))
    call = partial(sampled_attention, settings=settings_of("log"))
    expected = call(*args, implementation="xla")
    args[1:3] = map(host_memory.to_host, args[1:3])
    actual = call(*args, implementation="xla").out
    np.testing.assert_allclose(actual, expected.out, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="is supported by xla, got 'dense'"):
        call(*args, implementation="dense")


@pytest.fixture(scope="module")
def reports():
    return reports_of("tests.core.pallas_kernels.test_sampled_attention")


@pytest.mark.slow
@pytest.mark.tpu_check
def test_a_tpu_compiles_the_largest_sample_without_a_gathered_array(reports):
    assert len(reports) == 2 * len(DTYPES) * len(WEIGHTS)
    for report in reports:
        assert report["kernels"] == 1 and not report["gathered"], report
        assert report["temporary"] < report["gathered bytes"] / 8, report


def main() -> None:
    """Print one line of JSON per TPU generation, dtype and weight."""
    for kind in ("v5e:2x2", "v6e:2x2"):
        device = topologies.get_topology_desc(platform="tpu", topology_name=kind).devices[0]
        for dtype in DTYPES:
            for weight in WEIGHTS:
                shape = shapes.LARGEST._replace(dtype=dtype)
                function, args = call(shape, weight, "pallas_tpu", SingleDeviceSharding(device))
                lowered = function.lower(*args)
                text = lowered.as_text()
                gathered = shape.heads * shape.sample * shape.head_dim
                report = {
                    "kind": kind,
                    "dtype": dtype,
                    "weight": weight,
                    "kernels": text.count("@tpu_custom_call"),
                    "gathered": has_gathered_array(text, shape),
                    "gathered bytes": gathered * jnp.dtype(dtype).itemsize,
                    "temporary": lowered.compile().memory_analysis().temp_size_in_bytes,
                }
                print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
