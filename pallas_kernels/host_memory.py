"""Arrays in host memory: moves between host and device, and gathers from the host."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import Array


def on_host(array: Array) -> bool:
    """Whether an array is in host memory; for a traced array, whether it will be."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host


def to_host(array: Array) -> Array:
    """The array in host memory."""
    return jax.device_put(array, jax.memory.Space.Host)


def to_device(array: Array) -> Array:
    """The array in device memory."""
    return jax.device_put(array, jax.memory.Space.Device)


def map_on_device(function: Callable[..., Array], array: Array, *operands: Array) -> Array:
    """function(array, *operands), computed on the device; the result is where `array` is."""
    if not on_host(array):
        return function(array, *operands)
    return to_host(function(*map(to_device, (array, *operands))))


def take(array: Array, at: Array) -> Array:
    """array[at] in device memory; every index must be in bounds.

    The operands of one operation must be in one memory. So for an array in host memory the indices
    move to the host, and only the gathered entries move to the device.
    """
    if not on_host(array):
        return array.at[at].get(mode="promise_in_bounds")
    return to_device(array.at[to_host(at)].get(mode="promise_in_bounds"))
