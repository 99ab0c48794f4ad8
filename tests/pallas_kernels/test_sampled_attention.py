"""Attention over a sample: every implementation against plain numpy, its gradient against that of a
masked softmax, and what the kernels compile to for hardware that is not here."""

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

from jaxkv.evals.magicpig import inclusion
from jaxkv.pallas_kernels import host
from jaxkv.pallas_kernels.sampled_attention import (
    Angles,
    How,
    dense,
    gpu,
    reference,
    sampled_attention,
    shapes,
    tpu,
)
from jaxkv.policies.magicpig.lsh import Hashing
from tests.ahead import reports_of
from tests.pallas_kernels.test_sign_walk import an_h100_in_mind
from tests.seldom import seldom

ON = {
    "xla": reference.attend,
    "dense": dense.attend,
    "gathered": reference.gathered,
    "gpu": partial(gpu.attend, interpret=True),
    "tpu": partial(tpu.attend, interpret=True),
}
ON = {name: jax.jit(attend, static_argnums=0) for name, attend in ON.items()}
CHECKED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
DTYPES = "float32", "bfloat16"
WEIGHTS = "none", "log", "angles"


def how(weight, softcap=None):
    return How(0.5, softcap, Hashing() if weight == "angles" else None)


def plain(how, q, k, v, rows, count, weight):
    """The softmax of the definition in numpy, a head after another, in float64."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    rows, count = np.asarray(rows), np.asarray(count)
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for b, n in np.argwhere(count > 0):
        kv, at, there = n // (q.shape[1] // k.shape[1]), rows[b, n], slice(count[b, n])
        product = k[b, kv, at] @ q[b, n]
        logits = how.scale * product
        if how.softcap is not None:
            logits = how.softcap * np.tanh(logits / how.softcap)
        if isinstance(weight, Angles):
            norms, shift, length = (np.asarray(a, np.float64) for a in weight)
            size = norms[b, kv, at] * length[b, n]
            c = np.divide(product - shift[b, n], size, out=np.zeros_like(size), where=size > 0)
            logits -= inclusion.log_u(c.clip(-1, 1), how.weigh.bits, how.weigh.tables)
        elif weight is not None:
            logits += np.asarray(weight, np.float64)[b, n]
        top = logits[there].max()
        share = np.exp(logits[there] - top)
        out[b, n] = share @ v[b, kv, at[there]] / share.sum()
        lse[b, n] = top + np.log(share.sum())
    return out, lse


def agrees(found, how, given, atol):
    out, lse = plain(how, *given)
    np.testing.assert_allclose(found.out, out, rtol=0, atol=atol)
    np.testing.assert_allclose(found.lse, lse, rtol=0, atol=atol)
    assert found.out.dtype == found.lse.dtype == jnp.float32


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize(
    "name, dtype, weight, softcap",
    [
        ("alone", "float32", "none", None),
        ("threes", "float32", "angles", 2.0),
        ("tiles", "float32", "log", 2.0),
        seldom("wide", "float32", "log", None),
        seldom("tiles", "bfloat16", "angles", None),
        *(
            seldom(name, DTYPES[(i + j) % 2], weight, (None, 2.0)[(i + j // 2) % 2])
            for i, name in enumerate(shapes.SMALL)
            for j, weight in enumerate(WEIGHTS)
        ),
    ],
)
def test_it_is_the_softmax(name, dtype, weight, softcap, on):
    shape = shapes.SMALL[name]._replace(dtype=dtype)
    given = shapes.inputs(shape, weight)
    if on == "tpu" and name != "tiles":
        assert not tpu.takes(given[1], shape.sample)
        return
    settings = how(weight, softcap)
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    agrees(ON[on](settings, *given), settings, given, tolerance)


@pytest.mark.parametrize("on", ON)
def test_what_stands_behind_the_sample_changes_no_bit(on):
    shape, settings = shapes.SMALL["tiles"], how("log")
    q, k, v, rows, count, weight = shapes.inputs(shape, "log")
    behind = ~reference.there(rows, count)
    other = jnp.where(behind, rows[..., ::-1], rows), count, jnp.where(behind, 50.0, weight)
    wanted = ON[on](settings, q, k, v, rows, count, weight)
    same(wanted, ON[on](settings, q, k, v, *other))


def same(wanted, found):
    jax.tree.map(np.testing.assert_array_equal, wanted, found)


@pytest.mark.parametrize("weight", ["log", "angles"])
def test_rows_are_independent_bit_for_bit(weight):
    """Of a batch each row gives what it gives alone, and with fuller samples beside it."""
    shape = shapes.SMALL["threes"]._replace(slots=1165, sample=700, batch=3)
    attend = jax.jit(partial(sampled_attention, how=how(weight)))
    given = shapes.inputs(shape, weight)
    wanted = attend(*given)
    fuller = given[4].at[1:].set(np.int32(700))
    same(*(jax.tree.map(lambda a: a[0], x) for x in (wanted, attend(*given[:4], fuller, given[5]))))
    for b in range(3):
        alone = attend(*jax.tree.map(lambda a: a[b : b + 1], given))  # noqa: B023
        same(jax.tree.map(lambda a: a[b : b + 1], wanted), alone)  # noqa: B023


def test_rows_that_no_cache_has_are_brought_within():
    q, k, v, rows, count, _ = shapes.inputs(shapes.SMALL["alone"])
    attend = jax.jit(partial(sampled_attention, q, k, v, how=how("none")))
    wild = jnp.where(reference.there(rows, count), rows, np.int32(-(2**30)))
    same(attend(rows, count), attend(wild, count))
    same(attend(rows, count), attend(jnp.where(wild < 0, np.int32(2**30), wild), count))
    full = jnp.full_like(count, rows.shape[-1])
    same(attend(rows, full), attend(rows, full + 5))
    same(attend(rows, full * 0), attend(rows, full * 0 - 5))


@pytest.mark.parametrize("on", ON)
def test_nothing_gives_nothing(on):
    """No row at all, rows whose weight is -inf, and a query and keys without direction."""
    shape = shapes.SMALL["tiles"]
    q, k, v, rows, count, weight = shapes.inputs(shape, "log")
    for none in ((rows, count * 0, weight), (rows, count, jnp.full_like(weight, -jnp.inf))):
        found = ON[on](how("log"), q, k, v, *none)
        assert np.all(np.asarray(found.out) == 0) and np.all(np.asarray(found.lse) == -np.inf)
    angles = shapes.inputs(shape, "angles")[5]
    angles = angles._replace(norms=angles.norms.at[:, :, ::3].set(0), length=angles.length * 0)
    agrees(ON[on](how("angles"), q, k, v, rows, count, angles), how("angles"),
           (q, k, v, rows, count, angles), 1e-5)  # fmt: skip


def test_dense_counts_a_row_as_often_as_it_stands():
    q, k, v, rows, count, weight = shapes.inputs(shapes.SMALL["alone"], "log")
    slots = jnp.zeros((1, 2, 65), jnp.float32).at[*reference.places(rows, 2)].set(weight)
    rows = rows // 2
    weight = slots[*reference.places(rows, 2)]
    settings = how("log")
    given = q, k, v, rows, jnp.full_like(count, 33), weight
    agrees(dense.attend(settings, *given), settings, given, 1e-5)


@pytest.mark.parametrize("implementation", [None, seldom("xla"), seldom("dense")])
@pytest.mark.parametrize("weight", ["log", "angles"])
def test_gradients_are_those_of_a_masked_softmax(weight, implementation):
    given = shapes.inputs(shapes.SMALL["alone"]._replace(batch=2, heads=4), weight)
    rows, count = given[3:5]
    settings = how(weight, 2.0)

    def loss(attend, q, k, v, log_weight):
        out, lse = attend(q, k, v, log_weight)
        lse = jnp.where(count == 0, np.float32(0), lse)  # -inf times anything is no loss
        return jnp.sum(jnp.sin(3 * out)) + jnp.sum(jnp.cos(lse))

    def sampled(q, k, v, log_weight):
        return sampled_attention(
            q, k, v, rows, count, log_weight, how=settings, implementation=implementation
        )

    def masked(q, k, v, log_weight):
        """Over all keys; of rows that are not of the sample the bias is -inf."""
        product = jnp.einsum("bnh,bnsh->bns", q, jnp.repeat(k, 2, 1), precision="highest")
        if weight == "angles":
            a = Angles(*(x[..., None] for x in log_weight[1:]), None)
            a = Angles(jnp.repeat(log_weight.norms, 2, 1), a.norms, a.shift)
            log_weight = jax.lax.stop_gradient(settings.weigh(reference.cosine(product, a)))
            log_weight = log_weight[np.ogrid[:2, :4, :1][0], np.ogrid[:2, :4, :1][1], rows]
        at = reference.places(rows, 4)
        log_weight = jnp.where(reference.there(rows, count), log_weight, -jnp.inf)
        bias = jnp.full(product.shape, -jnp.inf).at[at].set(log_weight)
        logits = 2 * jnp.tanh(product * np.float32(0.5) / 2) + bias
        empty = (count == 0)[..., None]
        share = jax.nn.softmax(jnp.where(empty, np.float32(0), logits), axis=-1)
        share = jnp.where(empty, np.float32(0), share)
        out = jnp.einsum("bns,bnsh->bnh", share, jnp.repeat(v, 2, 1), precision="highest")
        return out, jax.nn.logsumexp(jnp.where(empty, np.float32(0), logits), axis=-1)

    floats = (*given[:3], given[5])
    gradient = jax.jit(jax.grad(loss, (1, 2, 3, 4)), static_argnums=0)
    wanted, found = gradient(masked, *floats), gradient(sampled, *floats)
    check = partial(np.testing.assert_allclose, rtol=1e-5, atol=5e-5)
    jax.tree.map(check, found[:3], wanted[:3])
    if weight == "log":
        check(found[3], jnp.where(reference.there(rows, count), wanted[3], np.float32(0)))
    else:
        assert not any(np.any(a) for a in found[3]), "a chance is not differentiated"


def test_what_has_no_kernel_is_refused_by_name_and_done_by_none():
    given = shapes.inputs(shapes.SMALL["alone"])
    attend = partial(sampled_attention, *given, how=how("none"))
    with pytest.raises(
        ValueError, match=r"33 of 65 rows of 16 numbers, float32, is done by xla, d"
    ):
        attend(implementation="pallas_tpu")
    with pytest.raises(ValueError, match=r"got 'cuda'; leave it out"):
        attend(implementation="cuda")
    with pytest.raises(ValueError, match=r"go together"):
        sampled_attention(*given, how=how("angles"))
    same(attend(), attend(implementation="xla"))


def test_equal_settings_are_compiled_once():
    given = shapes.inputs(shapes.SMALL["alone"], "angles")
    attend = jax.jit(sampled_attention, static_argnames=("how", "implementation"))
    for _ in range(2):
        attend(*given, how=How(0.5, None, Hashing()))
    assert attend._cache_size() == 1


def test_where_a_tpu_is_expected_to_do_all_keys_sooner():
    """MagicPIG's share in half precision: four query heads a kv head, and one (its section 6)."""
    cheaper = partial(tpu.dense_is_cheaper, slots=131_072, head_dim=128)
    assert cheaper(2621, 4, itemsize=2) and cheaper(2621, 4, itemsize=4)
    assert not cheaper(2621, 1, itemsize=2) and not cheaper(2621, 1, itemsize=4)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")  # jax 0.12
