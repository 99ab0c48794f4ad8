"""Weights from safetensors files, streamed to their final dtype and device.

The headers are checked completely before any weights are read. Then each tensor is read straight
into its final host buffer (through a 16 MB window where the dtype changes) and
handed to JAX, which on CPU adopts the buffer. The format is read here rather than mapped by the
safetensors package: mapped pages count as resident memory until the file is closed, which would
double the peak, and NumPy has no bfloat16 of its own.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv.errors import UserError, first_few
from jaxkv.files import reading
from jaxkv.models.loading.hf.folder import read_json
from jaxkv.models.loading.tensors import (
    Tensor,
    aligned,
    corrupt,
    fill,
    match,
)
from jaxkv.models.loading.weight_names import (
    HARMLESS,
    TOWERS,
    canonical,
    outer_name,
    shapes,
    stored_shapes,
    tensor_parts,
)
from jaxkv.models.network.config import Config

DTYPES = {"F32": np.dtype("f4"), "F16": np.dtype("f2"), "BF16": np.dtype(jnp.bfloat16)}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LFS = b"version https://git-lfs"  # the beginning of a pointer file in a clone
PIECE = 16 << 20  # bytes read at once where the dtype changes
# Blocks of 32 numbers in 4 bits and a power of two (OCP Microscaling 1.0): the stored names of a
# matrix of gpt-oss end with these words, and the type of the whole is this.
MXFP4, BLOCKS, SCALES = "MXFP4", "_blocks", "_scales"
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def model_tensors(folder: Path, config: Config) -> dict[str, Tensor]:
    """The tensors of the parameters by our names; raises UserError where a folder has others."""
    return _match(tensors_in(folder), config, folder)


@reading()
def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a model folder by its name in the file; reads headers only.

    An index assigns each name to one file. Other files may have old tensors of that name.
    """
    weight_map = _weight_map(Path(folder))
    if weight_map is None:
        return read_header(folder / SINGLE)
    headers = {file: read_header(folder / file) for file in sorted(set(weight_map.values()))}
    lacking = [
        f"{name} in {file}" for name, file in weight_map.items() if name not in headers[file]
    ]
    if lacking:
        raise UserError(
            f"{folder / INDEX} names tensors that their files lack: {first_few(lacking)}; "
            "download them again"
        )
    return {name: headers[file][name] for name, file in weight_map.items()}


