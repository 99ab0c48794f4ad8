"""Config of GGUF files: the same description as from the folder of the same model."""

from __future__ import annotations

import dataclasses

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType as Value

from jaxkv.errors import UserError
from jaxkv.models.loading import config as folders
from jaxkv.models.loading.gguf import read_config, read_header
from tests.models.gguf.files import hf_model, write_gguf

SAME = ("llama2", "llama3", "llama32", "llama31", "qwen2", "qwen3", "smollm2", "tinyllama",
        "mistral_full", "llama_biases")  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_the_config_is_that_of_the_folder(name, tmp_path):
    config, weights = hf_model(tmp_path, name)
    ends = config["eos_token_id"]
    ends = ends if isinstance(ends, list) else [ends]

    def add(writer, _):
        if len(ends) > 1:
            writer.add_eot_token_id(ends[1])

    path = write_gguf(tmp_path / "model.gguf", config, weights, change=add)
    actual, expected = read_config(read_header(path)), folders.read_config(tmp_path)
    # The rope factors are float32, so scaled frequencies differ in the last of 32 bits.
    near = np.asarray(actual.encoding.frequencies), np.asarray(expected.encoding.frequencies)
    np.testing.assert_allclose(*near, rtol=1e-6, atol=1)
    if "31" not in name and "32" not in name:
        assert actual.encoding == expected.encoding
    family = {"mistral": "llama"}.get(expected.family, expected.family)
    assert dataclasses.replace(expected, encoding=actual.encoding, family=family) == actual


def test_a_window_makes_a_mistral(tmp_path):
    config, weights = hf_model(tmp_path, "mistral")
    path = write_gguf(
        tmp_path / "model.gguf", config, weights, change=lambda w, _: w.add_sliding_window(24)
    )
    loaded = read_config(read_header(path))
    assert loaded == folders.read_config(tmp_path) and set(loaded.windows) == {24}


@pytest.mark.parametrize("name", ["linear", "yarn"])
def test_scaled_positions(name, tmp_path):
    config, weights = hf_model(tmp_path, name)
    rope = config["rope_scaling"]

    def add(writer, _):
        writer.add_string(f"{writer.arch}.rope.scaling.type", name)
        writer.add_rope_scaling_factor(rope["factor"])
        if name == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])

    path = write_gguf(tmp_path / "model.gguf", config, weights, change=add)
    assert read_config(read_header(path)) == folders.read_config(tmp_path)


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_type_is_linear(key, tmp_path):
    config, weights = hf_model(tmp_path, "llama2")
    add = lambda writer, _: writer.add_float32(f"llama.{key}", 4.0)  # noqa: E731
    path = write_gguf(tmp_path / "m.gguf", config, weights, change=add)
    scaled = config | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    assert read_config(read_header(path)).encoding == (
        folders.config_of("llama", scaled, {}, path).encoding
    )


def test_the_id_of_no_token_is_none(tmp_path):
    change = lambda writer, _: writer.add_eot_token_id(2**32 - 1)  # noqa: E731
    path = write_gguf(tmp_path / "m.gguf", *hf_model(tmp_path, "llama2"), change=change)
    assert read_config(read_header(path)).eos == (2,)


