"""Errors of attention to a share of the keys: zero with all keys, known for synthetic attention;
bad arguments are refused."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.contract import Spec
from jaxkv.evals.balancekv import single_layer
from jaxkv.evals.magicpig import geometry, heads, inclusion, matched_budgets, sampling, synthetic
from jaxkv.evals.magicpig.published_tables import DIMS
from jaxkv.policies import MagicPIG, Oracle, TopK
from jaxkv.policies.magicpig.lsh import Hashing
from jaxkv.policy_spec import parse_policy
from jaxkv.rotary import NoPosition, rotary
from tests.seldom import seldom

SPEC = Spec(kv_heads=2, head_dim=8, scale=8**-0.5, encoding=rotary(8, 100.0), group=2)
LENGTH = 300
BETWEEN = LENGTH - heads.QUERIES - sampling.SINKS - sampling.WINDOW


@pytest.fixture(scope="module")
def layer():
    """Two stretches with similar neighbours and values with a nonzero mean."""
    random = np.random.default_rng(0)
    q, k, v = random.normal(size=(3, 2, LENGTH, 4, 8)).astype(np.float32)
    k, v = 1.5 * k[:, :, :2], v[:, :, :2] + 1
    return heads.CapturedLayer(*map(jnp.asarray, (q, k, v)))


@pytest.fixture(scope="module")
def methods():
    return matched_budgets.methods(0.1, (6, 30), sampling.SINKS, sampling.WINDOW)


def test_with_every_key_the_output_is_full_attention(layer):
    """Compared with the policy `full` on each stretch."""
    actual = np.asarray(heads.exact_attention(SPEC, layer, "test"))
    for row in range(2):
        expected = single_layer.attend(
            SPEC, *(np.asarray(a[row]) for a in layer), parse_policy("full")
        )
        np.testing.assert_allclose(actual[row], expected, atol=3e-6)


@pytest.mark.parametrize("name", ["topk", "uniform", seldom("quest"), seldom("vattention")])
def test_a_share_of_one_has_no_error(layer, name):
    policy = matched_budgets.methods(1.0, (1, 300), sampling.SINKS, sampling.WINDOW)[name]
    attended = heads.estimate(policy, SPEC, layer, 0)
    assert heads.errors(attended.out, heads.exact_attention(SPEC, layer, "test")).max() < 1e-5
    np.testing.assert_array_equal(attended.share, 1)


@pytest.mark.parametrize(
    "name", ["topk", "oracle", "uniform", seldom("quest"), seldom("vattention")]
)
def test_each_method_reads_the_requested_share(layer, methods, name):
    attended = heads.estimate(methods[name], SPEC, layer, 0)
    rounded = 1 / BETWEEN if name != "quest" else 0.05  # rounded up; Quest reads whole pages
    # Oracle draws this share with replacement.
    assert (0.02 if name == "oracle" else 0.1) < attended.share.min()
    assert attended.share.max() < 0.1 + 2 * rounded
    assert 0 < heads.errors(attended.out, heads.exact_attention(SPEC, layer, "test")).max() < 3


@pytest.mark.slow
def test_tables_read_the_expected_share(layer):
    angles = sampling.of_stretches(matched_budgets.angles, SPEC, layer)
    bits, tables = matched_budgets.tables(angles, 0.1)
    chosen = MagicPIG(bits, tables, sampling.SINKS, sampling.WINDOW, tail=128)
    read = np.mean([heads.estimate(chosen, SPEC, layer, seed).share for seed in range(4)])
    assert abs(angles.attended(bits, tables) / 0.1 - 1) < 0.05
    assert abs(read / 0.1 - 1) < 0.3


@pytest.mark.parametrize("sigma, topk, oracle", [(1.0, 0.51, 0.032), (2.0, 0.21, 0.025)])
def test_synthetic_attention_has_known_errors(sigma, topk, oracle):
    """At a twentieth of 16,384 keys, with values that correlate with logits; measured elsewhere."""
    errors = np.array([
        [synthetic.error(chosen, synthetic.draw(sigma, seed), seed)[0] for seed in range(8)]
        for chosen in (TopK(0.05), Oracle(0.05))
    ])  # fmt: skip
    assert errors[0].min() < topk < errors[0].max()
    assert errors[1].min() < oracle < errors[1].max()
    assert (errors[1] < errors[0] / 4).all()


@pytest.mark.slow
def test_tables_sample_by_weight_on_synthetic_attention():
    """At the expected share, with an error near that of oracle draws."""
    drawing = synthetic.draw(1.0, 0, keys=4096)
    chosen = MagicPIG(8, 75, 0, 1, budget=4096, tail=1)
    pairs = np.array([synthetic.error_of_tables(chosen, 1.0, drawing, i) for i in range(6)])
    expected = inclusion.isotropic(8, 75, synthetic.DIM)
    assert abs(pairs[:, 1].mean() / expected - 1) < 0.3
    oracle = [synthetic.error(Oracle(expected), drawing, seed)[0] for seed in range(6)]
    assert np.median(pairs[:, 0]) < 2 * np.median(oracle)
    assert np.median(pairs[:, 0]) < synthetic.error(TopK(expected), drawing, 0)[0] / 4


def test_the_crossing_of_two_error_curves():
    line = lambda *errors: {  # noqa: E731
        share: {"error": {"median": error}}
        for share, error in zip(("0.2", "0.4", "0.8"), errors, strict=True)
    }
    crossing = lambda topk: synthetic.crossing(  # noqa: E731
        {"topk": line(*topk), "oracle": line(1.0, 1.0, 1.0)}
    )
    assert crossing((4.0, 2.0, 0.5)) == pytest.approx(0.6)
    assert crossing((0.5, 0.5, 0.5)) == 0.2
    assert crossing((0.5, 0.5, 2.0)) is None


def test_a_counted_share_is_that_of_isotropic_keys():
    shares = [sampling.counted_share(Hashing(6, 20), seed, keys=2000) for seed in range(3)]
    assert abs(np.mean(shares) / inclusion.isotropic(6, 20, DIMS) - 1) < 0.1


def test_the_geometry_of_keys_in_a_cone():
    """Keys around a direction; the first key is opposite and has a small value."""
    random = np.random.default_rng(0)
    spec = Spec(1, 16, 16**-0.5, NoPosition(), group=1)
    q, k, v = 0.1 * random.normal(size=(3, 3, 200, 1, 16))
    q[..., 0] -= 1
    k[..., 0] += 1
    k[:, 0] *= -1
    v[..., 1] += 1
    v[:, 0] *= 0.1
    layer = heads.CapturedLayer(*(jnp.asarray(a, jnp.float32) for a in (q, k, v)))
    cosines = geometry.geometry(spec, layer, "test")
    assert cosines["sink key with mean key"]["max"] < -0.8
    assert cosines["query with sink key"]["min"] > 0.8
    assert cosines["mean keys of two stretches"]["min"] > 0.99
    assert cosines["value of the sink over others"]["max"] < 0.15
    tail = geometry.long_tail(spec, layer, "test")
    assert 0.2 < tail["between"]["weight"]["mean"] < tail["all"]["weight"]["mean"] < 1


@pytest.mark.slow
def test_errors_are_divided_by_those_of_top_k(layer):
    """By stretch, at the same share; seeds differ in their draws."""
    exact = {0: heads.exact_attention(SPEC, layer, "test")}
    kinds = {"topk": TopK(0.1, sampling.SINKS, sampling.WINDOW),
             "oracle": Oracle(0.1, sampling.SINKS, sampling.WINDOW)}  # fmt: skip
    captured = {
        kind: {"0.1": sampling.measured(SPEC, {0: layer}, exact, {0: chosen}, 2)}
        for kind, chosen in kinds.items()
    }
    sampling.add_ratios_to_topk(captured)
    topk, oracle = captured["topk"]["0.1"], captured["oracle"]["0.1"]
    assert topk["over_topk"] == {"mean": 1, "standard_error": 0}
    over = np.array(oracle["stretches"]) / np.array(topk["stretches"])
    assert oracle["over_topk"]["mean"] == pytest.approx(over.mean())
    assert oracle["error"]["n"] == 4 and oracle["error"]["min"] < oracle["error"]["max"]
    assert oracle["layers"][0]["share"] == oracle["share"]


def test_intervals_are_over_stretches():
    values = np.array([[[1.0, 3.0], [3.0, 5.0]]])  # one layer, two seeds, two stretches
    assert heads.interval(values) == {"mean": 3.0, "standard_error": 1.0}
