"""The computations of the notebook on MagicPIG, against plain numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from jaxkv.colab import captured, long_tail
from jaxkv.contract import Spec
from jaxkv.evals.balancekv import single_layer
from jaxkv.evals.balancekv.single_layer import QUERIES
from jaxkv.evals.magicpig import heads, synthetic
from jaxkv.evals.magicpig.geometry import geometry
from jaxkv.evals.magicpig.matched_budgets import EndsOnly
from jaxkv.policy_spec import parse_policy
from jaxkv.rotary import NoPosition

SPEC = Spec(2, 8, 8**-0.5, NoPosition(), group=2)
LENGTH = QUERIES + 120


@pytest.fixture
def layer(rng):
    shape = (2, LENGTH, 2, 8)
    q, k, v = rng.normal(size=(2, LENGTH, 4, 8)), rng.normal(size=shape), rng.normal(size=shape)
    return heads.CapturedLayer(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)))


def weights(layer):
    """Attention weights of the last queries [B,Q,N,S], in plain numpy."""
    q, k = (np.asarray(x, np.float64) for x in (layer.q[:, -QUERIES:], layer.k))
    logits = np.einsum("bqnh,bsnh->bqns", q, np.repeat(k, 2, axis=2)) * SPEC.scale
    positions = np.arange(LENGTH - QUERIES, LENGTH)[:, None]
    logits = np.where((np.arange(LENGTH) <= positions)[:, None], logits, -np.inf)
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def test_cumulative_weights_equal_numpy(layer):
    actual = long_tail.cumulative_weights(SPEC, layer)
    expected = np.cumsum(-np.sort(-weights(layer), axis=-1), axis=-1).mean(axis=(0, 1))
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert captured.sink_weight(SPEC, layer) == pytest.approx(
        weights(layer)[..., 0].mean(), abs=1e-6
    )


def test_reading_all_keys_has_no_error(layer):
    errors = long_tail.errors_by_budget(SPEC, layer, [0.1, 1.0], 1)
    assert errors["topk"][1].error < 1e-5 and errors["topk"][1].share == pytest.approx(1)
    assert all(point.error > 0.01 for line in errors.values() for point in line[:1])


def test_centred_cosines_ignore_the_mean_key(layer):
    moved = layer._replace(k=layer.k + jnp.asarray(3.0, jnp.float32))
    kept = long_tail.cosines(SPEC, moved, True)
    np.testing.assert_allclose(
        np.sort(kept), np.sort(long_tail.cosines(SPEC, layer, True)), atol=1e-4
    )
    assert not np.allclose(kept, long_tail.cosines(SPEC, moved, False), atol=0.1)


@pytest.mark.slow
def test_more_tables_of_fewer_bits_read_more_keys(layer):
    tables = long_tail.measure_tables(SPEC, {0: layer}, [(6, 10), (4, 40)], 1)
    assert tables[6, 10, True].share < tables[4, 40, True].share
    *_, last = long_tail.lsh_table(tables).splitlines()
    last_table = tables[4, 40, True]
    assert last.split()[:4] == ["4", "40", f"{last_table.share:.1%}", f"{last_table.error:.3f}"]


def test_errors_by_head_average_to_the_error_of_the_layer(layer):
    layers = {3: layer, 7: layer._replace(v=layer.v + jnp.asarray(1.0, jnp.float32))}
    by_head = long_tail.measure_heads(SPEC, layers, 0.1, 2)
    assert by_head.layer.tolist() == [3] * 4 + [7] * 4 and by_head.head.tolist() == [0, 1, 2, 3] * 2
    np.testing.assert_allclose(
        by_head.fifth[:4], long_tail.cumulative_weights(SPEC, layer)[:, 36], rtol=1e-6
    )
    for number, recorded in layers.items():
        line = long_tail.errors_by_budget(SPEC, recorded, [0.1], 2)
        for kind in long_tail.KINDS:
            of_layer = by_head.error[kind][by_head.layer == number]
            assert of_layer.mean() == pytest.approx(line[kind][0].error, rel=1e-5)


@pytest.mark.parametrize("head", [0, 3])
def test_a_single_head_has_the_same_output_as_in_its_layer(layer, head):
    together = heads.exact_attention(SPEC, layer, "all heads")[:, :, head]
    spec, head_layer = long_tail.single_head(SPEC, layer, head)
    np.testing.assert_allclose(
        heads.exact_attention(spec, head_layer, "one")[:, :, 0], together, atol=1e-6
    )


def test_the_flattest_a_later_well_sampled_and_the_most_peaked_head_are_picked():
    error = {"topk": [9.0, 4.0, 1.0], "oracle": [1.0, 2.0, 3.0], "uniform": [3.0, 4.0, 9.0]}
    error = {kind: np.array(line) for kind, line in error.items()}
    by_head = long_tail.Heads(np.arange(3), np.zeros(3, int), np.array([0.2, 0.6, 0.9]), error)
    assert list(long_tail.pick_heads(by_head).values()) == [0, 1, 2]
    np.testing.assert_allclose(long_tail.oracle_over_best(by_head), [1 / 3, 0.5, 3])


def test_synthetic_attention_has_its_drawn_logits():
    drawing, layer = synthetic.draw(2.0, 5, 200), synthetic.layer(2.0, [5], 200)
    logits = heads.last_queries(synthetic.SPEC, layer, 0, 0).logits[0, 0, 0]
    np.testing.assert_allclose(logits[0], drawing.logits, atol=1e-5)
    np.testing.assert_array_equal(layer.v[0, :, 0], drawing.v)


@pytest.mark.parametrize(
    ("sigma", "follow", "lowest", "highest"),
    [(0.25, 0.45, 2, 9), (3.0, 0.45, 0.1, 0.8), (0.25, 0.0, 0.7, 1.3)],
)
def test_a_sample_wins_with_a_long_tail_and_dependent_values(sigma, follow, lowest, highest):
    """Top-k's error over a sample's, by length of the tail and dependence of the values."""
    error = long_tail.measure_synthetic(256, [sigma], 0.05, follow, ("topk", "oracle")).error
    assert lowest < error["topk"][0] / error["oracle"][0] < highest


def test_the_ends_alone_read_no_key_between(layer):
    ways = {"ends alone": EndsOnly(4, 16), "topk": parse_policy("topk:share=0.1,sinks=4,window=16")}
    read = long_tail.measure_shares(SPEC, {0: layer}, ways)
    assert read["ends alone"] == 0 and read["topk"] == pytest.approx(0.1, abs=0.01)


@pytest.fixture
def with_sink(layer):
    """The first key has about half of the weight of every query, and a short value."""
    q, k, v = (np.array(a) for a in layer)
    q[..., 0], k[..., 0], k[:, 0], v[:, 0] = 3.0, 0.0, 0.0, 0.1 * v[:, 0]
    k[:, 0, :, 0] = np.log(LENGTH) / 3 / SPEC.scale
    return heads.CapturedLayer(*map(jnp.asarray, (q, k, v)))


def test_a_sample_is_better_if_the_sink_is_always_read(with_sink):
    assert 0.3 < captured.sink_weight(SPEC, with_sink) < 0.7
    errors = long_tail.measure_with_sink(SPEC, with_sink, 0.1, (4, 20), 1)
    apart, among = errors["always read"], errors["selected"]
    assert apart["uniform"].error < 0.7 * among["uniform"].error
    assert apart["oracle"].share > 1.2 * among["oracle"].share  # fewer draws of one key
    row = long_tail.sink_table(errors).splitlines()[-1]
    assert row.split()[-1] == f"{apart[long_tail.UNCENTRED].error:.3f}"


def test_the_table_of_directions_shows_each_layer(layer, with_sink):
    layers = {0: layer, 3: with_sink}
    shape = {n: geometry(SPEC, recorded, "test") for n, recorded in layers.items()}
    *_, first, second = long_tail.geometry_table(SPEC, layers, shape).splitlines()
    assert first.split()[0] == "0" and second.split()[0] == "3"
    assert second.split()[1] == f"{captured.sink_weight(SPEC, with_sink):.0%}"
    assert float(second.split()[-1]) < 0.5 < float(first.split()[-1])


def test_losses_are_shown_relative_to_the_first():
    losses = {"full": [3.0, 2.0], "one": [3.5, 2.1]}
    (_, line) = captured.loss_table(losses, {"one": "a note"}).splitlines()
    assert line.split(maxsplit=4) == ["one", "+0.300", "±", "0.400", "a note"]


def test_the_first_the_last_and_evenly_spaced_layers_are_recorded():
    llm = models.load()
    ids = list(range(10, 10 + 2 * 96))
    recorded = captured.some_layers(llm, ids, 2)
    assert list(recorded) == [0, 2, 3, 5] and list(captured.some_layers(llm, ids, 2, 1)) == [0, 5]
    last = single_layer.capture(llm, ids[96:])[5]
    for actual, expected in zip(recorded[5], last, strict=True):
        np.testing.assert_array_equal(actual[1], expected)
