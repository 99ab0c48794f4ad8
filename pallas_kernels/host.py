"""Arrays in the memory of the host: what is taken from them, and brought to the device."""

from __future__ import annotations

from collections.abc import Callable

import jax

Array = jax.Array


def is_there(array: Array) -> bool:
    """Whether an array lies in the memory of the host, or will when the program runs."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host


def to_host(array: Array) -> Array:
    """In the memory of the host."""
    return jax.device_put(array, jax.memory.Space.Host)


def to_device(array: Array) -> Array:
    """In the memory of the device."""
    return jax.device_put(array, jax.memory.Space.Device)


def kept(change: Callable[..., Array], array: Array, *others: Array) -> Array:
    """A changed array in the memory of the first; change: of arrays on the device."""
    if not is_there(array):
        return change(array, *others)
    return to_host(change(*map(to_device, (array, *others))))


def take(array: Array, at: Array) -> Array:
    """array[at] on the device, wherever the array lies; every place of `at` [...] must be there.

    Indices go to where the array is and what is taken comes back: operands of one operation must
    lie in one memory.
    """
    if not is_there(array):
        return array.at[at].get(mode="promise_in_bounds")
    return to_device(array.at[to_host(at)].get(mode="promise_in_bounds"))
