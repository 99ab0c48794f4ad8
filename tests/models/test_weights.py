"""Weights of folders and GGUF files: layouts, named mismatches, peak memory below 1.3 times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from jaxkv.errors import UserError
from jaxkv.models.loading.config import read_config
from jaxkv.models.loading.hf import folder as hub
from jaxkv.models.loading.hf.folder import find
from jaxkv.models.loading.hf.weights import read_header
from jaxkv.models.loading.source import open_source
from jaxkv.models.loading.weight_names import shapes
from tests.models.folders import FAMILIES, tensors, write_json, write_model, write_tensors
from tests.models.gguf.files import hf_model, write_gguf
from tests.peak_memory import peak_of

Weights = dict[str, np.ndarray]
Change = Callable[[Weights], object]
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load(path: Path, dtype: str = "float32", **options) -> dict[str, jax.Array]:
    return open_source(path).weights(dtype, **options)


def check(loaded: dict[str, jax.Array], path: Path, written: dict[str, np.ndarray]) -> None:
    table = shapes(open_source(path).config)
    assert set(loaded) == set(table)
    for name, (file_name, shape) in table.items():
        assert loaded[name].shape == shape
        np.testing.assert_array_equal(np.asarray(loaded[name]), written[file_name], err_msg=name)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name, tmp_path):
    write_model(tmp_path, name)
    stored = tensors(tmp_path)
    config = read_config(tmp_path)
    if config.family in SPLIT:
        stored = {
            ours: array
            for name, whole in stored.items()
            for ours, array in split(config, name, whole)
        }
        loaded = load(tmp_path)
        assert {*loaded} == {*stored}
        for name, array in loaded.items():
            np.testing.assert_array_equal(array, stored[name], name)
        return
    if config.experts:
        for file_name, shape in shapes(config).values():
            if "*" in file_name:
                each = [stored.pop(file_name.replace("*", str(i))) for i in range(shape[0])]
                stored[file_name] = np.stack(each)
    check(load(tmp_path), tmp_path, stored)


# Families whose files fuse matrices, or have rows that rotate together as neighbours.
SPLIT = {"phi3", "gpt_neox", "mpt", "falcon", "glm", "glm4", "cohere2", "gpt_oss"}


def split(config, name, whole):
    """The parameters in a stored tensor, by our names."""
    names = {stored: ours for ours, (stored, _) in shapes(config).items()}
    prefix = names[name].rpartition(".")[0]
    rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    suffix = "_bias" if name.endswith("bias") else ""
    if "query_key_value" in name:  # each KV head has its queries, its key and its value
        group = config.heads // config.kv_heads
        heads = whole.reshape(config.kv_heads, group + 2, config.head_dim, *whole.shape[1:])
        parts = [heads[:, :group], heads[:, group], heads[:, group + 1]]
        parts = [part.reshape(-1, *whole.shape[1:]) for part in parts]
        return [(f"{prefix}.{part}{suffix}", parts[i]) for i, part in enumerate("qkv")]
    if config.family in ("glm", "glm4", "cohere2") and name.split(".")[-2] in ("q_proj", "k_proj"):
        heads = whole.reshape(-1, config.head_dim, *whole.shape[1:])
        rotated = 2 * len(config.encoding.frequencies)
        first, second, rest = heads[:, :rotated:2], heads[:, 1:rotated:2], heads[:, rotated:]
        return [(names[name], np.concatenate([first, second, rest], 1).reshape(whole.shape))]
    if ".experts." in name:
        bias = suffix if "_bias" in name else ""
        whole = whole if "_bias" in name else whole.swapaxes(1, 2)
        if "down" in name:
            return [(f"{prefix}.expert_down{bias}", whole)]
        return [(f"{prefix}.expert_gate{bias}", whole[:, ::2]),
                (f"{prefix}.expert_up{bias}", whole[:, 1::2])]  # fmt: skip
    if "qkv" in name:
        parts = np.split(whole, [rows[0], rows[0] + rows[1]])
        return [(f"{prefix}.{part}", parts[i]) for i, part in enumerate("qkv")]
    if "gate_up" in name:
        gate, up = np.split(whole, 2)
        return [(f"{prefix}.gate", gate), (f"{prefix}.up", up)]
    return [(names[name], whole)]


def as_folder(folder: Path, stored: str, change: Change = lambda weights: None) -> Path:
    weights = tensors(folder, dtype=stored)
    change(weights)
    write_tensors(folder, weights, shards=3)
    return folder


def as_gguf(folder: Path, stored: str, change: Change = lambda weights: None) -> Path:
    config = json.loads((folder / "config.json").read_text())
    weights = {name: w.astype("f4") for name, w in tensors(folder, dtype=stored).items()}
    types = {"float32": Type.F32, "bfloat16": Type.BF16, "float16": Type.F16}
    return write_gguf(
        folder / "m.gguf", config, weights, lambda _: types[stored], lambda _, w: change(w)
    )


# A store -> a function that writes the weights of the config.json in a folder, in a dtype, after a
# change to them by their stored names, and returns the path of the model.
STORES = {"folder": as_folder, "gguf": as_gguf}
DTYPES = "float32", "bfloat16", "float16"


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("store", STORES)
def test_dtypes_and_progress(store, stored, dtype, tmp_path, monkeypatch):
    # Several pieces per tensor, the last one shorter.
    monkeypatch.setattr("jaxkv.models.loading.hf.weights.PIECE", 1000)
    write_json(tmp_path / "config.json", FAMILIES["llama32"])
    path, seen = STORES[store](tmp_path, stored), []
    loaded = load(path, dtype, progress=lambda done, total: seen.append((done, total)))
    assert all(array.dtype == dtype for array in loaded.values())
    written = tensors(tmp_path, dtype=stored)
    check(loaded, path, {name: w.astype(jnp.dtype(dtype)) for name, w in written.items()})
    assert seen == sorted(seen) and len(seen) == len(loaded)
    assert seen[-1] == (total := sum(a.nbytes for a in loaded.values()), total)


@pytest.mark.parametrize("shards", [2, 3])
def test_the_index_decides_between_two_tensors_of_one_name(shards, tmp_path):
    """Every file has old tensors under all names, as where shards of another model are reused."""
    write_model(tmp_path, "llama2", shards=shards)
    written = tensors(tmp_path)
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    for file in set(weight_map.values()):
        part = {name: w if weight_map[name] == file else w + 1 for name, w in written.items()}
        save_file(part, tmp_path / file)
    check(load(tmp_path), tmp_path, written)


def test_an_index_that_names_another_file_is_refused(tmp_path):
    write_model(tmp_path, "llama2", shards=2)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    file, *_ = {*weight_map.values()} - {weight_map[HEAD]}
    write_json(index, {"weight_map": weight_map | {HEAD: file}})
    with pytest.raises(UserError, match=f"their files lack: {HEAD} in {file}"):
        load(tmp_path)


def renamed(old: str, new: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name.replace(old, new): w for name, w in weights.items()}


# A family, and a change to its file that its weights survive.
LAYOUTS: dict[str, tuple[str, Callable[[Weights], Weights]]] = {
    "names without model": ("llama2", renamed("model.", "")),
    "a head named output": ("llama2", renamed(HEAD, "output.weight")),
    "a head in model": ("llama2", renamed(HEAD, "model.lm_head.weight")),
    "a tied head alone": ("llama32", renamed(EMBED, HEAD)),
    "a tied head as well": ("llama32", lambda w: w | {HEAD: w[EMBED].copy()}),
    "rotary buffers": ("llama2", lambda w: w | {
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(8) for i in range(3)}),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS)
def test_other_layouts_are_read(case, tmp_path):
    family, change = LAYOUTS[case]
    write_model(tmp_path, family)
    written = tensors(tmp_path)
    write_tensors(tmp_path, change(written))
    check(load(tmp_path), tmp_path, written)


@pytest.mark.parametrize("at", [0, 1500, -1, None])
def test_a_tied_head_that_differs_is_refused(at, tmp_path, monkeypatch):
    """In the first, a later or the last piece, or only in its dtype: then the bytes are equal."""
    monkeypatch.setattr("jaxkv.models.loading.hf.weights.PIECE", 1000)  # bytes, of 32,768
    write_model(tmp_path, "llama32", dtype="bfloat16")
    written = tensors(tmp_path, dtype="bfloat16")
    head = written[EMBED].view(np.float16) if at is None else written[EMBED].copy()
    if at is not None:
        head.reshape(-1)[at] += 1
    write_tensors(tmp_path, written | {HEAD: head})
    with pytest.raises(UserError, match=r"ties.*lm_head.weight differs.*tie_word_embeddings"):
        load(tmp_path)


@pytest.mark.parametrize("store", STORES)
def test_weights_load_with_a_sharding(store, tmp_path):
    write_json(tmp_path / "config.json", FAMILIES["llama2"])
    path = STORES[store](tmp_path, "float32")
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    replicated = NamedSharding(mesh, P())
    split = NamedSharding(mesh, P("model"))

    def by_name(name: str, shape: tuple[int, ...]) -> NamedSharding:
        return split if name.endswith((".q", ".k")) else replicated

    loaded = load(path, sharding=by_name)
    check(loaded, path, tensors(tmp_path))
    assert loaded["layers.0.q"].sharding == split and loaded["embed"].sharding == replicated
    assert load(path, sharding=split)["norm"].sharding == split


def without(*words: str) -> Change:
    """Remove the tensors with one of these words in their names."""
    return lambda w: [w.pop(name) for name in list(w) if any(word in name for word in words)]


# The store, a function that makes the fault, and the message.
WRONG = [
    ("folder", without("model.norm.weight"), "missing tensor model.norm.weight"),
    ("gguf", without("output_norm.weight"), "missing tensor output_norm.weight"),
    ("folder", without(HEAD), "missing tensor lm_head.weight.*tie_word_embeddings"),
    ("folder", without("norm"), "missing tensor model.norm.weight, model.layers.0.*and 4 more"),
    ("gguf", without("norm"),
     "missing tensor output_norm.weight, blk.0.attn_norm.weight, .* and 4 more"),
    ("folder", lambda w: w.update({"model.extra": np.ones(3, "f4")}), "extra tensor model.extra"),
    ("gguf", lambda w: w.update({"extra": np.ones(3, "f4")}), "extra tensor extra; download"),
    ("folder", lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": np.ones(64, "f4")}),
     "extra tensor model.layers.0.self_attn.q_proj.bias"),
    ("folder", lambda w: w.update({EMBED: np.ones((250, 64), "f4")}),
     r"model.embed_tokens.weight in model-.*.safetensors is \[250, 64\], .* \[256, 64\]"),
    ("gguf", lambda w: w.update({"blk.1.ffn_up.weight": np.ones((64, 96), "f4")}),
     r"blk.1.ffn_up.weight in m.gguf is \[64, 96\], its metadata says \[96, 64\]"),
    ("folder", lambda w: w.update({EMBED: np.ones((256, 64), "i1")}),
     "F32, F16, BF16; .* model.embed_tokens.weight is I8"),
]  # fmt: skip


@pytest.mark.parametrize("store, damage, message", WRONG)
def test_wrong_tensors_are_named(store, damage, message, tmp_path):
    write_json(tmp_path / "config.json", FAMILIES["llama2"])
    path = STORES[store](tmp_path, "float32", damage)
    with pytest.raises(UserError, match=message) as error:
        load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("keep", [0, 5, 100, 5000, -1])
def test_a_truncated_file_is_refused(keep, tmp_path):
    file = write_model(tmp_path, "llama2") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model.safetensors is truncated or corrupt"):
        load(tmp_path)


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


OFFSETS = b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}'
FILES = [
    *((with_header(header), "header is not valid") for header in (
        b"{]", b"[1]", b'{"a": {}}', b'{"a": {"dtype": 3}}')),
    (with_header(OFFSETS, bytes(8)), r"bytes of a do not fit its shape \[4\]"),
    (b"", "it is empty"),
    (b"version https://git-lfs.github.com/spec/v1\n", "run git lfs pull"),
]  # fmt: skip


@pytest.mark.parametrize("content, words", FILES)
def test_invalid_weight_files_are_refused(content, words, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_header(tmp_path / "model.safetensors")


def test_a_folder_without_weights_is_refused(tmp_path):
    write_json(tmp_path / "config.json", FAMILIES["llama2"])
    with pytest.raises(UserError, match="no weights in"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=r"only pytorch_model.bin.*safetensors"):
        load(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    write_model(tmp_path, "llama2", shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks weight files: model-00002-of-00003.safetensors"):
        load(tmp_path)
    write_json(tmp_path / "model.safetensors.index.json", {})
    with pytest.raises(UserError, match="no weight_map"):
        load(tmp_path)


MEASURE = """
from jaxkv.models.loading.source import open_source
jnp.zeros(8).block_until_ready()
source = open_source(sys.argv[1])
weights = source.weights(sys.argv[2]) if sys.argv[2] else {}
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "stored, dtype",
    [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32"),
     ("float32", "bfloat16"), (Type.Q8_0, "float32"), (Type.F16, "bfloat16")],
)  # fmt: skip
def test_peak_memory(stored, dtype, tmp_path):
    """One tensor has most of 50 million weights; it is in memory once."""
    config, weights = hf_model(tmp_path, "llama32", vocab_size=160_000, hidden_size=256)
    path = tmp_path
    if isinstance(stored, str):
        write_tensors(path, {name: w.astype(jnp.dtype(stored)) for name, w in weights.items()})
    else:
        path = write_gguf(tmp_path / "m.gguf", config, weights, lambda name: stored)
    model = sum(w.size for w in weights.values()) * jnp.dtype(dtype).itemsize
    used = peak_of(MEASURE, str(path), dtype) - peak_of(MEASURE, str(path), "")
    assert 0.9 * model < used < 1.3 * model, f"{used / model:.2f} times the model"


def test_names_of_folders_and_hub_models(tmp_path, monkeypatch):
    assert find(tmp_path) == tmp_path and find(str(tmp_path)) == tmp_path
    for name in (tmp_path / "no", str(tmp_path / "no"), "./a/b", "no-such-model", "a/b/c"):
        with pytest.raises(UserError, match="no such folder"):
            find(name)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is another file"):
        find(str(tmp_path / "file"))
    monkeypatch.setattr(hub, "_download", lambda name: Path("hub") / name)
    assert find("org/name") == Path("hub/org/name")
    assert find("org/name@v1") == Path("hub/org/name@v1")


def test_hub_errors_are_one_line(monkeypatch):
    hub_package = pytest.importorskip("huggingface_hub")
    requested = {}

    def offline(name, **options):
        requested.update(options, name=name)
        raise OSError("no network\nlong explanation")

    monkeypatch.setattr(hub_package, "snapshot_download", offline)
    with pytest.raises(UserError, match="does not give org/name@v1: no network; check") as error:
        find("org/name@v1")
    assert "\n" not in str(error.value)
    assert (requested["name"], requested["revision"]) == ("org/name", "v1")
    assert all(p.startswith("*.") for p in requested["allow_patterns"])
