"""The programs that copy between a pool of prefixes on the device and prefill states."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.serve.engine import pool
from jaxkv.serve.engine.pool import Layout, Pool
from jaxkv.serve.engine.prefill import PrefillState
from jaxkv.serve.engine.programs import Programs
from jaxkv.state import batch, memory


class DevicePool:
    """A pool on the device with its programs, which copy between it and prefill states.

    movable: compile `take` and `put`, for pages and records of one number.
    piece: the shapes of both.
    """

    def __init__(
        self, layout: Layout, programs: Programs, vocab: int, pages: int, records: int,
        movable: bool = False,
    ) -> None:  # fmt: skip
        states, zero = programs.prefill_shapes.states, np.int32(0)
        shape = jax.eval_shape(lambda: pool.empty(layout, states, pages, records))
        self.bytes = batch.nbytes(shape)
        memory.check(self.bytes, f"{records} prefixes", fewer="bytes for prefixes")

        def load(
            stored: Pool, numbers: jax.Array, count: jax.Array, record: jax.Array
        ) -> PrefillState:
            loaded = pool.load(layout, states, stored, numbers, count, record)
            return PrefillState(loaded, jnp.zeros((1, vocab), jnp.float32))

        table = np.zeros(max(1, layout.max_pages), np.int32)
        self._pool = programs.compile(lambda: pool.empty(layout, states, pages, records))()
        self._save = programs.compile(
            partial(pool.save, layout), shape, states, zero, zero, zero, donate=(0,)
        )
        self._load = programs.compile(load, shape, table, zero, zero)
        if movable:
            self.piece = jax.eval_shape(pool.take, shape, zero, zero)
            self._take = programs.compile(pool.take, shape, zero, zero)
            self._put = programs.compile(pool.put, shape, self.piece, zero, zero, donate=(0,))
        self._table, self.layout = table, layout

    def save(self, state: PrefillState, number: int, page: int, record: int) -> None:
        """Store page `number` of a state as `page`, and its record as `record`."""
        self._pool = self._save(
            self._pool, state.states, np.int32(number), np.int32(page), np.int32(record)
        )

    def load(self, pages: list[int], record: int) -> PrefillState:
        """A prefill state with a copy of these pages and that record."""
        table = self._table.copy()
        table[: len(pages)] = pages
        return self._load(self._pool, table, np.int32(len(pages)), np.int32(record))

    def take(self, page: int) -> tuple[Pool, None]:
        """Copy a page and the record of the same number, for `put`."""
        return self._take(self._pool, np.int32(page), np.int32(page)), None

    def put(self, page: int, taken: Pool, _: None = None) -> None:
        """Store a page and the record of the same number."""
        self._pool = self._put(self._pool, taken, np.int32(page), np.int32(page))
