"""Generation over many devices: the same tokens, and caches that keep their sharding."""

from __future__ import annotations

import math
import re

import jax
import numpy as np
import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.generation.decoding import compiled_decode_block, run_donated
from jaxkv.models.generation.streams import Stream
from jaxkv.sampling import Sampling
from jaxkv.state.sharding import mesh_of

SMALL = "streaming:sinks=2,window=14"
WARM = Sampling(temperature=0.9, top_k=50)
MESHES = ["data=2,model=4", "model=2", "data=8"]
PROMPTS = [[60 + i] * (3 * i + 1) for i in range(8)]
COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)


def begin(llm: models.Llm, policy: str = SMALL, prefill: bool = True) -> Stream:
    """Eight sequences, with their prompts prefilled or, with prefill=False, empty."""
    stream = Stream(llm, policy, batch=8, seed=range(8))
    if prefill:
        stream.prefill(PROMPTS, chunk=16)
    else:
        stream.decoding = stream.decoding._replace(done=~stream.decoding.done)
    return stream


@pytest.mark.parametrize("mesh", MESHES)
def test_tokens_do_not_depend_on_the_mesh(tiny, tiny_folder, mesh):
    prefill = mesh == MESHES[0]  # prefill is compiled for one mesh only, to save time
    alone = begin(tiny, prefill=prefill).decode(WARM, 100, ())[0]
    llm = models.load(tiny_folder, mesh=mesh_of(mesh))
    data_shards, head_shards = (llm.mesh.shape.get(axis, 1) for axis in ("data", "model"))
    stream = begin(llm, prefill=prefill)
    before = compiled_decode_block()._cache_size()
    np.testing.assert_array_equal(stream.decode(WARM, 60, ())[0], alone[:, :60])
    np.testing.assert_array_equal(stream.decode(WARM, 40, ())[0], alone[:, 60:])
    assert compiled_decode_block()._cache_size() == before + 1
    if prefill:
        before = run_donated._cache_size()
        stream.prefill(PROMPTS, chunk=16)
        assert run_donated._cache_size() == before, (
            "the sharding of the outputs must be that of the inputs"
        )

    # Each device stores its sequences and heads of every cache, and its part of the projections.
    for state in stream.decoding.states:
        assert len(state.k.sharding.device_set) == data_shards * head_shards
        assert state.k.sharding.shard_shape(state.k.shape) == (
            8 // data_shards,
            4 // head_shards,
            16,
            4,
        )
    for name, axis in (("q", 0), ("k", 0), ("v", 0), ("o", 1), ("gate", 0), ("up", 0), ("down", 1)):
        weight = llm.weights[f"layers.1.{name}"]
        shard = weight.sharding.shard_shape(weight.shape)
        assert shard[axis] == weight.shape[axis] // head_shards, name
        assert shard[1 - axis] == weight.shape[1 - axis], name


@pytest.mark.parametrize("mesh", MESHES)
def test_only_sums_are_communicated(tiny_folder, mesh):
    """Collectives: two sums of projections per layer, and whether all sequences are done."""
    llm = models.load(tiny_folder, mesh=mesh_of(mesh))
    stream = begin(llm, prefill=mesh == MESHES[0])
    program = compiled_decode_block().lower(
        stream.static, WARM.filters, (), llm.weights, stream.decoding, WARM.knobs, np.int32(1)
    )
    collectives = [
        (kind, dtype, math.prod(map(int, filter(None, shape.split(",")))))
        for kind, arrays in (
            (match[2], match[1]) for match in COLLECTIVE.finditer(program.compile().as_text())
        )
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", arrays)
    ]
    data_shards, head_shards = (llm.mesh.shape.get(axis, 1) for axis in ("data", "model"))
    sums = [("all-reduce", "f32", llm.config.width * 8 // data_shards)] * 2 * llm.config.layers
    done = [("all-reduce", "pred", 1)]
    assert sorted(collectives) == sorted(sums * (head_shards > 1) + done * (data_shards > 1))


def test_stories(stories, record_property):
    """Greedy tokens of a trained model, with sequences and heads sharded."""
    texts = []
    for mesh in (None, mesh_of("model=2"), mesh_of("data=2,model=4")):
        stream = begin(models.load(stories, mesh=mesh), "streaming:sinks=4,window=60")
        texts.append(stream.decode(Sampling(), 200, ())[0])
    for text in texts[1:]:
        np.testing.assert_array_equal(text, texts[0])
    assert len(jax.devices()) == 8
    record_property("equal_tokens_on_2_and_8_devices", texts[0].size)


def test_a_mesh_in_words_is_refused(tiny_folder):
    with pytest.raises(UserError, match=r"must be a jax.sharding.Mesh .*, got 'model=2'; make one"):
        models.load(tiny_folder, mesh="model=2")


def test_a_mesh_that_does_not_divide_is_refused(tiny_folder):
    with pytest.raises(UserError, match="must divide the KV heads: 4 KV heads over 8 places"):
        Stream(models.load(tiny_folder, mesh=mesh_of("model=8")), SMALL)
    with pytest.raises(UserError, match="must divide the sequences: 3 sequences over 2 places"):
        Stream(models.load(tiny_folder, mesh=mesh_of("data=2")), SMALL, batch=3)
