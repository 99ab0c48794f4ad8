"""Weights of GGUF files: every type, the order of rows, split files, and named mismatches."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.loading.gguf import read_header
from jaxkv.models.loading.gguf import weights as module
from jaxkv.models.loading.gguf.weights import read, supported
from jaxkv.models.loading.tensors import Tensor
from tests.models.gguf.files import hf_model, paired, write_gguf
from tests.models.test_weights import check, load

NAMES = """F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K TQ1_0 TQ2_0 MXFP4 NVFP4
IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ1_S IQ1_M IQ4_NL IQ4_XS"""
WEIGHT_TYPES = [Type[name] for name in NAMES.split() if hasattr(Type, name)]  # NVFP4 is recent


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


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_weights_that_are_not_finite_are_named_as_in_the_file(weight_format, tmp_path):
    def change(_, tensors):
        tensors["blk.0.attn_k.weight"][3, 3] = np.nan

    path = write_gguf(tmp_path / "m.gguf", *hf_model(tmp_path, "llama2"), change=change)
    message = f"must be finite, and blk.0.attn_k.weight in {path} has NaN or infinity; check"
    with pytest.raises(UserError, match=message):
        models.load(path, weights=weight_format)
