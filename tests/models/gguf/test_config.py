"""Config of GGUF files: that of the folder; every key is applied, refused or harmless; rope."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType as Value

from jaxkv.cli import main
from jaxkv.errors import UserError
from jaxkv.models.loading import config as folders
from jaxkv.models.loading import known_fields
from jaxkv.models.loading.gguf import read_config, read_header
from jaxkv.models.loading.sampling_settings import sampling_of_gguf
from jaxkv.models.network.config import Config
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


def test_the_id_of_no_token_is_none(tmp_path):
    change = lambda writer, _: writer.add_eot_token_id(2**32 - 1)
    path = write_gguf(tmp_path / "m.gguf", *hf_model(tmp_path, "llama2"), change=change)
    assert read_config(read_header(path)).eos == (2,)


Change = Callable[[gguf.GGUFWriter, dict[str, np.ndarray]], object]


def put(key: str, value: Any) -> Change:
    """Replace a field, after "llama." unless the key begins with a dot."""
    kinds = {int: Value.INT64, float: Value.FLOAT64, str: Value.STRING, list: Value.ARRAY}
    field = gguf.gguf_writer.GGUFValue(value, kinds[type(value)], Value.INT32)
    key = key[1:] if key[0] == "." else f"llama.{key}"
    return lambda writer, _: writer.kv_data[0].update({key: field})


def tensor(name: str, value: np.ndarray) -> Change:
    return lambda _, tensors: tensors.update({name: value})


# Fault -> a function that makes it, and words of the message.
REFUSED: dict[str, tuple[Change, str]] = {
    "heads by layer": (
        put("attention.key_length", [16, 8, 16]),
        r"llama.attention.key_length must be the same for all layers, got \[16, 8, 16\]",
    ),
    "rope kind": (
        put("rope.scaling.type", "longrope"),
        "unsupported llama.rope.scaling.type 'longrope'; supported: none, linear, yarn",
    ),
    "no rope factor": (
        put("rope.scaling.type", "linear"),
        "missing field llama.rope.scaling.factor; download it again",
    ),
    "rope factors": (
        tensor("rope_freqs.weight", np.ones(3, "f4")),
        r"rope_freqs.weight is \[3\], its metadata says \[8\]",
    ),
    "negative rope factors": (
        tensor("rope_freqs.weight", -np.ones(8, "f4")),
        "rope_freqs.weight must be above 0 and finite",
    ),
    "no embedding": (lambda _, t: t.pop("token_embd.weight"), "missing tensor token_embd.weight"),
    "a scalar embedding": (
        tensor("token_embd.weight", np.ones((), "f4")), "must have rows and columns, got"
    ),
    "an empty embedding": (
        tensor("token_embd.weight", np.ones((0, 4), "f4")), "must have rows and columns, got"
    ),
    "width below 0": (
        put("embedding_length", -1),
        "hidden_size must be a whole number .*, got -1",
    ),
    "width of text": (
        put("embedding_length", "abc"), "llama.embedding_length must be of type int, got 'abc'; do"
    ),
    "KV heads": (
        put("attention.head_count_kv", 7),
        "num_attention_heads must be a multiple of num_key_value_heads, got 4 and 7",
    ),
    "no finite eps": (
        put("attention.layer_norm_rms_epsilon", float("nan")),
        "layer_norm_rms_epsilon must be finite, got nan; download",
    ),
    "EOS": (
        put(".tokenizer.ggml.eos_token_id", 2**32 - 2),
        "eos_token_id must be from 0 to 255, got 4294967294; down",
    ),
    "a line": (put(".general.architecture", "a\nb"), r"architecture 'a\\nb'; supported: llama"),
    "no model": (put(".general.type", "mmproj"), "general.type must be model, got 'mmproj'"),
    "long": (put(".general.architecture", "x" * 5000), "architecture 'x{59}; supported"),
    "split count": (put(".split.count", "x"), "split.count must be of type int, got 'x'"),
    "long name": (tensor("x" * 65, np.ones(3, "f4")), "at most 64 printable .*, got 'x{59};"),
    "no layers": (
        lambda w, _: w.kv_data[0].pop("llama.block_count"), "missing field llama.block_count; down"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_models_are_refused_in_one_line(case, tmp_path):
    change, message = REFUSED[case]
    path = write_gguf(tmp_path / "m.gguf", *hf_model(tmp_path, "llama2"), change=change)
    with pytest.raises(UserError, match=message) as error:
        read_config(read_header(path))
    line = str(error.value)
    assert str(path) in line and "\n" not in line and len(line) < len(str(path)) + 300


SCALING = "rope.scaling."
FACTORS = np.geomspace(1, 6, 8).astype("f4")


def write(
    folder: Path, fields: dict[str, Any], factors: bool = False, name: str = "llama2"
) -> Path:
    """A model with more keys, after "ARCHITECTURE." unless they begin with a dot."""

    def change(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        kinds = {bool: Value.BOOL, int: Value.INT32, float: Value.FLOAT32, str: Value.STRING}
        for key, value in fields.items():
            key = key[1:] if key[0] == "." else f"{writer.arch}.{key}"
            kind, item = kinds.get(type(value), Value.ARRAY), kinds[type(np.ravel(value)[0].item())]
            writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value, kind, item)
        if factors:
            tensors["rope_freqs.weight"] = FACTORS

    return write_gguf(folder / "model.gguf", *hf_model(folder, name), change=change)


def read(
    folder: Path, fields: dict[str, Any], factors: bool = False, name: str = "llama2"
) -> Config:
    return read_config(read_header(write(folder, fields, factors, name)))


def rope_of_llama_cpp(fields: dict[str, Any], factors: bool) -> tuple[np.ndarray, float]:
    """Radians per token and amplitude, as ggml_rope_cache_init and rope_yarn compute them.

    Sources: ggml/src/ggml-cpu/ops.cpp and src/llama-context.cpp; head dim 16, context 512.
    """
    theta = fields.get("rope.freq_base", 10000.0)
    stretch = fields.get(SCALING + "factor") or fields.get("rope.scale_linear") or 1.0
    kind = fields.get(SCALING + "type", "linear")
    stretch = 1.0 if kind == "none" else stretch
    original = fields.get(SCALING + "original_context_length", 512)
    fast, slow = (fields.get(f"{SCALING}yarn_beta_{n}", d) for n, d in (("fast", 32), ("slow", 1)))
    low, high = (
        16 * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        for rotations in (fast, slow)
    )
    low, high = max(0, math.floor(low)), min(15, math.ceil(high))
    angles = []
    for pair in range(8):
        extrapolated = theta ** (-2 * pair / 16) / (FACTORS[pair] if factors else 1)
        interpolated = extrapolated / stretch
        ramp = 1 - min(1, max(0, (pair - low) / max(0.001, high - low))) if kind == "yarn" else 0
        angles.append(interpolated * (1 - ramp) + extrapolated * ramp)
    amplitude = fields.get(SCALING + "attn_factor", 1.0)
    return np.array(angles), amplitude * (1 + 0.1 * math.log(stretch) if kind == "yarn" else 1)


YARN = {SCALING + "type": "yarn", SCALING + "factor": 4.0}
LINEAR = {SCALING + "type": "linear", SCALING + "factor": 4.0}
ROPE: dict[str, dict[str, Any]] = {
    "plain": {},
    "base": {"rope.freq_base": 500.0},
    "none": {SCALING + "type": "none"},
    "none of 1": {SCALING + "type": "none", SCALING + "factor": 1.0},
    "linear": LINEAR,
    "linear without a type": {SCALING + "factor": 4.0},
    "old linear": {"rope.scale_linear": 4.0},
    "old linear of none": {"rope.scale_linear": 0.0},
    "both linear": LINEAR | {"rope.scale_linear": 4.0},
    "linear, trained": LINEAR | {SCALING + "finetuned": True}
    | {SCALING + "original_context_length": 64},
    "yarn": YARN,
    "yarn, base": YARN | {"rope.freq_base": 500.0, SCALING + "finetuned": False},
    "yarn, length": YARN | {SCALING + "original_context_length": 64},
    "yarn, betas": YARN | {SCALING + "yarn_beta_fast": 16.0, SCALING + "yarn_beta_slow": 8.0},
    "yarn, old factor": {SCALING + "type": "yarn", "rope.scale_linear": 4.0},
    "yarn, as llama.cpp computes it": YARN | {SCALING + "yarn_ext_factor": 1.0}
    | {SCALING + "yarn_attn_factor": 1 + 0.1 * math.log(4)},
    "rotated part": {"rope.dimension_count": 16},
}  # fmt: skip


@pytest.mark.parametrize("amplitude", [None, 1.5])
@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize("case", ROPE)
def test_settings_of_rope_multiply_as_in_llama_cpp(case, factors, amplitude, tmp_path):
    fields = ROPE[case] | ({SCALING + "attn_factor": amplitude} if amplitude else {})
    encoding = read(tmp_path, fields, factors).encoding
    angles, expected = rope_of_llama_cpp(fields, factors)
    actual = np.array(encoding.frequencies) * 2 * math.pi / 2**32
    np.testing.assert_allclose(actual, angles, rtol=1e-6, atol=2e-9)
    assert encoding.amplitude == pytest.approx(expected, rel=1e-6)


EXCLUDED: dict[str, dict[str, Any]] = {
    "two factors": LINEAR | {"rope.scale_linear": 2.0},
    "none and a factor": {SCALING + "type": "none", SCALING + "factor": 4.0},
    "none and an old factor": {SCALING + "type": "none", "rope.scale_linear": 4.0},
    "linear and beta": LINEAR | {SCALING + "yarn_beta_fast": 16.0},
    "none and beta": {SCALING + "yarn_beta_slow": 8.0},
    "linear and extrapolation": LINEAR | {SCALING + "yarn_ext_factor": 1.0},
    "yarn without extrapolation": YARN | {SCALING + "yarn_ext_factor": 0.0},
    "two amplitudes": YARN | {SCALING + "yarn_attn_factor": 2.0},
    "two bases": {"rope.freq_base_swa": 500.0},
    "two parts": {"rope.dimension_count": 8},
    "sections": {"rope.dimension_sections": [4, 4, 0, 0]},
    "alpha": YARN | {SCALING + "alpha": 1000.0},
}


@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize("case", EXCLUDED)
def test_settings_of_rope_that_exclude_each_other_end_in_one_line(case, factors, tmp_path, capsys):
    path = write(tmp_path, EXCLUDED[case], factors)
    assert main(["generate", "Hello", "--model", str(path)]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert printed.out == "" and line.startswith(f"jaxkv: error: {path}: ") and "rope." in line


@pytest.mark.parametrize("rope, context", [
    ({}, 512),
    (YARN, 2048),
    (YARN | {SCALING + "original_context_length": 512}, 2048),
    (YARN | {SCALING + "original_context_length": 64}, 512),
    (LINEAR, 2048),
    ({SCALING + "original_context_length": 64}, 512),
])  # fmt: skip
def test_the_context_of_scaled_positions(rope, context, tmp_path):
    assert read(tmp_path, rope).context == context


# Applied keys that `write_gguf` does not write, or writes with these values.
OTHER: dict[str, Any] = {
    "embedding_length": 128, "feed_forward_length": 100, "block_count": 2, "context_length": 64,
    "attention.head_count": 8, "attention.head_count_kv": 2, "attention.key_length": 32,
    "attention.value_length": 32, "attention.layer_norm_rms_epsilon": 0.1,
    "attention.sliding_window": 9, "rope.dimension_count": 8, "rope.freq_base": 500.0,
    "rope.scale_linear": 2.0, SCALING + "type": "yarn", SCALING + "factor": 2.0,
    SCALING + "original_context_length": 64, SCALING + "attn_factor": 2.0,
    SCALING + "yarn_beta_fast": 8.0, SCALING + "yarn_beta_slow": 8.0,
}  # fmt: skip
BASE = {
    "original_context_length": YARN, "yarn_beta_fast": YARN, "yarn_beta_slow": YARN, "type": LINEAR
}  # fmt: skip


SIZES_OF_HEADS = ("embedding_length", "attention.head_count", "attention.key_length",
                  "attention.value_length", "rope.dimension_count")  # fmt: skip


@pytest.mark.parametrize("key", sorted(known_fields.GGUF_APPLIED))
def test_an_applied_key_changes_the_description(key, tmp_path):
    base = BASE.get(key.removeprefix(SCALING), {})
    before = read(tmp_path, base)
    if key in SIZES_OF_HEADS:  # they must agree with each other
        with pytest.raises(UserError, match=r"must be \d+, got|must be a multiple of"):
            read(tmp_path, base | {key: OTHER[key]})
    else:
        assert read(tmp_path, base | {key: OTHER[key]}) != before


@pytest.mark.parametrize("key", known_fields.GGUF_NEUTRAL)
def test_a_key_of_other_models_is_refused(key, tmp_path):
    base, values = read(tmp_path, {}), known_fields.GGUF_NEUTRAL[key]
    for value in values:
        if value != []:
            assert read(tmp_path, {key: value}) == base
    first = next(iter(values), 0)
    wrong = not first if isinstance(first, bool) else 7.5
    wrong = {str: "x", list: [1, 2]}.get(type(first), wrong)
    rule = f"llama.{key} must be|exclude each other: .*{key}"
    with pytest.raises(UserError, match=rule) as error:
        read(tmp_path, {key: wrong})
    assert "\n" not in str(error.value)


def test_a_window_that_llama_cpp_does_not_apply_is_refused(tmp_path):
    assert read(tmp_path, {"attention.sliding_window": 512}, name="qwen2").windows == (None,) * 3
    with pytest.raises(UserError, match=r"qwen2\.attention\.sliding_window must be"):
        read(tmp_path, {"attention.sliding_window": 24}, name="qwen2")


def test_harmless_and_unknown_keys(tmp_path):
    harmless = {key: True if "finetuned" in key else 3 for key in known_fields.GGUF_HARMLESS}
    base = read(tmp_path, {})
    assert read(tmp_path, harmless | {".general.name": "x", ".split.count": 0}) == base
    with pytest.warns(UserWarning, match=r"no effect: llama.depth 2.0$"):
        assert read(tmp_path, {"depth": 2.0, "nothing": 0}) == base
    with pytest.raises(UserError, match=r"unknown field llama\.expert_weights_scale, got 2\.5"):
        read(tmp_path, {"expert_weights_scale": 2.5})


@pytest.mark.parametrize("key", known_fields.GGUF_NEUTRAL_SAMPLING)
def test_a_sampling_setting_without_effect_is_named(key, tmp_path):
    (neutral,) = known_fields.GGUF_NEUTRAL_SAMPLING[key]
    for value in (neutral, "x" if neutral == "" else 1.5):
        header = read_header(write(tmp_path, {f".general.sampling.{key}": value}))
        if value == neutral:
            sampling_of_gguf(header)
        else:
            with pytest.warns(UserWarning, match=f"answers are sampled without: {key} "):
                sampling_of_gguf(header)


def test_the_keys_of_the_package_are_known():
    """A key that the package writes for attention or rope of any model is in a table."""
    names = {
        key.removeprefix("{arch}.")
        for keys in (gguf.Keys.Attention, gguf.Keys.Rope)
        for key in vars(keys).values()
        if isinstance(key, str) and key.startswith("{arch}.")
    }
    fields = known_fields.GGUF_APPLIED | known_fields.GGUF_HARMLESS | set(known_fields.GGUF_NEUTRAL)
    unused = {"layer_norm_epsilon", "group_norm_epsilon", "group_norm_groups", "indexer.head_count",
             "relative_buckets_count", "indexer.key_length", "indexer.top_k"}  # fmt: skip
    unknown = {name for name in names - fields if "lora" not in name}
    assert unknown <= {f"attention.{name}" for name in unused}