@pytest.mark.parametrize("weight", [seldom("none"), seldom("log"), "angles"])
@pytest.mark.parametrize("dtype", ["float32", seldom("bfloat16")])
def test_it_is_lowered_for_cuda(dtype, weight):
    shape = shapes.LARGEST._replace(dtype=dtype)
    with an_h100_in_mind():
        for implementation in ("pallas_gpu", None):
            function, args = call(shape, weight, implementation)
            text = function.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
            assert text.count("__gpu$xla.gpu.triton") == 1
            assert not gathers(text, shape)


def call(shape, weight, implementation, place=None):
    """The public function, jitted, and the shapes of its arguments."""
    function = partial(sampled_attention, how=how(weight), implementation=implementation)
    return jax.jit(function), shapes.structs(shape, weight, place)


def gathers(text, shape):
    """Whether a program has an array as large as all gathered rows."""
    sizes = (re.findall(r"\d+(?=x)", found) for found in re.findall(r"tensor<([\dx]+x)[a-z]", text))
    rows = shape.batch * shape.heads * shape.sample * shape.head_dim
    return any(np.prod([int(x) for x in size]) == rows for size in sizes)


def test_blocks_of_rows_are_all_that_is_gathered():
    args = shapes.structs(shapes.LARGEST)
    for function, wanted in ((reference.attend, False), (reference.gathered, True)):
        text = jax.jit(partial(function, how("none"))).lower(*args).as_text()
        assert gathers(text, shapes.LARGEST) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("dtype, weight", [("float32", "log"), ("bfloat16", "angles")])
