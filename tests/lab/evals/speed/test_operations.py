"""The time of a step by operation, on a small random model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.lib import hlo, limits, record
from jaxkv.evals.speed import operation_programs, operations, quantised_weights
from jaxkv.evals.speed.operation_programs import PRODUCTS, Caches, Operation
from jaxkv.models.network import quantised
from tests.tiny import write_tiny

POLICY = "streaming:sinks=4,window=60"
SLOTS = CHUNK = 64
FORMS = {"float32": None, "int8": "int8"}


@pytest.fixture(scope="module")
def llms(tmp_path_factory):
    folder = write_tiny(tmp_path_factory.mktemp("operations") / "model", tie_word_embeddings=True)
    return {form: models.load(folder, "float32", weights=chosen) for form, chosen in FORMS.items()}


@pytest.fixture(scope="module")
def caches(llms):
    stream = models.Stream(llms["float32"], POLICY)
    stream.prefill([[5] * (SLOTS + 1)])
    return {batch: Caches(stream, batch) for batch in (1, 8)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (8, 1), (1, CHUNK)])
def test_the_rows_read_every_weight_once(llms, caches, form, batch, tokens):
    llm = llms[form]
    rows = operation_programs.operations(llm, caches[batch], tokens)
    read = sum(
        operation.weight_bytes
        for row, operation in rows.items()
        if row != operation_programs.EMBEDDING
    )
    assert read == sum(leaf.nbytes for leaf in jax.tree.leaves(llm.weights))
    matrices = {name: w for name, w in llm.weights.items() if quantised.is_matrix(name)}
    names = (*PRODUCTS, operation_programs.HEAD)
    products = sum(rows[row].weight_bytes for row in names)
    assert products == sum(leaf.nbytes for leaf in jax.tree.leaves(matrices))


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (8, 1), (1, CHUNK)])
def test_the_arithmetic_of_products(llms, caches, batch, tokens):
    """2 m n k for each product, in each of two layers."""
    rows = operation_programs.operations(llms["int8"], caches[batch], tokens)
    c, many = llms["int8"].config, batch * tokens
    shapes = {
        "q, k, v": (c.heads + 2 * c.kv_heads) * c.head_dim * c.width,
        "attention output": c.heads * c.head_dim * c.width,
        "gate, up": 2 * c.mlp * c.width,
        "down": c.mlp * c.width,
    }
    for row, weights in shapes.items():
        assert (rows[row].times, rows[row].flops) == (2, 2 * 2 * weights * many)
    assert rows["head"].flops == 2 * c.vocab * c.width * batch
    attention = rows[operation_programs.ATTENTION]
    # Products of queries with keys, and of weights with values.
    assert attention.flops == 2 * (2 * 2 * c.heads * c.head_dim * SLOTS) * many
    keys_and_values = 2 * 4 * c.kv_heads * c.head_dim * SLOTS
    assert attention.cache_bytes == 2 * batch * (keys_and_values + 4 * SLOTS + 4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, CHUNK])
@pytest.mark.parametrize("row", PRODUCTS)
def test_xla_computes_the_products_of_all_layers(llms, row, form, tokens):
    """Although a layer takes only one element of the products of the layer before."""
    llm, c = llms[form], llms[form].config
    weights = operation_programs.chosen(llm, PRODUCTS[row][0])
    shape = {"attention output": (1, tokens, c.heads, c.head_dim), "down": (c.mlp, 1, tokens)}
    x = operation_programs.normal(llm, shape.get(row, (c.width, 1, tokens)))
    program = operation_programs.compiled(operation_programs.run_products, (0, 1), prefill=True)
    lowered = program.lower(c, row, weights, x)
    counted = lowered.compile().cost_analysis()["flops"]
    assert counted >= operation_programs.products(llm, 1, tokens)[row].flops
    np.testing.assert_array_equal(program(c, row, weights, x), x)


def test_a_row_depends_on_the_row_before():
    x = jnp.ones((3,))
    after = operation_programs.after
    np.testing.assert_array_equal(after(x, jnp.zeros((2, 2)), jnp.ones((1,))), x)
    assert np.isnan(after(x, jnp.zeros((2, 2)), jnp.full((1,), jnp.nan))).all()


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (8, 1), (1, CHUNK)])
def test_attention_extends_the_caches_as_a_step_does(llms, caches, batch, tokens):
    shared = caches[batch]
    before = [np.asarray(state.k) for state in shared.decoding.states]
    position = int(shared.decoding.position[0])
    rows = operation_programs.operations(llms["float32"], shared, tokens)
    assert rows[operation_programs.ATTENTION].run() > 0
    for state, old in zip(shared.decoding.states, before, strict=True):
        newest = np.asarray(state.positions[0]) >= position
        assert newest.sum() == min(tokens, SLOTS - 4)
        changed = (np.asarray(state.k) != old).any(axis=(0, 1, 3))
        np.testing.assert_array_equal(changed, newest)


def test_decoding_attention_copies_no_cache(llms, caches):
    """Outside of the loop either: a call has one step, so such a copy would count fully."""
    shared, c = caches[1], llms["float32"].config
    q = operation_programs.normal(llms["float32"], (1, 1, c.heads, c.head_dim))
    pairs = [(q[:, :, : c.kv_heads],) * 2] * c.layers
    arguments = (
        shared.decoding.states,
        q,
        pairs,
        shared.decoding.position[:, None],
        q[:, :, 0, 0] == 0,
    )
    program = operation_programs.compiled(operation_programs.attend_in_decoding, (0,), (1,))
    text = program.lower(shared.static, *arguments, np.int32(1)).compile().as_text()
    assert hlo.copies(text, {shared.decoding.states[0].k.size}) == []


def test_rest_is_what_the_rows_do_not_explain():
    rows = {"a": Operation(None, 2, 8e9, 4_000), "b": Operation(None, 1, 0, 0, 2_000)}
    seconds = {"a": [1.0, 2.0], "b": [0.5, 0.5], "whole": [10.0, 8.0]}
    limit = {"bandwidth": np.array([8_000.0, 4_000.0]), "flops": np.array([16e9, 16e9])}
    results = operations.by_row(rows, seconds, 4, limit)
    assert results["whole"]["milliseconds"]["median"] == 2250
    assert results["sum of the rows"]["milliseconds"]["max"] == 2500
    assert results["rest"]["milliseconds"] == {
        "median": 250.0,
        "min": -500.0,
        "max": 1000.0,
        "n": 2,
    }
    assert results["rows"]["a"]["share_of_bandwidth"]["median"] == 0.5
    assert results["rows"]["a"]["share_of_flops"]["max"] == 0.5
    assert results["rows"]["b"]["bytes_per_second"]["median"] == 4000
    assert results["sum of the rows"]["flops"] == 8e9
    assert results["whole"]["weight_bytes"] + results["whole"]["cache_bytes"] == 6000


def test_the_limit_of_a_round_is_its_fastest_program():
    limit = limits.bandwidth(sides=(8,))
    assert set(limit.amounts.values()) == {4 * 8 * 8} and len(limit.variants) == 3
    assert all(run() > 0 for run in limit.variants.values())
    first, *slower = limit.amounts
    seconds = {first: [1.0, 4.0]} | {name: [2.0, 2.0] for name in slower}
    np.testing.assert_array_equal(limit.best(seconds), [256, 128])
    assert limits.products(sides=(8,)).amounts == {"matrix-matrix product, 8": 2 * 8**3}


@pytest.fixture
def small_limits(monkeypatch):
    monkeypatch.setattr(limits, "VECTOR_SIDES", (8,))
    monkeypatch.setattr(limits, "MATRIX_SIDES", (8,))


def test_the_table_has_the_shares_of_every_case(llms, small_limits):
    results = record.plain(operations.measure(llms, POLICY, 1, 2))
    assert (results["slots"], results["chunk"]) == (SLOTS, CHUNK) and len(results["cases"]) == 5
    lines = operations.kinds_table(results).splitlines()[4:]
    for line, case in zip(lines, results["cases"], strict=True):
        name, _, *shares, bandwidth, flops = (x.strip() for x in line.strip("|").split(" | "))
        assert name == case and bandwidth.endswith("%") and flops.endswith("%")
        assert sum(int(share.rstrip("%")) for share in shares) == pytest.approx(100, abs=1)


@pytest.mark.slow
def test_quantised_weights_are_compared_with_the_limit(llms, small_limits):
    results = quantised_weights.speed(llms | {"int4": llms["int8"]}, 2, new=2)
    assert list(results["tokens_per_second"]) == [
        f"{form}, batch {batch}" for batch in (1, 8) for form in ("float32", "int8", "int4")
    ]
    assert results["bandwidth"]["median"] > 0
    assert results["share_of_bandwidth"]["float32"]["n"] == 2
