"""Weights of GGUF files: every type, the order of rows, named mismatches, and peak memory."""

from __future__ import annotations

from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.loading.gguf import read_config, read_header
from jaxkv.models.loading.gguf import weights as module
from jaxkv.models.loading.gguf.weights import read, supported
from jaxkv.models.loading.source import open_source
from jaxkv.models.loading.tensors import Tensor
from jaxkv.models.loading.weight_names import shapes
from tests.models.gguf.files import hf_model, paired, write_gguf
from tests.peak_memory import peak_of

NAMES = """F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K TQ1_0 TQ2_0 MXFP4 NVFP4
IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ1_S IQ1_M IQ4_NL IQ4_XS"""
WEIGHT_TYPES = [Type[name] for name in NAMES.split() if hasattr(Type, name)]  # NVFP4 is recent


def load(path: Path, dtype: str = "float32", **options) -> dict[str, jax.Array]:
    return open_source(path).weights(dtype, **options)


def check(loaded: dict[str, jax.Array], path: Path, written: dict[str, np.ndarray]) -> None:
    table = shapes(read_config(read_header(path)))
    assert list(loaded) == list(table)
    for name, (gguf_name, shape) in table.items():
        assert loaded[name].shape == shape
        np.testing.assert_array_equal(np.asarray(loaded[name]), written[gguf_name], err_msg=name)


