"""Every known field of config.json and generation_config.json is applied, refused or harmless.

The tables of loading/known_fields.py are walked; transformers says which fields change logits.
"""

from __future__ import annotations

import json
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.generation.streams import Stream
from jaxkv.models.generation.text import sampling_for
from jaxkv.models.loading import known_fields
from jaxkv.models.loading.config import read_config
from jaxkv.models.loading.families import FAMILIES
from jaxkv.models.loading.gguf.header import Header
from jaxkv.models.loading.known_fields import APPLIED, HARMLESS, NEUTRAL
from jaxkv.models.loading.sampling_settings import read_sampling, sampling_of_gguf
from jaxkv.models.network.config import Config
from jaxkv.sampling import Sampling
from tests.models import test_parity as parity
from tests.models.folders import SIZES, YARN, write_json, write_model
from tests.tiny import write_tiny

TINY = SIZES | {"num_hidden_layers": 2, "max_position_embeddings": 128}
BASES: dict[str, dict[str, Any]] = {
    "llama": TINY | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": TINY
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24},
    "qwen2": TINY
    | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_window_layers": 1}
    | {"use_sliding_window": True, "sliding_window": 24},
    "qwen3": TINY
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_window_layers": 1}
    | {"use_sliding_window": True, "sliding_window": 24, "head_dim": 16},
}
# Field -> another value than in BASES; with more fields, where it needs them.
LOGITS: dict[str, Any] = {
    "rms_norm_eps": 0.1,
    "tie_word_embeddings": True,
    "rope_theta": 50.0,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0},
    "original_max_position_embeddings": {"rope_scaling": YARN, "": 32},
    "attention_bias": True,
    "mlp_bias": True,
    "sliding_window": 9,
    "use_sliding_window": False,
    "max_window_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
OTHERS: dict[str, Any] = {
    "architectures": ["Gpt"], "model_type": "gpt2", "hidden_act": "gelu", "vocab_size": 300,
    "hidden_size": 32, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 256, "dtype": "bfloat16",
    "torch_dtype": "float16", "bos_token_id": 5, "eos_token_id": 6, "sink_logit": "zero",
}  # fmt: skip


def changed(family: str, field: str) -> dict[str, Any]:
    """The base of a family with another value of one field."""
    value = (LOGITS | OTHERS)[field]
    nested = {}
    if isinstance(value, dict) and "" in value:
        nested = {name: its for name, its in value.items() if name}
        value = value[""]
    alone = {"architectures": []} if field == "model_type" else {}
    return BASES[family] | nested | alone | {field: value}


def read(folder: Path, fields: dict[str, Any]) -> Config:
    write_json(folder / "config.json", fields)
    return read_config(folder)