def read_metadata(file: Path) -> dict[str, str]:
    """What one safetensors file says about itself; empty if nothing."""
    return _header(file)[0].get("__metadata__") or {}


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of one safetensors file, and where its tensors begin."""
    size = file.stat().st_size
    if size == 0:
        raise corrupt(file, "it is empty")
    with file.open("rb") as stream:
        if stream.read(len(LFS)) == LFS:
            raise UserError(f"{file} is a Git LFS pointer and not the weights; run git lfs pull")
        stream.seek(0)
        length = struct.unpack("<Q", stream.read(8).ljust(8, b"\xff"))[0]
        if length > size - 8:
            raise corrupt(file, f"its header needs {length} bytes, the file has {size}")
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise corrupt(file, "its header is not valid")
    return header, 8 + length


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file; raises where header and file size disagree."""
    size = file.stat().st_size
    header, begin = _header(file)
    try:
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {
            name: Tensor(
                file=file,
                name=name,
                type=entry["dtype"],
                shape=tuple(map(int, entry["shape"])),
                start=begin + entry["data_offsets"][0],
                bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise corrupt(file, "its header is not valid") from None
    end = max((tensor.start + tensor.bytes for tensor in tensors.values()), default=0)
    if end != size and tensors:
        raise corrupt(file, f"its header describes {end} bytes, the file has {size}")
    for t in tensors.values():
        dtype = DTYPES.get(t.type)
        if t.start < begin or (dtype and t.bytes != prod(t.shape) * dtype.itemsize):
            raise corrupt(file, f"the bytes of {t.name} do not fit its shape {list(t.shape)}")
    return tensors


@reading()
def read(tensor: Tensor, dtype: np.dtype) -> np.ndarray:
    """One tensor as a host array of `dtype`, in a buffer of its own."""
    if tensor.type == MXFP4:
        return _read_mxfp4(tensor, dtype)
    if tensor.members:
        out = aligned(tensor.shape, dtype)
        for place, member in zip(out, tensor.members, strict=True):
            place[...] = read(member, dtype)
        return out
    shape = tensor.shape if tensor.part is None else tensor.part.shape
    count = prod(shape)
    stored = DTYPES[tensor.type]
    host = aligned((count,), dtype)
    # Unbuffered, so that no second copy of the bytes is kept.
    with tensor.file.open("rb", buffering=0) as stream:
        stream.seek(tensor.start)
        if stored == dtype:
            complete = fill(stream, host)
        else:
            complete, window = True, np.empty(min(count, PIECE // stored.itemsize), stored)
            for at in range(0, count, max(len(window), 1)):
                piece = window[: min(len(window), count - at)]
                complete = complete and fill(stream, piece)
                host[at : at + len(piece)] = piece
    if not complete:
        raise corrupt(tensor.file, f"it ended within {tensor.name}")
    if tensor.part is None:
        return host.reshape(shape)
    out = aligned(tensor.shape, dtype)
    out[...] = tensor.part.cut(host, tensor.shape)
    return out


def _read_mxfp4(tensor: Tensor, dtype: np.dtype) -> np.ndarray:
    """A parameter [E,O,I] from blocks [E,O,I/32,16] and their scales [E,O,I/32].

    Gate and up are every second row of theirs.
    """
    rows = slice(tensor.part.first, None, 2) if tensor.part.axis == 3 else slice(None)
    blocks, scales = (
        np.fromfile(t.file, np.uint8, t.bytes, offset=t.start).reshape(t.shape)[:, rows]
        for t in tensor.members
    )
    signed = np.concatenate([FP4, -FP4])
    pairs = signed[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=1)]  # low bits first
    host = aligned(tensor.shape, dtype)
    for out, packed, powers in zip(host, blocks, scales, strict=True):  # one expert at a time
        values = pairs[packed].reshape(*packed.shape[:2], 32)
        out[...] = np.ldexp(values, powers[..., None].astype(np.int32) - 127).reshape(out.shape)
    return host


def _weight_map(folder: Path) -> dict[str, str] | None:
    """The file of each tensor by its name, from the index; None for a single file, which wins."""
    if (folder / SINGLE).is_file():
        return None
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or {type(f) for f in weight_map.values()} != {str}:
            raise UserError(f"{folder / INDEX} has no weight_map; download it again")
        files = sorted(set(weight_map.values()))
        missing = [file for file in files if not (folder / file).is_file()]
        if missing:
            raise UserError(
                f"{folder} lacks weight files: {first_few(missing)}; download them again"
            )
        return weight_map
    other_files = [p.name for end in ("*.bin", "*.pth", "*.pt", "*.gguf") for p in folder.glob(end)]
    if other_files:
        raise UserError(
            f"no {SINGLE} in {folder}, only {first_few(sorted(other_files))}; name a GGUF file "
            "itself, or a version of the model in safetensors"
        )
    raise UserError(f"no weights in {folder}: neither {SINGLE} nor {INDEX}")


def _match(tensors: Mapping[str, Tensor], config: Config, folder: Path) -> dict[str, Tensor]:
    """Our name -> tensor; raises where file and config.json disagree."""
    by_name: dict[str, Tensor] = {}
    for name, tensor in _with_mxfp4(tensors).items():
        if name.endswith(HARMLESS) or (config.picture_ids and name.startswith(TOWERS)):
            continue
        if (earlier := by_name.setdefault(canonical(config, name), tensor)) is not tensor:
            raise UserError(f"{folder} has one tensor under two names: {earlier.name}, {name}")
    head_name, embed_name = outer_name(config, "head"), outer_name(config, "embed")
    if config.tied and head_name in by_name:
        head = by_name.pop(head_name)
        if _differ(by_name.setdefault(embed_name, head), head):
            raise UserError(
                f"{folder}: config.json ties the head to the embedding, but {head.name} differs "
                f"from {by_name[embed_name].name}; set tie_word_embeddings to false"
            )
    remedies = {head_name: "if the head is the embedding, set tie_word_embeddings to true"}
    matched = match(by_name, stored_shapes(config), folder, "config.json", remedies=remedies)
    types = {*DTYPES, MXFP4}
    dtypes = [f"{t.name} is {t.type}" for t in matched.values() if t.type not in types]
    if dtypes:
        raise UserError(
            f"weights must be one of {', '.join(DTYPES)}; in {folder} {first_few(dtypes)}; "
            "use an unquantized version of the model"
        )
    ours, parts = shapes(config), tensor_parts(config)
    members: dict[str, list[Tensor]] = {}
    for name, tensor in matched.items():
        members.setdefault(name.partition(" ")[0], []).append(tensor)
    return {
        name: replace(
            first,
            shape=ours[name][1],
            part=parts.get(name),
            members=(first, *rest) if "*" in ours[name][0] else first.members,
        )
        for name, (first, *rest) in members.items()
    }


def _with_mxfp4(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by name, of which blocks and scales are one."""
    joined = {}
    for name, tensor in tensors.items():
        base_name = name.removesuffix(BLOCKS)
        scales = tensors.get(base_name + SCALES)
        if base_name != name and scales is not None:
            _check_mxfp4(tensor, scales)
            experts, outputs, blocks, _ = tensor.shape
            shape = experts, 32 * blocks, outputs
            joined[base_name] = replace(
                tensor, name=base_name, type=MXFP4, shape=shape, members=(tensor, scales)
            )
        elif not (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in tensors):
            joined[name] = tensor
    return joined


def _check_mxfp4(blocks: Tensor, scales: Tensor) -> None:
    """Raise UserError unless these are blocks [E,O,I/32,16] and their scales [E,O,I/32]."""
    sizes = all(t.type == "U8" and t.bytes == prod(t.shape) for t in (blocks, scales))
    if not sizes or len(blocks.shape) != 4 or blocks.shape != (*scales.shape, 16):
        raise corrupt(
            blocks.file,
            f"{blocks.name} and its scales must be bytes [E,O,B,16] and [E,O,B], got "
            f"{blocks.type} {list(blocks.shape)} and {scales.type} {list(scales.shape)}",
        )


@reading()
def _differ(a: Tensor, b: Tensor) -> bool:
    """Whether the bytes of two tensors differ, read through a window."""
    if a is b:
        return False
    if (a.shape, a.type) != (b.shape, b.type):
        return True
    with a.file.open("rb") as first, b.file.open("rb") as second:
        first.seek(a.start)
        second.seek(b.start)
        return any(
            first.read(n) != second.read(n)
            for at in range(0, a.bytes, PIECE)
            for n in [min(PIECE, a.bytes - at)]
        )
