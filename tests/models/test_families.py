"""Families that are not of Llama's form, and text parts of models that read pictures too.

Streaming on GPT-NeoX, MPT and Falcon equals plain numpy over the published tensors. The numpy model
attends, for each query, to the sinks and the window, whose positions are their indices in the cache
(StreamingLLM, section 3.2). Neither its code nor its weights come from jaxkv.
"""

from __future__ import annotations

import json
import math

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
from tests.models.folders import FAMILIES, OTHERS, ROPES, write_json, write_model
from tests.models.test_parity import FULL, LIMIT, prefill, untokenized
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


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
          "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
TEXT = {"gemma3": "gemma3", "mistral3": "ministral3"}


def write_tower(folder, name):
    """A random model of transformers, as it saves it; returns the model."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = {k: v for k, v in OTHERS[TEXT[name]].items() if k not in ("architectures", "dtype")}
    vision = VISION | {"model_type": {"gemma3": "siglip_vision_model", "mistral3": "pixtral"}[name]}
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, text_config=text, vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parity
@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("name", TEXT)
def test_the_text_part_equals_transformers(name, older, tmp_path):
    import torch

    model = write_tower(tmp_path, name)
    if older:  # the names of files before transformers 4.52
        path = tmp_path / "model.safetensors"
        stored = {n.replace("model.language_model.", "language_model.model."): w
                  for n, w in load_file(path).items()}  # fmt: skip
        save_file(stored, path)
    ids = np.random.default_rng(2).integers(3, 250, 100).tolist()
    llm = untokenized(tmp_path)
    (actual,) = prefill(Stream(llm, FULL), [ids])
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(actual - expected).max() < LIMIT * max(1, np.abs(expected).max())


def test_a_text_part_of_another_kind_is_refused(tmp_path):
    fields = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    for text, said in (({"model_type": "llama"}, "got 'llama'"), (None, "got None")):
        write_json(tmp_path / "config.json", fields | {"text_config": text})
        with pytest.raises(UserError, match=f"must be of model_type gemma3_text, {said}"):
            read_config(tmp_path)
    write_json(tmp_path / "config.json", {"architectures": ["Llama4ForConditionalGeneration"]})
    with pytest.raises(UserError, match="unsupported architecture Llama4ForConditionalGeneration"):
        read_config(tmp_path)


def test_the_published_config_of_gemma_3_names_few_fields(tmp_path):
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024}  # fmt: skip
    fields = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
              "eos_token_id": [1, 106], "torch_dtype": "bfloat16", "text_config": text}  # fmt: skip
    write_json(tmp_path / "config.json", fields)
    config = read_config(tmp_path)
    assert (config.vocab, config.heads, config.kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert (config.context, config.eos, config.dtype) == (131072, (1, 106), "bfloat16")
    assert config.windows[4:6] == (1024, None) and config.encodings[4] != config.encodings[5]


def test_pictures_are_refused_and_towers_only_of_multimodal_models(tmp_path):
    write_family(tmp_path, "gemma3")
    text = json.loads((tmp_path / "config.json").read_text())
    path = tmp_path / "model.safetensors"
    tower = load_file(path) | {"vision_tower.a": np.zeros(2, np.float32)}
    save_file(tower, path)
    with pytest.raises(UserError, match=r"extra tensor vision_tower\.a"):
        models.load(tmp_path)
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "image_token_index": 7}
    write_json(tmp_path / "config.json", outer | {"text_config": text})
    llm = models.load(tmp_path)
    with pytest.raises(UserError, match="a picture cannot be read, got its token id 7"):
        models.score(llm, [0, 5, 7, 9], "full")


SINKS, WINDOW, TOKENS = 2, 14, 60  # three times the cache, and more
PREFIXES = {"neox": "gpt_neox.", "mpt": "transformer.", "falcon7b": "transformer."}


@pytest.mark.parametrize("chunk", [1, 5, 16, 29, 60])
@pytest.mark.parametrize("name", PREFIXES)
def test_logits_equal_numpy(name, chunk, tmp_path):
    llm = untokenized(write_model(tmp_path, name))
    ids = np.random.default_rng(3).integers(0, 256, TOKENS).tolist()
    stream = Stream(llm, f"streaming:sinks={SINKS},window={WINDOW}")
    (actual,) = prefill(stream, [ids], (chunk,) * math.ceil(TOKENS / chunk))
    weights = {
        n: w.astype(np.float64) for n, w in load_file(tmp_path / "model.safetensors").items()
    }
    expected = numpy_logits(name, weights, FAMILIES[name], ids)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=LIMIT)


def numpy_logits(name, weights, fields, ids):
    """[T,V] in float64."""
    prefix = PREFIXES[name]
    inner = {n.removeprefix(prefix): w for n, w in weights.items()}
    embed = next(inner[n] for n in ("embed_in.weight", "wte.weight", "word_embeddings.weight")
                 if n in inner)  # fmt: skip
    blocks = {"neox": "layers", "mpt": "blocks", "falcon7b": "h"}[name]
    x = embed[ids]
    for i in range(3):
        block = {n.removeprefix(f"{blocks}.{i}."): w for n, w in inner.items()}
        x = {"neox": neox, "mpt": mpt, "falcon7b": falcon}[name](block, x, fields)
    final = {"neox": "final_layer_norm", "mpt": "norm_f", "falcon7b": "ln_f"}[name]
    return norm(inner, final, x) @ inner.get("embed_out.weight", embed).T


def neox(block, x, fields):
    heads = fields["num_attention_heads"]
    fused = dense(block, "attention.query_key_value", norm(block, "input_layernorm", x))
    q, k, v = fused.reshape(len(x), heads, 3, -1).transpose(2, 0, 1, 3)
    rotated = int(q.shape[-1] * fields.get("rotary_pct", 0.25))
    attended = dense(block, "attention.dense", attend(q, k, v, rotated=rotated))
    h = norm(block, "post_attention_layernorm", x)
    return (
        x + attended + dense(block, "mlp.dense_4h_to_h", gelu(dense(block, "mlp.dense_h_to_4h", h)))
    )


def mpt(block, x, fields):
    heads = fields["n_heads"]
    fused = dense(block, "attn.Wqkv", norm(block, "norm_1", x))
    q, k, v = (a.reshape(len(x), heads, -1) for a in np.split(fused, 3, axis=1))
    slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)  # a power of two
    x = x + dense(block, "attn.out_proj", attend(q, k, v, slopes=slopes))
    return x + dense(
        block, "ffn.down_proj", gelu(dense(block, "ffn.up_proj", norm(block, "norm_2", x)))
    )


def falcon(block, x, fields):
    heads = fields["num_attention_heads"]
    h = norm(block, "input_layernorm", x)
    fused = dense(block, "self_attention.query_key_value", h).reshape(len(x), heads + 2, -1)
    q, k, v = fused[:, :heads], fused[:, heads : heads + 1], fused[:, heads + 1 :]
    attended = attend(q, *(np.repeat(a, heads, 1) for a in (k, v)), rotated=q.shape[-1])
    mlp = dense(block, "mlp.dense_4h_to_h", gelu(dense(block, "mlp.dense_h_to_4h", h)))
    return x + dense(block, "self_attention.dense", attended) + mlp


def attend(q, k, v, rotated=0, slopes=None):
    """[T,NH]: each query to the sinks and the newest keys, at their indices in the cache."""
    out = np.empty((len(q), q.shape[1], q.shape[2]))
    for t in range(len(q)):
        cached = [s for s in range(t + 1) if s < SINKS or s > t - WINDOW]
        at = np.arange(len(cached))
        keys, query = rotate(k[cached], at, rotated), rotate(q[t][None], at[-1:], rotated)[0]
        logits = np.einsum("nh,snh->ns", query, keys) * q.shape[-1] ** -0.5
        if slopes is not None:
            logits -= slopes[:, None] * (at[-1] - at)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[t] = np.einsum("ns,snh->nh", weights, v[cached])
    return out.reshape(len(q), -1)


def rotate(x, positions, rotated):
    """The first dims of [S,N,H], in pairs (i, i + rotated / 2)."""
    if not rotated:
        return x
    frequencies = 10000.0 ** (-np.arange(0, rotated, 2) / rotated)
    angles = (positions[:, None] * frequencies)[:, None]
    first, second = x[..., : rotated // 2], x[..., rotated // 2 : rotated]
    turned = (first * np.cos(angles) - second * np.sin(angles),
              second * np.cos(angles) + first * np.sin(angles))  # fmt: skip
    return np.concatenate([*turned, x[..., rotated:]], axis=-1)


def dense(block, name, x):
    return x @ block[f"{name}.weight"].T + block.get(f"{name}.bias", 0.0)


def norm(block, name, x):
    centred = x - x.mean(axis=-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    return normed * block[f"{name}.weight"] + block.get(f"{name}.bias", 0.0)


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