@cache
def logits(fields: str) -> np.ndarray:
    """Those of transformers for 60 tokens; a weight depends on its name and shape alone."""
    import torch
    import transformers

    fields = json.loads(fields)
    config = transformers.AutoConfig.for_model(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        random = np.random.default_rng(zlib.crc32(f"{name} {tuple(weight.shape)}".encode()))
        values = random.normal(size=tuple(weight.shape)) * 0.3
        weight.data = torch.tensor(values + ("norm" in name), dtype=torch.float32)
    ids = torch.arange(60)[None] * 7 % config.vocab_size
    with torch.no_grad():
        return model(ids).logits[0].numpy()


def reference_logits(fields: dict[str, Any]) -> np.ndarray:
    return logits(json.dumps(fields))


# Refused in a family that does not apply them, or 0, which asks for nothing.
SPECIAL = {"use_sliding_window", "layer_types", "max_window_layers"}
WALK = [(family, field) for family in APPLIED for field in sorted(APPLIED[family])]


@pytest.mark.parametrize("family, field", WALK)
def test_an_applied_field_changes_the_description(family, field, tmp_path):
    base = read(tmp_path, BASES[family])
    if field in ("architectures", "model_type", "hidden_act"):
        with pytest.raises(UserError, match=str(OTHERS[field]).strip("[]'")):
            read(tmp_path, changed(family, field))
    else:
        assert read(tmp_path, changed(family, field)) != base


@pytest.mark.parity
@pytest.mark.parametrize("family, field", [case for case in WALK if case[1] in LOGITS])
def test_an_applied_field_changes_the_logits_of_transformers(family, field):
    before = {name: value for name, value in changed(family, field).items() if name != field}
    before |= {field: BASES[family][field]} if field in BASES[family] else {}
    assert np.abs(reference_logits(changed(family, field)) - reference_logits(before)).max() > 1e-3


@pytest.mark.parity
@pytest.mark.parametrize("family", APPLIED)
def test_all_applied_fields_together_give_the_logits_of_transformers(family, tmp_path):
    rope = {"rope_theta": 50.0, "rope_scaling": YARN | {"beta_fast": 8.0, "truncate": False}}
    fields = {name: LOGITS[name] for name in set(LOGITS) & APPLIED[family] - {"rope_parameters"}}
    window = {"original_max_position_embeddings": 32, "use_sliding_window": True}
    window = {name: value for name, value in window.items() if name in APPLIED[family]}
    folder = write_model(tmp_path / family, BASES[family] | fields | window | rope)
    ids = np.random.default_rng(7).integers(0, 256, 100).tolist()
    (actual,) = parity.prefill(Stream(parity.untokenized(folder), parity.FULL), [ids])
    np.testing.assert_allclose(
        actual, parity.reference_logits(parity.reference(folder), ids), atol=parity.LIMIT
    )


@pytest.mark.parity
@pytest.mark.parametrize("family", APPLIED)
def test_no_other_field_changes_the_logits_of_transformers(family, tmp_path):
    """Harmless fields, and those that only another family applies, as the warning says."""
    base, expected = read(tmp_path, BASES[family]), reference_logits(BASES[family])
    odd = {"prefix": "x", "problem_type": "regression", "dtype": "float32", "id2label": {"0": "a"},
           "label2id": {"a": 0}, "task_specific_params": {"a": {}}, "auto_map": {}, "num_labels": 3,
           "attn_implementation": "eager", "_attn_implementation": "eager", "tokenizer_class": "A",
           "torchscript": False, "keys_to_ignore_at_inference": ["a"], "_commit_hash": "0",
           "transformers_version": "4.0.0", "_name_or_path": "a", "name_or_path": "a"}  # fmt: skip
    small = {"initializer_range": 0.5, "attention_dropout": 0.5, "hidden_dropout": 0.5}
    for field in HARMLESS:
        fields = BASES[family] | {field: (odd | small).get(field, 2 if "id" in field else True)}
        if field in ("pretraining_tp", "chunk_size_feed_forward", "max_sequence_length",
                     "model_max_length", "cross_attention_hidden_size"):  # fmt: skip
            fields[field] = 2
        assert read(tmp_path, fields) == base, field
        np.testing.assert_allclose(reference_logits(fields), expected, atol=1e-4, err_msg=field)
    for field in set(LOGITS) - APPLIED[family] - SPECIAL:
        fields = changed(family, field)
        with pytest.warns(UserWarning, match=f"no effect.*{field}"):
            assert read(tmp_path, fields) == base
        np.testing.assert_allclose(reference_logits(fields), expected, atol=1e-4, err_msg=field)


@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_fields_of_a_family_in_transformers_are_known(family, tmp_path, recwarn):
    """The default config of transformers loads as it saves it, and no field of it is unknown."""
    from transformers import AutoConfig

    AutoConfig.for_model(family.name, **SMALL.get(family.name, {})).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    config = read(tmp_path, fields | {"architectures": [family.architectures[0]]})
    assert config.family == family.name
    assert not [w for w in recwarn if "no effect" in str(w.message)]


SMALL = {"falcon": {"num_attention_heads": 64, "hidden_size": 4096}}
CONFIGS = json.loads(Path(__file__).with_name("published_configs.json").read_text("utf-8"))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_config_of_a_published_model_is_read_without_a_warning(name, tmp_path, recwarn):
    """By their fields, written down after the published files."""
    fields = CONFIGS[name]
    config = read(tmp_path, fields)
    assert not recwarn.list
    assert config.dtype == fields.get("torch_dtype", "bfloat16")
    length = fields.get("max_position_embeddings", fields.get("max_seq_len", config.context))
    assert config.context == (4096 if name in ("phi3-mini-128k", "phi4-mini") else length)
    assert sum(window is not None for window in config.windows) == WINDOWED.get(name, 0)


# Layers with a window of their own.
WINDOWED = {
    "gemma-2-2b": 13, "gemma-3-1b-it": 22, "gemma-3-270m": 15, "gemma-3-4b-it": 29,
    "gemma-3-27b-it": 52, "olmo3-7b": 24, "c4ai-command-r7b": 24, "exaone4-32b": 48,
    "phi3-mini-4k": 32, "phi3-mini-128k": 0, "gpt-oss-20b": 12,
}  # fmt: skip


@pytest.mark.parity
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_the_fields_of_transformers_are_known(name, tmp_path):
    """A config of transformers loads without a warning, and no setting of it is unknown."""
    import transformers

    fields = getattr(transformers, f"{name}Config")().to_dict()
    read(tmp_path, fields | {"architectures": [f"{name}ForCausalLM"]})
    known_names = APPLIED[name.lower()] | HARMLESS | set(NEUTRAL)
    assert not set(fields) - known_names
    settings = transformers.GenerationConfig().to_dict()
    assert not set(settings) - (
        known_fields.SAMPLED | known_fields.HARMLESS_SAMPLING | set(known_fields.NEUTRAL_SAMPLING)
    )


@pytest.mark.parametrize("field", NEUTRAL)
@pytest.mark.parametrize("family", APPLIED)
def test_a_field_of_other_models_is_refused(family, field, tmp_path):
    base = read(tmp_path, BASES[family])
    for value in (None, *NEUTRAL[field]):
        assert read(tmp_path, BASES[family] | {field: value}) == base
    first = next(iter(NEUTRAL[field]), None)
    wrong = {"a": 1} if first == {} else [1, 0] if first == [] else 7
    if isinstance(first, bool):
        wrong = not first
    with pytest.raises(UserError, match=f"{field} must be|quantized weights") as error:
        read(tmp_path, BASES[family] | {field: wrong})
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_a_folder_with_an_adapter_is_refused(tmp_path):
    """transformers applies it, where the package peft is installed."""
    write_json(tmp_path / "adapter_config.json", {"peft_type": "LORA"})
    with pytest.raises(UserError, match=r"has an adapter, adapter_config\.json, which"):
        read(tmp_path, BASES["llama"])


def test_unknown_fields_are_named_in_one_warning(tmp_path):
    silent = dict(zip("abcdef", (None, False, 0, 0.0, "", []), strict=True))
    base = read(tmp_path, BASES["llama"] | silent)
    with pytest.warns(UserWarning, match=r"no effect: depth 2.0, new 'x'$") as caught:
        assert read(tmp_path, BASES["llama"] | {"depth": 2.0, "new": "x"}) == base
    assert len(caught) == 1
    rope = {"rope_type": "linear", "factor": 2.0, "depth_factor": [1.0]}
    with pytest.warns(UserWarning, match=r"no effect: depth_factor \[1.0\]$"):
        read(tmp_path, BASES["llama"] | {"rope_scaling": rope})


@pytest.mark.parametrize("field", known_fields.NEUTRAL_SAMPLING)
def test_a_sampling_setting_without_effect_is_named(field, tmp_path):
    path, values = tmp_path / "generation_config.json", known_fields.NEUTRAL_SAMPLING[field]
    for value in (None, *values):
        write_json(path, {field: value, "max_length": 20, "pad_token_id": 0})
        read_sampling(tmp_path)
    write_json(path, {field: True if False in values else 3})
    with pytest.warns(UserWarning, match=f"generation_config.json: .* without: {field} "):
        read_sampling(tmp_path)


def test_sampling_settings_of_config_json_count_without_the_other_file(tmp_path):
    write_json(tmp_path / "config.json", BASES["llama"] | {"temperature": 0.3, "top_k": 9})
    read_config(tmp_path)  # without a warning
    sampling = read_sampling(tmp_path)
    assert (sampling.temperature, sampling.top_k) == (0.3, 9)
    write_json(tmp_path / "generation_config.json", {"top_p": 0.5})
    sampling = read_sampling(tmp_path)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.8, 0, 0.5)