# Field or tensor -> a function that changes it, and words of the message.
REFUSED = {
    "experts": (lambda w, t: w.add_expert_count(8), "llama.expert_count must be 0, got 8"),
    "partial rotation": (
        lambda w, t: w.add_uint32("llama.attention.value_length", 12),
        "llama.attention.value_length must be 16, got 12",
    ),
    "heads by layer": (
        lambda w, t: w.add_array("llama.attention.key_length", [16, 8, 16]),
        r"llama.attention.key_length must be the same for all layers, got \[16, 8, 16\]",
    ),
    "rope kind": (
        lambda w, t: w.add_string("llama.rope.scaling.type", "longrope"),
        "unsupported llama.rope.scaling.type 'longrope'; supported: none, linear, yarn",
    ),
    "no rope factor": (
        lambda w, t: w.add_string("llama.rope.scaling.type", "linear"),
        "missing field llama.rope.scaling.factor; download it again",
    ),
    "rope factors": (
        lambda w, t: t.update({"rope_freqs.weight": np.ones(3, "f4")}),
        r"rope_freqs.weight is \[3\], its metadata says \[8\]",
    ),
    "negative rope factors": (
        lambda w, t: t.update({"rope_freqs.weight": -np.ones(8, "f4")}),
        "rope_freqs.weight must be above 0 and finite",
    ),
    "logit scale": (lambda w, t: w.add_logit_scale(2.0), "llama.logit_scale must be 0 or 1"),
    "no embedding": (lambda w, t: t.pop("token_embd.weight"), "missing tensor token_embd.weight"),
    "another type": (
        lambda w, t: w.add_string("llama.rope.scaling.factor", "x") or w.add_string(
            "llama.rope.scaling.type", "linear"
        ),
        "llama.rope.scaling.factor must be of type float, got 'x'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_models_are_refused(case, tmp_path):
    change, message = REFUSED[case]
    path = write_gguf(tmp_path / "m.gguf", *hf_model(tmp_path, "llama2"), change=change)
    with pytest.raises(UserError, match=message) as error:
        read_config(read_header(path))
    assert str(path) in str(error.value) and "\n" not in str(error.value)


# A field under "llama.", or another with a dot before it -> its value, and the end of the message.
FIELDS = {
    "width below 0": ("embedding_length", -1, "must be from 1 to 2147483647, got -1; download"),
    "width of text": ("embedding_length", "abc", "must be of type int, got 'abc'; download"),
    "width of reals": ("embedding_length", 64.0, "must be of type int, got 64.0; download"),
    "heads by layer": ("attention.head_count", [4, 2], r"same for all layers, got \[4, 2\]; use"),
    "KV heads": (
        "attention.head_count_kv", 7,
        "num_attention_heads must be a multiple of num_key_value_heads, got 4 and 7",
    ),
    "width and heads": (
        "attention.head_count", 12,
        "hidden_size must be a multiple of num_attention_heads, got 64 and 12",
    ),
    "odd head dim": ("attention.key_length", 15, "need an even head dim, got 15"),
    "eps": ("attention.layer_norm_rms_epsilon", 0.0, "must be above 1e-30 and .*, got 0.0; down"),
    "no finite eps": (
        "attention.layer_norm_rms_epsilon", float("nan"), "must be finite, got nan; download",
    ),
    "rotated part": ("rope.dimension_count", 8, "must be 16, got 8: .*; use another"),
    "EOS": (
        ".tokenizer.ggml.eos_token_id", 2**32 - 2, "must be from 0 to 255, got 4294967294; down",
    ),
    "line": (".general.architecture", "a\nb", r"unsupported architecture 'a\\nb'; supported"),
    "long": (".general.architecture", "x" * 5000, "unsupported architecture 'x{59}; supported"),
}  # fmt: skip


def value_type(value: object) -> Value:
    kinds = {int: Value.INT64, float: Value.FLOAT64, str: Value.STRING, list: Value.ARRAY}
    return kinds[type(value)]


@pytest.mark.parametrize("case", FIELDS)
def test_fields_are_refused_under_their_own_names(case, tmp_path):
    name, value, message = FIELDS[case]
    key = name[1:] if name[0] == "." else f"llama.{name}"

    def change(writer, _):
        fields = writer.kv_data[0]
        if "scaling" in name:
            writer.add_string("llama.rope.scaling.type", "yarn")
            writer.add_float32("llama.rope.scaling.factor", 4.0)
        fields[key] = gguf.gguf_writer.GGUFValue(value, value_type(value), Value.INT32)
        if type(value) is list and type(value[0]) is str:
            fields[key].sub_type = Value.STRING

    path = write_gguf(tmp_path / "m.gguf", *hf_model(tmp_path, "llama2"), change=change)
    with pytest.raises(UserError, match=message) as error:
        read_config(read_header(path))
    line = str(error.value)
    assert str(path) in line and "\n" not in line and len(line) < len(str(path)) + 200
    assert "head" in case.lower() or "arch" in key or key in line, line


@pytest.mark.parametrize("shape", [(), (0, 4)])
def test_an_embedding_without_rows_is_refused(shape, tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf", *hf_model(tmp_path, "llama2"),
        change=lambda w, t: t.update({"token_embd.weight": np.ones(shape, "f4")}),
    )  # fmt: skip
    with pytest.raises(UserError, match=r"token_embd.weight must have rows and columns, got"):
        read_config(read_header(path))


def test_a_missing_field_is_named(tmp_path):
    def drop(writer, _):
        writer.kv_data[0].pop("llama.block_count")

    path = write_gguf(tmp_path / "m.gguf", *hf_model(tmp_path, "llama2"), change=drop)
    with pytest.raises(UserError, match=r"missing field llama.block_count; download"):
        read_config(read_header(path))


def test_other_architectures_are_refused(tmp_path):
    def rename(writer, _):
        writer.kv_data[0]["general.architecture"].value = "gemma2"

    path = write_gguf(tmp_path / "m.gguf", *hf_model(tmp_path, "llama2"), change=rename)
    with pytest.raises(
        UserError, match="unsupported architecture 'gemma2'; supported: llama, mist"
    ):
        read_config(read_header(path))
