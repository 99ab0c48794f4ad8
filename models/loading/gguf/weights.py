"""Weights of GGUF files, dequantised tensor by tensor to their final dtype and device.

Names and shapes are checked completely before any weights are read. A tensor is then read through
a small window: its blocks are dequantised to float32 and stored in the final host buffer, which JAX
on CPU adopts. So the peak memory is the model and one tensor.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from jaxkv.errors import UserError
from jaxkv.files import reading
from jaxkv.models.loading.gguf.header import Header, gguf_package, layout, type_name
from jaxkv.models.loading.tensors import (
    Tensor,
    aligned,
    corrupt,
    fill,
    match,
)
from jaxkv.models.loading.weight_names import (
    gguf_shapes,
    paired_heads,
    rope_tensors,
    rows_of_pairs,
    stored_shapes,
    tensor_parts,
)
from jaxkv.models.network.config import Config

WINDOW = 1 << 18  # weights dequantised at once: their float32 values stay in a processor's cache


def read_weight(
    header: Header, config: Config, name: str, tensor: Tensor, dtype: np.dtype
) -> np.ndarray:
    """A parameter by our name as a host array."""
    architecture = header.fields["general.architecture"]
    heads = paired_heads(architecture, config, name)
    rotated = None if heads is None else 2 * len(config.encoding.frequencies)
    return read(tensor, dtype, heads, rotated)


@reading()
def read(
    tensor: Tensor, dtype: np.dtype, heads: int | None = None, rotated: int | None = None
) -> np.ndarray:
    """One tensor, dequantised, in a host buffer of its own.

    heads: the number of heads whose rows are stored as rotary pairs; they are put back in order.
    rotated: so many rows of each of them, by default all.
    """
    host = aligned(tensor.shape if tensor.part is None else tensor.part.shape, dtype)
    if host.size == 0:
        return host
    # A vector is one row, unless its rows are in another order.
    table = host.reshape(1, -1) if host.ndim < 2 and not heads else host.reshape(host.shape[0], -1)
    rows, columns = table.shape
    places = np.arange(rows) if heads is None else rows_of_pairs(rows, heads, rotated)
    dequantize, kind = gguf_package().dequantize, gguf_package().GGMLQuantizationType(tensor.type)
    row_bytes, step = tensor.bytes // rows, max(1, WINDOW // columns)
    window = np.empty(min(rows, step) * row_bytes, np.uint8)
    # Unbuffered, so that no second copy of the bytes is kept.
    with tensor.file.open("rb", buffering=0) as stream:
        stream.seek(tensor.start)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            raw = window[: (last - first) * row_bytes]
            if not fill(stream, raw):
                raise corrupt(tensor.file, f"it ended within {tensor.name}")
            # One long row: the package takes time per row, and blocks do not depend on rows.
            values = dequantize(raw[None], kind)
            table[places[first:last]] = values.reshape(last - first, columns)
    if tensor.part is None:
        return host
    out = aligned(tensor.shape, dtype)
    out[...] = tensor.part.cut(host, tensor.shape)
    return out


@cache
def supported(kind: int) -> bool:
    """Whether the package `gguf` dequantises a ggml type, by number."""
    size = layout(kind)
    if size is None:
        return False
    block = np.zeros((1, size[1]), np.uint8)
    try:
        gguf_package().dequantize(block, gguf_package().GGMLQuantizationType(kind))
    except NotImplementedError:
        return False
    return True


def model_tensors(header: Header, config: Config) -> dict[str, Tensor]:
    """Our name -> tensor; raises UserError where tensors and metadata disagree."""
    stored, parts = stored_shapes(config, gguf=True), tensor_parts(config, gguf=True)
    tensors = match(header.tensors, stored, header.path, "its metadata", rope_tensors(config))
    unsupported = [tensor for tensor in tensors.values() if not supported(tensor.type)]
    if unsupported:
        names = [type_name(kind) for kind in range(256) if supported(kind)]
        raise UserError(
            f"{unsupported[0].name} in {header.path} is of {type_name(unsupported[0].type)}, which "
            f"is not supported; supported: {', '.join(names)}"
        )
    ours = gguf_shapes(config)
    return {
        name: replace(tensor, shape=ours[name][1], part=parts[name]) if name in parts else tensor
        for name, tensor in tensors.items()
    }
