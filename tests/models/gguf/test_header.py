"""Headers of GGUF files: agreement with the package's own reader, and refused files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxkv import models
from jaxkv.cli import main
from jaxkv.errors import UserError
from jaxkv.models.loading.gguf import read_header
from jaxkv.models.loading.hf.folder import find
from tests.models.gguf.files import hf_model, write_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A complete small model."""
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(folder / "model.gguf", *hf_model(folder / "hf", "llama2"))


def test_the_header_agrees_with_the_package(path):
    header, reader = read_header(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert list(header.fields) == list(fields)
    for key, value in fields.items():
        assert header.fields[key] == (pytest.approx(value) if isinstance(value, float) else value)
    assert [t.name for t in reader.tensors] == list(header.tensors)
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert info.shape == tuple(map(int, tensor.shape[::-1]))  # stored in reverse order
        assert (info.start, info.bytes) == (tensor.data_offset, tensor.n_bytes)
        assert info.type == tensor.tensor_type.value


def test_every_kind_of_value(tmp_path):
    values = {"u8": 200, "i8": -3, "u16": 60_000, "i16": -300, "u32": 2**31, "i32": -5,
              "u64": 2**63, "i64": -(2**62), "f32": 0.1, "f64": 0.1, "bool": True,
              "string": "Zoë 東京", "list": [1, 2], "strings": ["a", "", "東"],
              "reals": [0.5, 0.25], "flags": [True, False]}  # fmt: skip
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    kinds = {"u8": "uint8", "i8": "int8", "u16": "uint16", "i16": "int16", "u32": "uint32",
             "i32": "int32", "u64": "uint64", "i64": "int64", "f32": "float32",
             "f64": "float64"}  # fmt: skip
    for key, value in values.items():
        add = "array" if isinstance(value, list) else kinds.get(key, key)
        getattr(writer, f"add_{add}")(key, value)
    writer.add_custom_alignment(64)
    writer.add_tensor("w", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(tmp_path / "m.gguf")
    assert {key: header.fields[key] for key in values} == values
    assert header.tensors["w"].start % 64 == 0 and header.tensors["w"].shape == (5,)


def test_every_truncation_is_refused(path, tmp_path):
    raw = path.read_bytes()
    rng = np.random.default_rng(0)
    for keep in [0, 4, 5, 8, 23, 24, 30, len(raw) - 1, *rng.integers(24, len(raw), 60)]:
        (tmp_path / "cut.gguf").write_bytes(raw[:keep])
        with pytest.raises(UserError, match=r"cut.gguf is truncated or corrupt: .*; download it"):
            read_header(tmp_path / "cut.gguf")


def test_damaged_headers_never_crash(path, tmp_path):
    """Random bytes within the header give a header or a UserError, nothing else."""
    raw, rng = path.read_bytes(), np.random.default_rng(1)
    end = min(tensor.start for tensor in read_header(path).tensors.values())
    refused = 0
    for _ in range(200):
        damaged = bytearray(raw)
        for at in rng.integers(8, end, 3):
            damaged[at] = rng.integers(256)
        (tmp_path / "m.gguf").write_bytes(damaged)
        try:
            read_header(tmp_path / "m.gguf")
        except UserError:
            refused += 1
    assert refused > 10


def version(number: int) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:4] + number.to_bytes(4, "little") + raw[8:]


def huge_count(raw: bytes) -> bytes:
    return raw[:16] + (2**62).to_bytes(8, "little") + raw[24:]


def moved(change: Callable[[int], int]) -> Callable[[bytes], bytes]:
    """Change the offset of blk.0.attn_k.weight, which follows blk.0.attn_q.weight."""

    def change_bytes(raw: bytes) -> bytes:
        key = b"blk.0.attn_k.weight"
        at = raw.index(key) + len(key) + 4 + 2 * 8 + 4  # after the number of axes, axes and type
        offset = int.from_bytes(raw[at : at + 8], "little")
        return raw[:at] + change(offset).to_bytes(8, "little") + raw[at + 8 :]

    return change_bytes


def renamed(name: bytes) -> Callable[[bytes], bytes]:
    return lambda raw: raw.replace(b"blk.0.attn_k.weight", name)


# Fault -> a function of the file's bytes, and the message.
REFUSED = {
    "offset": (moved(lambda at: at + 4), "is .*blk.0.attn_k.weight must be a multiple of 32, got"),
    "overlap": (moved(lambda at: at - 32), "is .*: blk.0.attn_q.weight and blk.0.attn_k.weight ov"),
    "a line in a name": (
        renamed(b"blk.0\nattn_k.weight"),
        r"is .* printable .*, got 'blk.0\\nattn",
    ),
    "empty": (lambda raw: b"", "is truncated or corrupt: it is empty; download"),
    "magic": (lambda raw: b"GGML" + raw[4:], "is not a GGUF file: it begins with b'GGML'"),
    "pointer": (
        lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "is a Git LFS pointer and not the weights; run git lfs pull",
    ),
    "version 2": (version(2), "has GGUF version 2, and jaxkv reads version 3, .*; convert"),
    "big-endian": (version(3 << 24), "has GGUF version 50331648, .*, little-endian; convert"),
    "count": (huge_count, "is truncated or corrupt: it ends within its header"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_files_are_refused(case, path, tmp_path, capsys):
    change, message = REFUSED[case]
    file = tmp_path / "bad.gguf"
    file.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=f"bad.gguf {message}") as error:
        models.load(file)
    assert "\n" not in str(error.value)
    assert main(["generate", "Hi", "--model", str(file)]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"jaxkv: error: {error.value}\n")


def test_names_of_files_and_folders(path, tmp_path):
    assert find(path) == path and find(str(path)) == path
    without_suffix = tmp_path / "without_suffix"
    without_suffix.write_bytes(path.read_bytes())
    assert find(without_suffix) == without_suffix  # it begins as a GGUF file does
    (tmp_path / "model.gguf").write_bytes(path.read_bytes())
    with pytest.raises(UserError, match=r"no config.json in .*; name a GGUF file: model.gguf"):
        models.load(tmp_path)


def test_a_model_generates_from_a_file(path, capsys):
    llm = models.load(path)
    assert (llm.path, llm.eos, llm.tokenizer.adds_bos) == (path, (2,), False)
    answer = models.generate(llm, "Hi", max_new_tokens=4, temperature=0)
    assert len(answer.tokens) <= 4
    words = ["--model", str(path), "--json", "--max-new-tokens", "4", "--temperature", "0"]
    assert main(["generate", "Hi", *words]) == 0
    assert f'"tokens": {answer.tokens}' in capsys.readouterr().out
