"""Converted weights of GGUF files in the cache folder: equal bits, or converted again."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxkv import models
from jaxkv.models.loading import converted, source
from jaxkv.state.sharding import mesh_of
from tests.models.gguf.files import hf_model, write_gguf


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty cache folder of converted weights."""
    monkeypatch.setenv(converted.VARIABLE, str(tmp_path / "kept"))
    converted._reasons.cache_clear()
    return tmp_path / "kept"


@pytest.fixture
def file(tmp_path) -> Path:
    return write_gguf(tmp_path / "model.gguf", *hf_model(tmp_path / "hf", "llama31"))


@pytest.fixture
def conversions(monkeypatch) -> list[str]:
    """The weights that were read from a GGUF file since the test began."""
    names, read = [], source.ModelSource.weights

    def load(opened, dtype, sharding=None, progress=None, store=None):
        def watched(name, host):
            names.append(name)
            return host if store is None else store(name, host)

        return read(opened, dtype, sharding, progress, watched)

    monkeypatch.setattr(source.ModelSource, "weights", load)
    return names


def bits(loaded: models.Llm) -> dict[str, bytes]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(loaded.weights)
    return {jax.tree_util.keystr(at): np.asarray(leaf).tobytes() for at, leaf in leaves}


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.weights"))


FORMATS = [("float32", None), ("bfloat16", None), ("float32", "int8"), ("float16", "int4")]


@pytest.mark.parametrize("dtype, weights", FORMATS)
def test_a_second_start_converts_nothing_and_has_equal_bits(
    dtype, weights, file, folder, conversions, monkeypatch
):
    monkeypatch.setenv(converted.VARIABLE, "off")
    expected = bits(models.load(file, dtype, weights=weights))
    assert not folder.exists() and len(conversions) > 20
    monkeypatch.setenv(converted.VARIABLE, str(folder))
    assert bits(models.load(file, dtype, weights=weights)) == expected
    done = len(conversions)
    seen = []
    again = models.load(file, dtype, weights=weights, progress=lambda *at: seen.append(at))
    assert bits(again) == expected and len(conversions) == done
    assert seen[-1][0] == seen[-1][1] and len(entries(folder)) == 1
    assert {path.suffix for path in folder.iterdir()} == {".weights"}


def test_arrays_are_mapped_and_placed_over_a_mesh(file, folder, conversions):
    expected = bits(models.load(file))
    loaded = models.load(file, mesh=mesh_of("model=2"))
    assert bits(loaded) == expected and len(conversions) == len(expected)
    assert len(loaded.weights["layers.0.q"].sharding.device_set) == 2


def test_an_entry_belongs_to_the_file_the_format_and_the_converter(
    file, folder, tmp_path, monkeypatch
):
    for dtype, weights in FORMATS:
        models.load(file, dtype, weights=weights)
    assert len(entries(folder)) == 4
    moved = tmp_path / "other" / "name.gguf"
    moved.parent.mkdir()
    moved.write_bytes(file.read_bytes())
    models.load(moved, "float32")
    assert len(entries(folder)) == 5
    raw = bytearray(moved.read_bytes())
    raw[-40] ^= 1
    moved.write_bytes(raw)
    assert bits(models.load(moved, "float32")) != bits(models.load(file, "float32"))
    assert len(entries(folder)) == 6
    monkeypatch.setattr(converted, "_converter", lambda: "a later version")
    models.load(file, "float32")
    assert len(entries(folder)) == 7


