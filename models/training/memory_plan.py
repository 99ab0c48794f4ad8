"""The memory of a training step, from its program, before anything is allocated."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxkv.models.training import training
from jaxkv.models.training.training import TrainingSetting


class TrainingMemory(NamedTuple):
    """Bytes on one device.

    trained, moments, frozen: weights that are updated, their moments, and the others. temporaries:
    activations, gradients and logits of a step, as the compiler places them. total: with the batch.
    """

    trained: int
    moments: int
    frozen: int
    temporaries: int
    total: int


def plan(setting: TrainingSetting) -> TrainingMemory:
    """Compile the step of a run for its devices; nothing of the run is in memory."""
    run = training.shape(setting)
    frozen = {
        name: jax.ShapeDtypeStruct(shape, setting.dtype, sharding=setting.place(shape))
        for name, shape in setting.shapes.items()
        if not setting.trains(name)
    }
    recipe, mesh = setting.recipe, setting.mesh
    steps = recipe.grad_accum_steps
    parts = (steps, recipe.batch_size // steps, recipe.context + 1)
    by = None if mesh is None else NamedSharding(mesh, PartitionSpec(None, "data"))
    batch = jax.ShapeDtypeStruct(parts, jnp.int32, sharding=by)
    memory = training.update.lower(setting, run, batch, frozen).compile().memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return TrainingMemory(
        _bytes(run.weights),
        _bytes(run.moments),
        _bytes(frozen),
        memory.temp_size_in_bytes,
        held + memory.temp_size_in_bytes,
    )


def _bytes(tree: object) -> int:
    """The bytes of arrays on one device, from their shapes and shardings."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape
        total += math.prod(shape) * np.dtype(leaf.dtype).itemsize
    return total