# tinyllama and smollm2 have fewer KV heads than query heads, which are permuted by their own
# number; smollm2, llama32 and qwen2 have a tied head; rows of qwen2 and qwen3 are not permuted.
@pytest.mark.parametrize(
    "name", ["llama2", "tinyllama", "smollm2", "llama32", "llama_biases", "mistral", "qwen2",
             "qwen3"],
)  # fmt: skip
def test_every_family(name, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WINDOW", 1000)  # several pieces per tensor, the last one shorter
    config, written = hf_model(tmp_path, name)
    check(load(path := write_gguf(tmp_path / "m.gguf", config, written)), path, written)


@pytest.mark.parametrize("window", [None, 24])
def test_a_file_of_the_architecture_mistral_agrees_with_one_of_llama(window, tmp_path):
    config, written = hf_model(tmp_path, "mistral")
    assert config["num_attention_heads"] != config["num_key_value_heads"]

    def change(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        if window is not None:
            writer.add_sliding_window(window)

    llms = []
    for name in ("llama", "mistral"):
        path = tmp_path / f"{name}.gguf"
        write_gguf(path, config, written, change=change, architecture=name)
        header = read_header(path)
        assert header.fields["general.architecture"] == name
        assert header.fields.get(f"{name}.attention.sliding_window") == window
        check(load(path), path, written)
        llms.append(models.load(path))
    assert {llm.config.windows for llm in llms} == {(window,) * 3}
    ids = np.random.default_rng(0).integers(3, 250, 60).tolist()
    losses = [models.score(llm, ids, "full:start=64").losses for llm in llms]
    np.testing.assert_array_equal(*losses)


@pytest.mark.parametrize("kind", WEIGHT_TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("heads", [None, 2])
def test_every_type_is_dequantised_as_the_package_does(kind, heads, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WINDOW", 1600)
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    block, rows, columns = gguf.GGML_QUANT_SIZES[kind][0], 8, 512
    # Small bytes, so that scales are finite.
    stored = np.random.default_rng(0).integers(0, 60, (rows, columns // block * block_bytes))
    stored = stored.astype(np.uint8)
    (tmp_path / "t").write_bytes(bytes(7) + stored.tobytes())
    tensor = Tensor(tmp_path / "t", "w", kind.value, (rows, columns), 7, stored.size)
    expected = gguf.dequantize(stored, kind).reshape(rows, columns)
    got = read(tensor, np.dtype("f4"), heads)
    assert supported(kind.value)
    np.testing.assert_array_equal(got if heads is None else paired(got, heads), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_and_progress(dtype, tmp_path):
    config, written = hf_model(tmp_path, "llama32")
    path = write_gguf(tmp_path / "m.gguf", config, written)
    seen: list[tuple[int, int]] = []
    loaded = load(path, dtype, progress=lambda done, total: seen.append((done, total)))
    check(loaded, path, {name: value.astype(jnp.dtype(dtype)) for name, value in written.items()})
    assert seen == sorted(seen) and len(seen) == len(loaded)
    assert seen[-1] == (total := sum(a.nbytes for a in loaded.values()), total)


def test_weights_load_with_a_sharding(tmp_path):
    config, written = hf_model(tmp_path, "llama2")
    path = write_gguf(tmp_path / "m.gguf", config, written)
    split = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("model",)), P("model"))
    loaded = load(path, sharding=split)
    check(loaded, path, written)
    assert loaded["layers.0.q"].sharding == split


def test_split_files_are_read_as_one(tmp_path):
    config, written = hf_model(tmp_path, "llama2")
    write_gguf(tmp_path / "m.gguf", config, written, split_max_tensors=9)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 2
    for path in (parts[0], parts[-1]):  # any of them names the model
        check(load(path), path, written)
    parts[1].unlink()
    with pytest.raises(
        UserError, match=r"split files, and .* lacks m-00002-of-0000\d.gguf; download"
    ):
        read_header(parts[0])
    parts[0].rename(tmp_path / "first.gguf")
    with pytest.raises(UserError, match=r"first.gguf is one of \d split files, but its name"):
        read_header(tmp_path / "first.gguf")


@pytest.mark.parametrize("name", ["00001-of-00000", "00000-of-00002", "00003-of-00002"])
def test_numbers_of_split_files(name, tmp_path):
    (tmp_path / f"m-{name}.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=f"must be from 1 to their count, got {name}; give the f"):
        read_header(tmp_path / f"m-{name}.gguf")


# Fault -> a function that makes it, and the message.
WRONG = {
    "missing": (lambda w, t: t.pop("output_norm.weight"), "missing tensor output_norm.weight"),
    "many": (
        lambda w, t: [t.pop(n) for n in list(t) if "norm" in n],
        r"missing tensor output_norm.weight, blk.0.attn_norm.weight, .* and 4 more",
    ),
    "extra": (lambda w, t: t.update({"extra": np.ones(3, "f4")}), "extra tensor extra; download"),
    "split count": (
        lambda w, t: w.add_string("split.count", "x"), r"split.count must be of type int, got 'x'"
    ),
    "long name": (
        lambda w, t: t.update({"x" * 65: np.ones(3, "f4")}), "at most 64 printable .*, got 'x{59};"
    ),
    "shape": (
        lambda w, t: t.update({"blk.1.ffn_up.weight": np.ones((64, 96), "f4")}),
        r"blk.1.ffn_up.weight in m.gguf is \[64, 96\], its metadata says \[96, 64\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensors_are_named(case, tmp_path):
    change, message = WRONG[case]
    path = write_gguf(tmp_path / "m.gguf", *hf_model(tmp_path, "llama2"), change=change)
    with pytest.raises(UserError, match=message) as error:
        load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind, name", [(24, "I8"), (99, "type 99")])
def test_unsupported_tensor_types_are_named(kind, name, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", *hf_model(tmp_path, "llama2"))
    raw = bytearray(path.read_bytes())
    key = b"blk.1.ffn_up.weight"
    at = raw.index(key) + len(key) + 4 + 2 * 8  # after the number of axes and two of them
    raw[at : at + 4] = kind.to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(UserError, match=f"blk.1.ffn_up.weight .* is of {name}, .* F32, F16, Q4_0"):
        load(path)


MEASURE = """
from jaxkv.models.loading.source import open_source
jnp.zeros(8).block_until_ready()
source = open_source(sys.argv[1])
weights = source.weights(sys.argv[2]) if sys.argv[2] else {}
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs Linux's /proc")
@pytest.mark.parametrize("kind, dtype", [(Type.Q8_0, "float32"), (Type.F16, "bfloat16")])
def test_peak_memory(kind, dtype, tmp_path):
    """One tensor has most of the weights; it is in memory once."""
    config, written = hf_model(tmp_path, "llama32", vocab_size=160_000, hidden_size=256)
    path = write_gguf(tmp_path / "m.gguf", config, written, lambda name: kind)
    model = sum(weight.size for weight in written.values()) * jnp.dtype(dtype).itemsize
    used = peak_of(MEASURE, str(path), dtype) - peak_of(MEASURE, str(path), "")
    assert 0.9 * model < used < 1.3 * model, f"{used / model:.2f} times the model"


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_weights_that_are_not_finite_are_named_as_in_the_file(weight_format, tmp_path):
    def change(_, tensors):
        tensors["blk.0.attn_k.weight"][3, 3] = np.nan

    path = write_gguf(tmp_path / "m.gguf", *hf_model(tmp_path, "llama2"), change=change)
    message = f"must be finite, and blk.0.attn_k.weight in {path} has NaN or infinity; check"
    with pytest.raises(UserError, match=message):
        models.load(path, weights=weight_format)
