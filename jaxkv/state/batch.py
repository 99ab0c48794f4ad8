"""Sequences of a state: take, put, reset, count bytes, move to the host, save to a file.

Every array of a state begins with B and none is a scalar, so each function is one map over the
arrays and needs no policy. `state` may be a tuple of states, one per layer.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import rows
from jaxkv.contract import State
from jaxkv.errors import UserError, first_few
from jaxkv.files import atomic_file, open_regular
from jaxkv.pallas_kernels import host_memory
from jaxkv.typing import Array

FORMAT = "jaxkv state 2"

Indices = Sequence[int] | np.ndarray | Array
Shaped = Any  # an array of JAX or numpy, or its shape


class BadScale(UserError):
    """A snapshot is a whole file, but a row in int8 has a scale that no finite row has."""


def take(state: State, indices: Indices) -> State:
    """The sequences at these indices, in this order. Raises UserError for an unknown index."""
    indices = _checked(indices, state)
    take_leaf = partial(host_memory.map_on_device, lambda leaf: leaf[indices])
    return jax.tree.map(take_leaf, state)


def put(state: State, indices: Indices, source: State) -> State:
    """The state with the sequences of `source` at these indices.

    Raises UserError for an unknown index, and if the sequences of `source` have other arrays, as
    under another policy, or another shape, as after another `reserve`.
    """
    indices = _checked(indices, state)
    leaves, source_leaves = _named(state), _named(source)
    if leaves.keys() != source_leaves.keys():
        apart = first_few(sorted(leaves.keys() ^ source_leaves.keys()))
        raise UserError(
            f"sequences fit a state with the same arrays, and only one of both has {apart}; make "
            "both with one policy, with the same storage="
        )
    if isinstance(indices, np.ndarray) and len(set(indices.tolist())) < len(indices):
        raise UserError(
            f"each sequence can be put once, got {indices.tolist()}; remove the duplicate"
        )

    def put_leaf(path: tuple, leaf: Shaped, new: Shaped) -> Array:
        shape = (len(indices), *leaf.shape[1:])
        if new.shape != shape or new.dtype != leaf.dtype:
            raise UserError(
                f"sequences fit a state of equal shape: {jax.tree_util.keystr(path)} takes "
                f"{_describe(shape, leaf.dtype)}, got {_describe(new.shape, new.dtype)}; "
                "reserve the same number of tokens for both"
            )
        return host_memory.map_on_device(lambda leaf, new: leaf.at[indices].set(new), leaf, new)

    return jax.tree_util.tree_map_with_path(put_leaf, state, source)


def reset(state: State, indices: Indices, fresh: State) -> State:
    """The state with empty sequences at these indices.

    fresh: a state of as many sequences, or of one, which is copied with its random seeds; give one
    per sequence where draws must be independent.
    Raises UserError for another number of fresh sequences.
    """
    indices = _checked(indices, state)
    size = len(indices)
    count = jax.tree.leaves(fresh)[0].shape[0]
    if count not in (1, size):
        raise UserError(f"fresh must have 1 or {size} sequences, got {count}; give as many")
    return put(
        state,
        indices,
        jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (size, *leaf.shape[1:])), fresh),
    )


def nbytes(state: State) -> int:
    """Bytes of all arrays; shapes (jax.eval_shape) suffice."""
    return sum(
        math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(state)
    )


def to_host(state: State) -> State:
    """The same state as numpy arrays."""
    return jax.device_get(state)


def to_device(state: State, sharding: State | jax.sharding.Sharding | None = None) -> State:
    """The same state as jax arrays; sharding: one for all leaves, or a tree of them."""
    return jax.device_put(state, sharding)


def save(
    path: str | os.PathLike,
    state: State,
    identity: str = "",
    notes: Mapping[str, Any] | None = None,
    private: bool = False,
) -> None:
    """Write a snapshot atomically.

    identity: what the state belongs to beyond its shapes, such as the policy's string and the
    model's name; `load` refuses another. notes: JSON values to store with it (`read_notes`).
    private: only the user of the process can access the file.
    Raises UserError where the file cannot be written.
    """
    leaves = {name: np.asarray(leaf) for name, leaf in _named(to_host(state)).items()}
    described = {name: _describe(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
    header = {"format": FORMAT, "identity": identity, "leaves": described}
    header |= {"notes": dict(notes or {})}
    # Raw bytes: npz drops the name of every dtype that is not numpy's own, such as bfloat16.
    raw = {name: np.frombuffer(leaf.tobytes(), np.uint8) for name, leaf in leaves.items()}
    try:
        with atomic_file(path, private) as file:
            np.savez(file, header=np.array(json.dumps(header)), **raw)
    except OSError as error:
        raise UserError(
            f"the file cannot be written: {path}: {error.strerror}; choose another place"
        ) from None


def load(path: str | os.PathLike, like: State, identity: str = "", any_size: bool = False) -> State:
    """Read a snapshot as numpy arrays.

    like: a state of the same shapes; shapes (jax.eval_shape of `init`) suffice. identity: as it was
    saved with. any_size: axes may have other sizes than in `like`, as after `reserve`.
    Raises UserError where the file is no snapshot or holds another state, and BadScale where a row
    in int8 has a scale that no finite row has.
    """
    like_leaves = _named(like)
    with _opened(path, identity) as (header, file):
        if any_size:
            like_leaves = {
                name: _resized(leaf, header["leaves"].get(name))
                for name, leaf in like_leaves.items()
            }
        _compare(path, header["leaves"], like_leaves)
        leaves = [
            file[name].view(leaf.dtype).reshape(leaf.shape) for name, leaf in like_leaves.items()
        ]
    state = jax.tree.unflatten(jax.tree.structure(like), leaves)
    _check_scales(path, state)
    return state


def read_notes(path: str | os.PathLike, identity: str = "") -> dict[str, Any]:
    """The notes of a snapshot; raises UserError as `load` does."""
    with _opened(path, identity) as (header, _):
        return header.get("notes", {})


@contextlib.contextmanager
def _opened(path: str | os.PathLike, identity: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """The header and the arrays of a snapshot. Errors of reading them become UserErrors."""
    try:
        with open_regular(path) as opened, np.load(opened, allow_pickle=False) as file:
            header = json.loads(str(file["header"]))
            if header["format"] != FORMAT:
                raise UserError(
                    f"a snapshot must say {FORMAT!r}, {path} says {header['format']!r}; "
                    "read it with the version that wrote it"
                )
            if header["identity"] != identity:
                raise UserError(
                    f"a snapshot must have the identity it was saved with: {path} has "
                    f"{header['identity']!r}, got {identity!r}; give its own identity"
                )
            yield header, file
    except UserError:
        raise
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise UserError(
            f"a snapshot must be a file that can be read: {path}: {error.strerror}; "
            "give the path that was saved to"
        ) from None
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        zlib.error,
        zipfile.BadZipFile,
    ):
        raise UserError(
            f"a snapshot must be a whole file written by jaxkv.state.batch.save: {path} is not; "
            "give another, or an older copy of it"
        ) from None


def _resized(leaf: Shaped, description: str | None) -> Shaped:
    """The shape of a leaf with the sizes in its description in a file, if that has as many axes."""
    name, _, sizes = (description or "").removesuffix("]").partition("[")
    shape = tuple(map(int, filter(None, sizes.split(","))))
    if name != np.dtype(leaf.dtype).name or len(shape) != len(leaf.shape):
        return leaf
    return jax.ShapeDtypeStruct(shape, leaf.dtype)


def _compare(path: str | os.PathLike, saved: dict[str, str], leaves: dict[str, Shaped]) -> None:
    expected = {name: _describe(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
    for name in expected | saved:
        if expected.get(name) != saved.get(name):
            raise UserError(
                f"a snapshot must have the state of this policy, model and batch: {path}: {name} "
                f"should be {expected.get(name, 'absent')}, is {saved.get(name, 'absent')}; "
                "load it with the settings it was saved with, storage= among them"
            )


def _check_scales(path: str | os.PathLike, state: State) -> None:
    """Raise BadScale for the first row in int8 whose scale no finite row has."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda node: isinstance(node, rows.Int8Rows)
    )
    for at, node in nodes:
        wrong = rows.wrong_scales(node) if isinstance(node, rows.Int8Rows) else ()
        if len(wrong):
            raise BadScale(
                "scales of int8 rows in a snapshot must be finite, and above 0 where a token is "
                f"stored: {path}: {jax.tree_util.keystr(at)} has {wrong[0]:g}; load an older copy "
                "of the file, or compute its tokens again"
            )


def _named(state: State) -> dict[str, Shaped]:
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in paths}


def _describe(shape: tuple[int, ...], dtype: np.dtype) -> str:
    return f"{np.dtype(dtype).name}[{','.join(map(str, shape))}]"


def _checked(indices: Indices, state: State) -> np.ndarray | Array:
    if isinstance(indices, jax.core.Tracer):
        return indices  # values are not known yet
    indices, batch = np.asarray(indices), jax.tree.leaves(state)[0].shape[0]
    integers = indices.dtype.kind in "iu" or not indices.size
    if not integers or (indices.size and not 0 <= indices.min() <= indices.max() < batch):
        raise UserError(
            f"indices of sequences must be from 0 to {batch - 1}, got {indices.tolist()}; name "
            "existing ones"
        )
    return indices.astype(np.int32)
