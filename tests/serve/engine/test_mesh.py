"""The engine over several devices: the same tokens, caches and prefixes split by KV head."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

from jaxkv import models
from jaxkv.cli import main
from jaxkv.errors import UserError
from jaxkv.models.generation.serving import make_engine
from jaxkv.sampling import Sampling
from jaxkv.serve.engine import PrefixConfig, Request, answer
from jaxkv.serve.prefix.folder import PrefixFolder
from jaxkv.state.sharding import mesh_of
from tests.tiny import write_tiny

PROMPTS = [[60 + i] * (9 * i + 5) for i in range(5)]
SHARED = [70] * 40  # the beginning of two more prompts
REQUESTS = [
    Request(tuple(prompt), 12, sampling=Sampling(temperature=temperature), seed=7, eos=())
    for prompt in (*PROMPTS, [*SHARED, 71], SHARED + [72] * 3)
    for temperature in (0.0, 0.9)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    return write_tiny(tmp_path_factory.mktemp("tiny"), **heads)


def engine_of(folder, policy, mesh, **options):
    llm = models.load(folder, mesh=None if mesh is None else mesh_of(mesh))
    host, disk = options.pop("num_host_blocks", 0), options.pop("prefix_folder", None)
    prefixes = PrefixConfig(num_blocks=4, num_host_blocks=host, folder=disk)
    return make_engine(
        llm, policy, max_batch=4, max_len=64, chunk=16, prefix_cache=prefixes, **options
    )


@pytest.mark.parametrize(
    "policy, mesh, options",
    [
        ("full", "model=4", {"num_host_blocks": 4, "fixed_batch": False}),
        ("streaming:sinks=2,window=14", "model=2", {}),
        ("streaming:sinks=2,window=14", "model=8", {}),
        pytest.param(
            "reservoir:sinks=1,window=6,sample=7,storage=int8",
            "model=2",
            {},
            marks=pytest.mark.slow,
        ),
        pytest.param("snapkv:capacity=12,window=4", "model=4", {}, marks=pytest.mark.slow),
    ],
)
def test_answers_do_not_depend_on_the_mesh(folder, policy, mesh, options):
    alone, split = (engine_of(folder, policy, at, **options) for at in (None, mesh))
    expected, actual = ([out.tokens for out in answer(e, REQUESTS)] for e in (alone, split))
    assert actual == expected
    again = [out.tokens for out in answer(split, REQUESTS[-4:])]  # from cached prefixes
    assert again == expected[-4:]


@pytest.mark.parametrize("mesh", ["model=2", "model=8"])
def test_a_folder_of_prefixes_serves_the_same_mesh(folder, tmp_path, mesh):
    """A second engine finds in it what the first one wrote; one without a mesh finds nothing."""
    policy = "streaming:sinks=2,window=14"
    expected = [out.tokens for out in answer(engine_of(folder, policy, None), REQUESTS)]
    hits = []
    for at in (mesh, mesh, None):
        prefixes = PrefixFolder(tmp_path, 2**30)
        engine = engine_of(folder, policy, at, prefix_folder=prefixes)
        assert [out.tokens for out in answer(engine, REQUESTS)] == expected
        engine.stop()
        hits.append(engine.metrics()["disk_hits"])
    first, again, other = hits
    assert again > first == other


def test_caches_are_split_and_attention_communicates_nothing(folder):
    engine = engine_of(folder, "streaming:sinks=2,window=14", "model=4")
    programs = engine._programs
    state = programs.init_prefill(np.uint32(0)).states[0]
    assert state.k.sharding.shard_shape(state.k.shape)[1] == 2, "two KV heads of eight"
    text = programs.by_size[4].feed.as_text()
    reduced = re.findall(r" all-reduce(?:-start)?\(", text)
    others = re.findall(r" (?:all-gather|all-to-all|reduce-scatter|collective-permute)", text)
    layers = 2
    assert len(reduced) == 2 * layers and not others, "one all-reduce for each block of a layer"


def test_a_mesh_that_splits_sequences_is_one_line(folder):
    with pytest.raises(UserError, match="not sequences, got a mesh with data=2; give model=N"):
        engine_of(folder, "full", "data=2,model=2")
    with pytest.raises(UserError, match="must divide the KV heads: 8 KV heads over 3 places"):
        engine_of(folder, "full", "model=3")
    assert jax.device_count() >= 8


def test_the_flag_refuses_a_mesh_of_sequences(folder, capsys):
    words = ["serve", "--model", str(folder), "--port", "0", "--mesh", "data=2"]
    assert main(words) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "give model=N alone" in said[0]