Q = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
# max_position_embeddings, rope_scaling -> the context. Sources: the cards of Qwen2.5 and Qwen3,
# and `rope_scaling` in the documentation of transformers' LlamaConfig.
CONTEXTS = {
    "plain": (4096, None, 4096),
    "qwen2.5 recipe": (32768, Q, 131072),
    "qwen3 recipe": (40960, Q, 131072),
    "yarn, final length": (131072, Q, 131072),
    "yarn without an original length": (32768, {"type": "yarn", "factor": 4.0}, 131072),
    "yarn without a factor": (65536, {k: v for k, v in Q.items() if k != "factor"}, 65536),
    "linear": (4096, {"type": "linear", "factor": 4.0}, 16384),
    "linear, half": (2048, {"type": "linear", "factor": 2.5}, 5120),
    "llama3": (131072, {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}, 131072),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTEXTS)
def test_the_context_of_scaled_positions(case, tmp_path):
    length, rope, context = CONTEXTS[case]
    fields = {"max_position_embeddings": length, "rope_scaling": rope}
    assert read(tmp_path, BASES["llama"] | fields).context == context


QWEN = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}
POLICY = "streaming:sinks=1,window=15"


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        (None, Sampling(0.8)),
        ({"bos_token_id": 1, "temperature": None}, Sampling(0.8)),
        (QWEN, Sampling(0.7, 20, 0.8, 0.0, 1.1)),
        ({"top_p": 0.9}, Sampling(0.8, top_p=0.9)),
        ({"do_sample": False, "temperature": 0.7}, Sampling(0.0)),
        ({"top_k": -1}, Sampling(0.8)),
        ({"top_k": 50.0}, Sampling(0.8, 50)),
    ],
)
def test_generation_config(published, expected, tmp_path):
    if published is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(published))
    assert read_sampling(tmp_path) == expected


