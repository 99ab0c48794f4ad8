"""Sequences and KV heads sharded over devices: equal results, and no communication."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxkv.contract import Chunk, Spec
from jaxkv.driver import step
from jaxkv.errors import UserError
from jaxkv.policies import TOVA, Full, Retrieval, Streaming
from jaxkv.rotary import Alibi, rotary
from jaxkv.state.sharding import (
    local_spec,
    mesh_of,
    sharded_finish_prefill,
    sharded_step,
    specs,
)
from tests.core.tokens import chunk

SPEC = Spec(kv_heads=4, head_dim=8, scale=8**-0.5, encoding=rotary(8, 10000.0), group=2)
POLICY = Streaming(sinks=2, window=4)
IN_INT8 = Streaming(sinks=2, window=4, storage="int8")
COLLECTIVE = re.compile(r"all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute")


def tokens(rng, length=3):
    return chunk(SPEC, length, rng=rng, valid=rng.random((4, length)) < 0.8)


def test_mesh_strings():
    mesh = mesh_of("data=2,model=4")
    assert dict(mesh.shape) == {"data": 2, "model": 4}
    assert dict(mesh_of(" model=2 ").shape) == {"model": 2}
    assert all(kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types)


@pytest.mark.parametrize("text", ["", "data=", "data=0", "data=two", "rows=2", "data=2,data=2"])
def test_bad_mesh_strings_are_refused(text):
    with pytest.raises(UserError, match="a mesh must be"):
        mesh_of(text)


def test_a_mesh_of_too_many_devices_is_refused():
    with pytest.raises(UserError, match="needs 512, got"):
        mesh_of("data=2,model=256")


@pytest.mark.parametrize("policy", [Retrieval(capacity=8, sinks=1, window=2), TOVA(capacity=8)])
def test_kv_heads_that_share_a_budget_are_not_split(policy):
    state = policy.init(SPEC, 4, jax.random.key(0))
    with pytest.raises(UserError, match=r"needs all KV heads .* got .* model=2"):
        sharded_step(mesh_of("model=2"), policy, SPEC, state, *tokens(np.random.default_rng(0)))
    with pytest.raises(UserError, match="needs all KV heads"):
        sharded_finish_prefill(mesh_of("model=2"), policy, SPEC, state)


def test_partition_specs_follow_the_axis_letters():
    layout = specs(POLICY.leaves)
    assert layout.k == PartitionSpec("data", "model", None, None)
    assert layout.positions == PartitionSpec("data", None)
    assert specs(POLICY.leaves, batch=None).k == PartitionSpec(None, "model", None, None)
    assert specs((POLICY.leaves, POLICY.leaves))[1] == layout
    in_int8 = specs(IN_INT8.leaves)
    assert in_int8.k.values == in_int8.k.scale == in_int8.exact_sinks.k == layout.k


def test_the_spec_of_one_device_has_its_kv_heads():
    assert local_spec(mesh_of("data=2,model=4"), SPEC) == dataclasses.replace(SPEC, kv_heads=1)
    assert local_spec(mesh_of("data=2"), SPEC) == SPEC
    spec = local_spec(mesh_of("model=2"), dataclasses.replace(SPEC, encoding=Alibi.of(8)))
    assert (spec.kv_heads, spec.encoding.axis) == (2, "model")


def test_sharded_equals_unsharded(rng):
    """With a sink logit and a distance penalty by head; law 6 has every policy."""
    spec, policy = dataclasses.replace(SPEC, encoding=Alibi.of(8)), IN_INT8
    mesh = mesh_of("data=2,model=4")
    state = policy.init(spec, 4, jax.random.key(0))
    sink_logits = jnp.arange(8, dtype=jnp.float32)
    alone = jax.jit(functools.partial(step, policy, spec))
    split = jax.jit(functools.partial(sharded_step, mesh, policy, spec))
    states_of_both = [state, state]
    for length in (3, 3, 1):
        new = tokens(rng, length)
        actual, states_of_both[0] = alone(states_of_both[0], *new, sink_logits)
        expected, states_of_both[1] = split(states_of_both[1], *new, sink_logits)
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
        jax.tree.map(np.testing.assert_array_equal, *states_of_both)


@pytest.mark.parametrize("length, policy", [(1, POLICY), (3, IN_INT8)], ids=["float", "int8"])
def test_a_sharded_step_has_no_collective(rng, length, policy):
    mesh = mesh_of("data=2,model=4")
    state = policy.init(SPEC, 4, jax.random.key(0))
    place = lambda spec: jax.sharding.NamedSharding(mesh, spec)
    by_head = place(PartitionSpec("data", None, "model"))
    by_sequence = place(PartitionSpec("data"))
    state = jax.device_put(state, jax.tree.map(place, specs(policy.leaves)))
    places = Chunk(*[by_head] * 3, by_sequence, by_sequence)
    new = jax.device_put(tokens(rng, length), places)
    split = jax.jit(functools.partial(sharded_step, mesh, policy, SPEC))
    text = split.lower(state, *new).compile().as_text()
    assert not COLLECTIVE.search(text), COLLECTIVE.search(text)


def test_a_mesh_that_does_not_divide_is_refused(rng):
    state = Full().init(SPEC, 4, jax.random.key(0))
    new = tokens(rng)
    with pytest.raises(UserError, match="'data' must divide the sequences: 4 sequences over 3"):
        sharded_step(mesh_of("data=3"), Full(), SPEC, state, *new)
    with pytest.raises(UserError, match="'model' must divide the KV heads: 4 KV heads over 8"):
        sharded_step(mesh_of("model=8"), Full(), SPEC, state, *new)