def test_on_a_tpu_nothing_races_and_nothing_is_read_before_it_is_written(capfd, dtype, weight):
    shape = shapes.SMALL["tiles"]._replace(dtype=dtype, slots=400, sample=300)
    given = shapes.inputs(shape, weight)
    found = tpu.attend(how(weight), *given, interpret=CHECKED)
    agrees(found, how(weight), given, 1e-5 if dtype == "float32" else 1e-2)
    assert "RACE" not in capfd.readouterr().out, "which is all that jax does about one"


def test_of_the_memory_of_the_host_only_xla_reads_rows():
    shape = shapes.SMALL["tiles"]
    given = list(shapes.inputs(shape, "log"))
    call = partial(sampled_attention, how=how("log"))
    wanted = call(*given, implementation="xla")
    given[1:3] = map(host.to_host, given[1:3])
    np.testing.assert_array_equal(call(*given, implementation="xla").out, wanted.out)
    with pytest.raises(ValueError, match="is done by xla, got 'dense'"):
        call(*given, implementation="dense")


@pytest.fixture(scope="module")
def reports():
    return reports_of("tests.pallas_kernels.test_sampled_attention")


@pytest.mark.slow
@pytest.mark.tpu_check
def test_a_tpu_compiles_the_largest_sample_and_keeps_no_gathered_row(reports):
    assert len(reports) == 2 * len(DTYPES) * len(WEIGHTS)
    for report in reports:
        assert report["kernels"] == 1 and not report["gathered"], report
        assert report["temporary"] < report["gathered bytes"] / 8, report


def main() -> None:
    """One line of JSON a generation of TPU, type and weight."""
    for kind in ("v5e:2x2", "v6e:2x2"):
        device = topologies.get_topology_desc(platform="tpu", topology_name=kind).devices[0]
        for dtype in DTYPES:
            for weight in WEIGHTS:
                shape = shapes.LARGEST._replace(dtype=dtype)
                function, args = call(shape, weight, "pallas_tpu", SingleDeviceSharding(device))
                lowered = function.lower(*args)
                text = lowered.as_text()
                rows = shape.heads * shape.sample * shape.head_dim
                report = {
                    "kind": kind,
                    "dtype": dtype,
                    "weight": weight,
                    "kernels": text.count("@tpu_custom_call"),
                    "gathered": gathers(text, shape),
                    "gathered bytes": rows * jnp.dtype(dtype).itemsize,
                    "temporary": lowered.compile().memory_analysis().temp_size_in_bytes,
                }
                print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