def test_the_header_of_a_gguf_file():
    fields = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.name": "x"}
    assert sampling_of_gguf(Header(Path("x.gguf"), fields, {})) == Sampling(0.6, 20)
    assert sampling_of_gguf(Header(Path("x.gguf"), {}, {})) == Sampling(0.8)
    other_types = {"general.sampling.temp": 1, "general.sampling.top_k": 20.0}
    assert sampling_of_gguf(Header(Path("x.gguf"), other_types, {})) == Sampling(1.0, 20)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("x" * 5000, "sampling.temp must be of type float, got 'x{59}; download"),
        (float("nan"), r"sampling.temp must be finite, got nan; download"),
        (-1.0, "temperature must be"),
    ],
)
def test_a_wrong_value_in_a_header_is_named(value, message):
    header = Header(Path("x.gguf"), {"general.sampling.temp": value}, {})
    with pytest.raises(UserError, match=rf"^x.gguf.*{message}"):
        sampling_of_gguf(header)


def test_a_wrong_value_names_the_file(tmp_path, unchecked):
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(UserError, match=r"generation_config.json: temperature must be a number"):
        read_sampling(tmp_path)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_tiny(tmp_path_factory.mktemp("sampled") / "tiny", num_hidden_layers=1)
    (folder / "generation_config.json").write_text('{"temperature": 3.0, "top_k": 200}')
    return models.load(folder)


def test_an_answer_is_sampled_as_published(llm):
    assert llm.sampling == Sampling(3.0, 200)
    settings = {"sampling": Sampling(3.0, 200)}, {"top_k": 200}, {}
    tokens = [models.generate(llm, "Hi", POLICY, 20, **arguments).tokens for arguments in settings]
    greedy = models.generate(llm, "Hi", POLICY, 20, temperature=0).tokens
    assert tokens[0] == tokens[1] == tokens[2] != greedy
    assert greedy == models.generate(llm, "Hi", POLICY, 20, sampling=Sampling()).tokens


def test_keywords_replace_single_settings(llm):
    assert sampling_for(llm, None, {"top_k": 5}) == Sampling(3.0, 5)
    assert sampling_for(llm, Sampling(), {}) == Sampling()


def test_a_conversation_is_sampled_as_published(llm):
    answers = [
        "".join(models.Conversation(llm, POLICY).say("Hi", sampling, 20))
        for sampling in (None, llm.sampling, Sampling())
    ]
    assert answers[0] == answers[1] != answers[2]
