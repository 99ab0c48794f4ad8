"""Many devices: the batch over the mesh axis `data`, KV heads over `model`, without collectives.

Sequences are independent and a query head reads one KV head, so devices need not communicate in a
step. The axis letters of a policy's `leaves` say which axes of a state are B and K.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxkv import arguments, driver
from jaxkv.contract import Policy, Spec, State
from jaxkv.errors import UserError
from jaxkv.rotary import Alibi
from jaxkv.typing import Array, Bool, Float, Float32, UInt32

AXES = ("data", "model")


def mesh_sizes(text: str) -> dict[str, int]:
    """The axes that `data=2,model=4` names; either may be left out.

    Raises UserError for anything else.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise UserError(
                f"a mesh must be data=BATCH,model=HEADS, each at most once and at least 1, got "
                f"{text!r}; try data=1,model=1"
            )
        sizes[name] = int(size)
    return sizes


def mesh_of(text: str) -> Mesh:
    """The mesh of `mesh_sizes`; raises UserError where there are too few devices."""
    sizes = mesh_sizes(text)
    needed = math.prod(sizes.values())
    devices = jax.devices()
    if needed > len(devices):
        raise UserError(
            f"a mesh needs one device per place: {text!r} needs {needed}, got {len(devices)}; "
            "make it smaller, or on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count=N"
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=devices[:needed],
    )


def axes_in(mesh: Mesh) -> tuple[str | None, str | None]:
    """The mesh axes of the batch and of KV heads, None where the mesh has none."""
    batch, heads = (name if name in mesh.axis_names else None for name in AXES)
    return batch, heads


def check(mesh: Mesh, batch: int, kv_heads: int, policies: Iterable[Policy]) -> None:
    """Raise UserError where the mesh does not divide the batch or the KV heads evenly.

    policies: of the layers. Raises UserError too where the KV heads of a layer share a budget and
    the mesh splits them.
    """
    axes = zip(axes_in(mesh), (batch, kv_heads), ("sequences", "KV heads"), strict=True)
    for axis, size, noun in axes:
        if axis is not None and size % mesh.shape[axis]:
            fitting = [f"{axis}={n}" for n in range(1, size + 1) if size % n == 0]
            raise UserError(
                f"the mesh axis {axis!r} must divide the {noun}: {size} {noun[:-1]}"
                f"{'s' * (size != 1)} over {mesh.shape[axis]} places; use {' or '.join(fitting)}"
            )
    for policy in policies:
        check_heads_together(mesh, policy)


def check_heads_together(mesh: Mesh, policy: Policy) -> None:
    """Raise UserError where the mesh splits KV heads that share a budget or an array."""
    heads = axes_in(mesh)[1]
    if policy.heads_coupled and heads is not None and mesh.shape[heads] > 1:
        raise UserError(
            f"a policy whose KV heads share a budget needs all KV heads of a layer on one device, "
            f"got a mesh with {heads}={mesh.shape[heads]}; use a mesh of data alone, or "
            "budgets=equal where the policy has budgets"
        )


def bytes_per_device(tree: Any) -> int:
    """Bytes of arrays, or of shapes with a sharding, on each device.

    The virtual devices of a CPU share one memory, so there it is the bytes of all.
    """
    split = jax.default_backend() != "cpu"

    def of_leaf(leaf: Any) -> int:
        shape, place = leaf.shape, getattr(leaf, "sharding", None)
        if split and isinstance(place, NamedSharding):
            shape = place.shard_shape(shape)
        return math.prod(shape) * np.dtype(leaf.dtype).itemsize

    return sum(map(of_leaf, jax.tree.leaves(tree)))


def specs(leaves: State, batch: str | None = "data", heads: str | None = "model") -> State:
    """The PartitionSpec of each array: B over the mesh axis `batch`, K over `heads`.

    leaves: a policy's `leaves`. None instead of a name: that axis is not split.
    """
    names = {"B": batch, "K": heads}
    return jax.tree.map(lambda leaf: PartitionSpec(*map(names.get, leaf.letters)), leaves)


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
    sink_logits: Float[Array | np.ndarray, " N"] | None = None,
) -> tuple[Float32[Array, "B T N H"], State]:
    """`step`, each device with its own sequences and KV heads; a mesh may have one axis or both.

    Raises UserError where the mesh does not divide the batch or the KV heads evenly.
    """
    arguments.check(policy, spec, state, q, k, v, positions, valid, sink_logits)
    batch, heads = axes_in(mesh)
    check(mesh, q.shape[0], spec.kv_heads, [policy])
    spec = local_spec(mesh, spec)
    by_batch, by_head = PartitionSpec(batch), PartitionSpec(batch, None, heads)
    states = specs(policy.leaves, batch, heads)
    split = jax.shard_map(
        lambda *args: driver.step(policy, spec, *args),
        mesh=mesh,
        in_specs=(states, by_head, by_head, by_head, by_batch, by_batch, PartitionSpec(heads)),
        out_specs=(by_head, states),
        check_vma=False,  # the kernels of some policies do not say along which axes they vary
    )
    return split(state, q, k, v, positions, valid, sink_logits)


def sharded_finish_prefill(mesh: Mesh, policy: Policy, spec: Spec, state: State) -> State:
    """`policy.finish_prefill`, each device with its own sequences and KV heads.

    Raises UserError where the mesh splits KV heads that share a budget.
    """
    check_heads_together(mesh, policy)
    states = specs(policy.leaves, *axes_in(mesh))
    spec = local_spec(mesh, spec)
    split = jax.shard_map(
        lambda state: policy.finish_prefill(spec, state),
        mesh=mesh,
        in_specs=(states,),
        out_specs=states,
        check_vma=False,
    )
    return split(state)


def local_spec(mesh: Mesh, spec: Spec) -> Spec:
    """The spec of one device of a mesh, which has its share of the KV heads."""
    _, heads = axes_in(mesh)
    if heads is None:
        return spec
    encoding = spec.encoding
    if isinstance(encoding, Alibi):  # the one encoding that differs between heads
        encoding = dataclasses.replace(encoding, axis=heads)
    kv_heads = spec.kv_heads // mesh.shape[heads]
    return dataclasses.replace(spec, kv_heads=kv_heads, encoding=encoding)
