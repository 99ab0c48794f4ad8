"""Threads that parse and tokenize bodies, shared fairly."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
SHORT = 2**16  # bytes: tokenizing so many takes less than a tenth of a second


class BodyParsers:
    """Two threads, because each may use a hundred times the memory of its body.

    One takes bodies up to SHORT, the other takes the rest, so long bodies do not delay short ones.
    Owners take turns in each, so one with many bodies does not delay others.
    """

    def __init__(self) -> None:
        self._short, self._long = FairThread("jaxkv-parse-short"), FairThread("jaxkv-parse-long")

    async def run(self, owner: bytes, size: int, parse: Callable[..., T], *arguments: object) -> T:
        """`parse(*arguments)` in a thread. owner: identifies the API key. size: of the body."""
        return await (self._short if size <= SHORT else self._long).run(owner, parse, *arguments)


class FairThread:
    """One thread, in which owners take turns."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._busy = False
        self._waiting: dict[bytes, deque[asyncio.Future[None]]] = {}  # owners in order of turns

    async def run(self, owner: bytes, parse: Callable[..., T], *arguments: object) -> T:
        """`parse(*arguments)` in the thread, when it is this owner's turn."""
        await self._wait(owner)
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, parse, *arguments)
        finally:
            self._next()

    async def _wait(self, owner: bytes) -> None:
        """Wait until the thread is free for this owner."""
        if not self._busy:
            self._busy = True
            return
        mine = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # it is its turn already
                self._next()
            raise

    def _next(self) -> None:
        """Give the thread to the oldest body of the owner whose turn it is."""
        while self._waiting:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns  # the last turn
            if not turn.done():  # otherwise its client has left
                turn.set_result(None)
                return
        self._busy = False
