"""Rows of a state: take them, put them, weigh them, bring them to the host and to a file.

Every leaf of a state begins with B and none is a scalar, so each of these is one map over the
leaves and knows nothing of the policy. `state` may be a tuple of states, one a layer.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import State
from jaxkv.errors import UserError
from jaxkv.files import whole_file
from jaxkv.pallas_kernels import host
from jaxkv.typing import Array

FORMAT = "jaxkv rows 1"

Rows = Sequence[int] | np.ndarray | Array
Leaf = Any  # an array of jax or numpy, or its shape


def take(state: State, rows: Rows) -> State:
    """These rows, in this order. Raises UserError for a row that does not exist."""
    rows = _index(rows, state)
    return jax.tree.map(lambda leaf: host.kept(lambda leaf: leaf[rows], leaf), state)


def put(state: State, rows: Rows, other: State) -> State:
    """The state with `other`'s rows at these places.

    Raises UserError for a row that does not exist, and where the rows of `other` have another
    shape, as after another `reserve`.
    """
    rows = _index(rows, state)
    if isinstance(rows, np.ndarray) and len(set(rows.tolist())) < len(rows):
        raise UserError(f"each row can be put once, got {rows.tolist()}; name it once")

    def one(path: tuple, leaf: Leaf, new: Leaf) -> Array:
        wanted = (len(rows), *leaf.shape[1:])
        if new.shape != wanted or new.dtype != leaf.dtype:
            raise UserError(
                f"rows fit a state of equal shape: {jax.tree_util.keystr(path)} takes "
                f"{_told(wanted, leaf.dtype)}, got {_told(new.shape, new.dtype)}; "
                "reserve the same room for both"
            )
        return host.kept(lambda leaf, new: leaf.at[rows].set(new), leaf, new)

    return jax.tree_util.tree_map_with_path(one, state, other)


def reset(state: State, rows: Rows, fresh: State) -> State:
    """The state with these rows as they began; fresh: as many new rows, or one for them all."""
    rows = _index(rows, state)
    return put(
        state,
        rows,
        jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(rows), *leaf.shape[1:])), fresh),
    )


def nbytes(state: State) -> int:
    """Bytes of all leaves; shapes alone (jax.eval_shape) will do."""
    return sum(
        math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(state)
    )


def to_host(state: State) -> State:
    """The same state as numpy arrays."""
    return jax.device_get(state)


def to_device(state: State, sharding: State | jax.sharding.Sharding | None = None) -> State:
    """The same state as jax arrays; sharding: one for all leaves, or a tree of them."""
    return jax.device_put(state, sharding)


def save(path: str | os.PathLike, state: State, identity: str = "") -> None:
    """Write a snapshot: whole under its name, or not at all.

    identity: what the state belongs to beyond its shapes, such as the policy's string and the
    model's name; `load` refuses another.
    Raises UserError where the file cannot be written.
    """
    leaves = {name: np.asarray(leaf) for name, leaf in _named(to_host(state)).items()}
    told = {name: _told(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
    header = {"format": FORMAT, "identity": identity, "leaves": told}
    # Raw bytes: npz forgets the name of every dtype that is not numpy's own, such as bfloat16.
    raw = {name: np.frombuffer(leaf.tobytes(), np.uint8) for name, leaf in leaves.items()}
    try:
        with whole_file(path) as file:
            np.savez(file, header=np.array(json.dumps(header)), **raw)
    except OSError as error:
        raise UserError(
            f"a snapshot needs a file that can be written: {path}: {error.strerror}; "
            "choose another place"
        ) from None


def load(path: str | os.PathLike, like: State, identity: str = "") -> State:
    """Read a snapshot as numpy arrays.

    like: a state of the same shapes; those alone (jax.eval_shape of `init`) will do. identity:
    as it was saved with.
    Raises UserError where the file is no snapshot or holds another state.
    """
    wanted = _named(like)
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            header = json.loads(str(file["header"]))
            if header["format"] != FORMAT:
                raise UserError(
                    f"a snapshot must say {FORMAT!r}, {path} says {header['format']!r}; "
                    "read it with the version that wrote it"
                )
            if header["identity"] != identity:
                raise UserError(
                    f"a snapshot is of what it was saved with: {path} is of "
                    f"{header['identity']!r}, and {identity!r} was asked for; give its own identity"
                )
            _compare(path, header["leaves"], wanted)
            leaves = [
                file[name].view(leaf.dtype).reshape(leaf.shape) for name, leaf in wanted.items()
            ]
    except UserError:
        raise
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise UserError(
            f"a snapshot must be a file that can be read: {path}: {error.strerror}; "
            "give the path that was saved to"
        ) from None
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError,
            zipfile.BadZipFile):  # fmt: skip
        raise UserError(
            f"a snapshot must be a whole file written by jaxkv.rows.save: {path} is not; "
            "save it again"
        ) from None
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _compare(path: str | os.PathLike, found: dict[str, str], wanted: dict[str, Leaf]) -> None:
    expected = {name: _told(leaf.shape, leaf.dtype) for name, leaf in wanted.items()}
    for name in expected | found:
        if expected.get(name) != found.get(name):
            raise UserError(
                f"a snapshot must hold the state of this policy, model and batch: {path}: {name} "
                f"should be {expected.get(name, 'absent')}, is {found.get(name, 'absent')}; "
                "load it with the settings it was saved with"
            )


def _named(state: State) -> dict[str, Leaf]:
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in paths}


def _told(shape: tuple[int, ...], dtype: np.dtype) -> str:
    return f"{np.dtype(dtype).name}[{','.join(map(str, shape))}]"


def _index(rows: Rows, state: State) -> np.ndarray | Array:
    if isinstance(rows, jax.core.Tracer):
        return rows  # not known yet
    rows, there = np.asarray(rows), jax.tree.leaves(state)[0].shape[0]
    whole = rows.dtype.kind in "iu" or not rows.size
    if not whole or (rows.size and not 0 <= rows.min() <= rows.max() < there):
        raise UserError(
            f"rows must be numbers from 0 to {there - 1}, got {rows.tolist()}; name those there are"
        )
    return rows.astype(np.int32)