def test_a_damaged_entry_is_converted_again(file, folder, conversions):
    expected = bits(models.load(file))
    (name,) = entries(folder)
    path, entry = folder / name, (folder / name).read_bytes()
    size, rng = len(entry), np.random.default_rng(0)
    cuts = [0, 1, 30, size // 2, size - 200, size - 17, size - 1]
    damaged = [entry[:cut] for cut in cuts] + [entry + b"x", entry[: size // 2] + entry[100:]]
    for at in [*range(size - 40, size), *rng.integers(0, size, 60), *range(0, 64, 7)]:
        damaged.append(entry[:at] + bytes([entry[at] ^ 1 << rng.integers(8)]) + entry[at + 1 :])
    rebuilt = 0
    for raw in damaged:
        path.write_bytes(raw)
        before = len(conversions)
        assert bits(models.load(file)) == expected
        rebuilt += len(conversions) > before
        assert path.read_bytes() == (entry if len(conversions) > before else raw)
    assert rebuilt > 0.9 * len(damaged)  # some bytes are between two arrays


def fail(code: int, after: int = 0):
    """A function that raises an error of the disk, once it was called `after` times."""
    calls = []

    def failing(file, raw):
        calls.append(raw)
        if len(calls) > after:
            raise OSError(code, os.strerror(code))
        file.write(raw)

    return failing


FULL = os.strerror(errno.ENOSPC)


@pytest.mark.parametrize("function, put, reason", [
    ("tempfile.mkstemp", lambda **_: fail(errno.EROFS)(None, b""), os.strerror(errno.EROFS)),
    ("_write", fail(errno.ENOSPC), FULL),
    ("_write", fail(errno.ENOSPC, 9), FULL),
    ("os.replace", lambda *_: fail(errno.EACCES)(None, b""), os.strerror(errno.EACCES)),
    ("shutil.disk_usage", None, "are needed"),  # more than half of what is free
])  # fmt: skip
def test_without_room_or_permission_a_model_loads_and_one_line_says_so(
    function, put, reason, file, folder, monkeypatch, capsys
):
    if function == "shutil.disk_usage":
        free = int(1.9 * file.stat().st_size)
        put = lambda _: type("Usage", (), {"free": free})()
    monkeypatch.setattr(f"jaxkv.models.loading.converted.{function}", put)
    expected = bits(models.load(file))
    models.load(file)
    told = [line for line in capsys.readouterr().err.splitlines() if "not kept" in line]
    assert len(told) == 1 and reason in told[0] and f"{folder}: " in told[0]
    monkeypatch.undo()
    assert not folder.exists() or not [path for path in folder.iterdir() if "weights" in path.name]
    assert bits(models.load(file)) == expected


def test_an_interrupted_conversion_leaves_nothing(file, folder, monkeypatch):
    crc, calls = converted.zlib.crc32, []

    def interrupted(*words):
        calls.append(words)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return crc(*words)

    monkeypatch.setattr("jaxkv.models.loading.converted.zlib.crc32", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models.load(file)
    assert not [path for path in folder.iterdir() if "weights" in path.name]


def test_the_folder_has_a_bound(file, folder, monkeypatch, capsys):
    models.load(file, "float32")
    (first,) = entries(folder)
    size = (folder / first).stat().st_size
    monkeypatch.setattr(converted, "MAX_BYTES", int(1.7 * size))
    models.load(file, "bfloat16")
    assert len(entries(folder)) == 2
    os.utime(folder / first, (1, 1))
    models.load(file, "float32")  # used last from now on
    models.load(file, "float16")
    assert first in entries(folder) and len(entries(folder)) == 2
    monkeypatch.setattr(converted, "MAX_BYTES", size // 9)
    models.load(file, "float32", weights="int4")  # larger than the bound
    assert len(entries(folder)) == 2
    assert "MB are needed, and the folder may have" in capsys.readouterr().err
    os.close(os.open(leftover := folder / f".{first}.killed", os.O_CREAT))
    os.utime(leftover, (1, 1))
    monkeypatch.setattr(converted, "MAX_BYTES", 4 * size)
    models.load(file, "float16", weights="int8")
    assert not leftover.exists()


def test_another_process_may_remove_entries_meanwhile(file, folder, monkeypatch, capsys):
    models.load(file, "float32")
    vanished = folder / "gone.weights"
    listed = Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [*listed(path, pattern), vanished])
    models.load(file, "bfloat16")
    monkeypatch.undo()
    assert len(entries(folder)) == 2 and "not kept" not in capsys.readouterr().err
