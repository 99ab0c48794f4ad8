"""Families that are not of Llama's form: in the engine, in int8, and on a mesh."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.generation.context_scores import context_scores
from jaxkv.models.generation.serving import make_engine
from jaxkv.models.generation.streams import Stream
from jaxkv.models.loading.config import read_config
from jaxkv.models.loading.source import open_source
from jaxkv.models.tools import compare
from jaxkv.models.training.continued import BaseModel
from jaxkv.models.training.recipes import PRESETS
from jaxkv.sampling import Sampling
from jaxkv.serve.engine import PrefixConfig, Request, answer
from jaxkv.state.sharding import mesh_of
from tests.models.folders import FAMILIES, OTHERS, ROPES, write_json
from tests.tiny import write_tiny

# Rotation in some layers, windows in some, neither, ALiBi; experts in some layers and in all.
KINDS = "smollm3", "gemma3", "neox", "mpt", "qwen3_moe", "gpt_oss"
PROMPT = [(7 * i) % 250 + 3 for i in range(70)]


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    return write_family(tmp_path, request.param)


def write_family(folder, name):
    """A model with a tokenizer."""
    ids = {"vocab_size": 258, "bos_token_id": 0, "eos_token_id": 1}
    return write_tiny(folder, config=OTHERS[name], **ids)


@pytest.mark.filterwarnings("ignore:.*keep the model's own window")
@pytest.mark.parametrize(
    "policy, weights",
    [("streaming:sinks=2,window=14", None), ("snapkv:capacity=20,window=4", "int8")],
)
def test_the_engine_answers_as_a_stream(folder, policy, weights):
    """With a prefix cache, where the second request hits it."""
    llm = models.load(folder, weights=weights)
    stream = Stream(llm, policy)
    stream.prefill([PROMPT], 16)
    stream.finish_prefill()
    stream.limit = 12
    (expected,) = next(stream.decode_blocks(Sampling(), 12, eos=())).tolist()
    prefixes = PrefixConfig(num_blocks=8)
    engine = make_engine(llm, policy, max_batch=2, max_len=128, chunk=16, prefix_cache=prefixes)
    request = Request(tuple(PROMPT), 12, sampling=Sampling(), seed=0, eos=())
    first, again = answer(engine, [request])[0], answer(engine, [request])[0]
    assert first.tokens == again.tokens == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_the_form_of_llama_is_that_of_the_first_families(name, tmp_path):
    write_json(tmp_path / "config.json", FAMILIES[name])
    assert read_config(tmp_path).llama_form == (name not in OTHERS or name.startswith("phi3"))


def test_training_and_repetition_are_refused_by_name(tmp_path):
    llm = models.load(write_family(tmp_path, "olmo2"))
    with pytest.raises(UserError, match=r"form of Llama, got .* of the family olmo2"):
        context_scores(llm, PROMPT, 1)
    base = BaseModel.__new__(BaseModel)
    object.__setattr__(base, "source", open_source(tmp_path))
    with pytest.raises(UserError, match=r"training continues .* of the family olmo2; use Llama"):
        base.setting(PRESETS["tiny"], None)


def test_gemma_has_two_rotations_in_both_dialects(tmp_path):
    old = OTHERS["gemma3"]
    left_out = {"rope_theta", "rope_local_base_freq"}
    new = {name: value for name, value in old.items() if name not in left_out}
    write_json(tmp_path / "config.json", old)
    expected = read_config(tmp_path)
    write_json(tmp_path / "config.json", new | {"rope_parameters": ROPES})
    assert read_config(tmp_path) == expected
    assert len({*expected.encodings}) == 2


def test_a_theta_of_the_later_dialect_replaces_the_default(tmp_path):
    old = OTHERS["smollm3"]
    new = {name: value for name, value in old.items() if name != "rope_theta"}
    write_json(tmp_path / "config.json", old)
    expected = read_config(tmp_path)
    rope = {"rope_type": "default", "rope_theta": old["rope_theta"]}
    write_json(tmp_path / "config.json", new | {"rope_parameters": rope})
    assert read_config(tmp_path) == expected


SHARDED = "olmo3", "gemma2", "cohere2", "falcon_rw", "gpt_oss"


@pytest.mark.parametrize("name", SHARDED)
def test_tokens_do_not_depend_on_the_mesh(name, tmp_path):
    """Over eight devices; the matrices of experts are split within each expert."""
    folder = write_family(tmp_path, name)
    tokens, logits = [], []
    for mesh in (None, mesh_of("data=4,model=2")):
        llm = models.load(folder, mesh=mesh)
        stream = Stream(llm, "full:max=128", batch=4)
        stream.prefill([PROMPT[i : 30 + 9 * i] for i in range(4)], 16)
        logits.append(np.asarray(stream.decoding.logits))
        stream.limit = 12
        tokens.append(next(stream.decode_blocks(Sampling(), 12, eos=())))
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(*tokens)
    if mesh is not None and llm.config.experts:
        weight = llm.weights["layers.0.expert_down"]
        assert weight.sharding.shard_shape(weight.shape)[2] == llm.config.expert_mlp // 2


def test_olmo_3_has_its_theta_in_every_dialect(tmp_path):
    old = {n: v for n, v in OTHERS["olmo3"].items() if n not in ("rope_theta", "rope_scaling")}
    same = {"rope_type": "default", "rope_theta": 500000.0}
    dialects = (
        {},
        {"rope_theta": 500000.0},
        {"rope_parameters": same},
        {
            "rope_parameters": {
                "full_attention": same,
                "sliding_attention": {"rope_type": "default"},
            }
        },
    )
    configs = []
    for dialect in dialects:
        write_json(tmp_path / "config.json", old | dialect)
        configs.append(read_config(tmp_path))
    assert configs[1:] == configs[:-1] and len({*configs[0].encodings}) == 1


def test_buffers_of_old_files_are_no_weights(tmp_path):
    write_family(tmp_path, "neox")
    stored = load_file(tmp_path / "model.safetensors")
    buffers = {f"gpt_neox.layers.{i}.attention.{n}": np.zeros(1, np.float32)
               for i in range(3) for n in ("bias", "masked_bias")}  # fmt: skip
    save_file(stored | buffers, tmp_path / "model.safetensors")
    open_source(tmp_path).tensors()


def test_a_part_that_rotates_is_refused_by_a_policy_of_pairs(tmp_path):
    llm = models.load(write_family(tmp_path, "neox"))
    with pytest.raises(UserError, match="got a model that rotates a part of them"):
        Stream(llm, "triattention:capacity=16")


def test_recomputation_is_refused_before_the_first_run(tmp_path):
    llm = models.load(write_family(tmp_path, "mpt"))
    with pytest.raises(UserError, match=r"re-computation has no ALiBi, got .* family mpt"):
        compare.compare(llm, PROMPT, ["full", "recompute:window=16"], None, 0, None)
