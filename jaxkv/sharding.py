"""Many devices: rows over the mesh axis `data`, kv heads over `model`, and no talk between them.

Rows are independent and a query head reads one kv head, so a step needs no collective; the
axis letters of a state say which of its axes are which.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxkv import driver
from jaxkv.contract import Policy, Spec, State, is_letters
from jaxkv.errors import UserError
from jaxkv.rotary import Alibi
from jaxkv.typing import Array, Bool, Float, Float32, UInt32

AXES = ("data", "model")


def mesh_of(text: str) -> Mesh:
    """The mesh that `data=2,model=4` names; either axis may be left out.

    Raises UserError for anything else, or where there are too few devices.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise UserError(
                f"a mesh is written data=ROWS,model=HEADS, each at most once and at least 1, got "
                f"{part!r} in {text!r}; try data=1,model=1"
            )
        sizes[name] = int(size)
    needed = 1
    for size in sizes.values():
        needed *= size
    devices = jax.devices()
    if needed > len(devices):
        raise UserError(
            f"a mesh needs one device a place: {text!r} needs {needed}, there are {len(devices)}; "
            "make it smaller"
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=devices[:needed],
    )


def axes_in(mesh: Mesh) -> tuple[str | None, str | None]:
    """The mesh axes of rows and of kv heads, None where the mesh has none."""
    rows, heads = (name if name in mesh.axis_names else None for name in AXES)
    return rows, heads


def check(mesh: Mesh, rows: int, kv_heads: int) -> None:
    """Raise UserError where the mesh does not divide rows or kv heads evenly."""
    for axis, size, what in zip(axes_in(mesh), (rows, kv_heads), ("rows", "kv heads"), strict=True):
        if axis is not None and size % mesh.shape[axis]:
            raise UserError(
                f"the mesh axis {axis!r} must divide the {what}: {size} {what} over "
                f"{mesh.shape[axis]} places; choose another mesh or number of {what}"
            )


def specs(axes: State, rows: str | None = "data", heads: str | None = "model") -> State:
    """Where each leaf lies: B over the mesh axis `rows`, K over `heads`, the rest everywhere.

    axes: a policy's `axes`. None instead of a name: that axis is not split.
    """
    names = {"B": rows, "K": heads}
    return jax.tree.map(
        lambda letters: PartitionSpec(*(names.get(letter) for letter in letters)),
        axes,
        is_leaf=is_letters,
    )


def sharded_step(
    mesh: Mesh,
    policy: Policy,
    spec: Spec,
    state: State,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    positions: UInt32[Array, "B T"],
    valid: Bool[Array, "B T"],
    sink: Float[Array | np.ndarray, " N"] | None = None,
) -> tuple[Float32[Array, "B T N H"], State]:
    """`step`, each device with its own rows and kv heads; a mesh may have one axis or both.

    Raises UserError where the mesh does not divide rows or kv heads evenly.
    """
    driver.check(policy, spec, state, q, k, v, positions, valid, sink)
    rows, heads = axes_in(mesh)
    check(mesh, q.shape[0], spec.kv_heads)
    spec = _of_one_place(mesh, spec)
    by_row, by_head = PartitionSpec(rows), PartitionSpec(rows, None, heads)
    held = specs(policy.axes, rows, heads)
    split = jax.shard_map(
        lambda *args: driver.step(policy, spec, *args),
        mesh=mesh,
        in_specs=(held, by_head, by_head, by_head, by_row, by_row, PartitionSpec(heads)),
        out_specs=(by_head, held),
        check_vma=False,  # the kernels of some policies do not say along which axes they vary
    )
    return split(state, q, k, v, positions, valid, sink)


def sharded_seal(mesh: Mesh, policy: Policy, spec: Spec, state: State) -> State:
    """`policy.seal`, each device with its own rows and kv heads."""
    held = specs(policy.axes, *axes_in(mesh))
    spec = _of_one_place(mesh, spec)
    split = jax.shard_map(
        lambda state: policy.seal(spec, state),
        mesh=mesh, in_specs=(held,), out_specs=held, check_vma=False,
    )  # fmt: skip
    return split(state)


def _of_one_place(mesh: Mesh, spec: Spec) -> Spec:
    """How a device attends that has its share of the kv heads."""
    _, heads = axes_in(mesh)
    if heads is None:
        return spec
    encoding = spec.encoding
    if isinstance(encoding, Alibi):  # the one scheme that differs from head to head
        encoding = dataclasses.replace(encoding, axis=heads)
    kv_heads = spec.kv_heads // mesh.shape[heads]
    return dataclasses.replace(spec, kv_heads=kv_heads, encoding=encoding)
