"""Long bodies of one API key do not delay those of others."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from jaxkv.serve.http.body_parsers import SHORT, BodyParsers, FairThread


def test_owners_take_turns_in_a_thread():
    order: list[str] = []

    async def main() -> None:
        thread, started = FairThread("test"), threading.Event()
        first = asyncio.create_task(thread.run(b"a", started.wait))
        await asyncio.sleep(0)
        names = ["a1", "a2", "a3", "b1", "b2", "c1"]
        waiting = [
            asyncio.create_task(thread.run(name[:1].encode(), order.append, name)) for name in names
        ]
        await asyncio.sleep(0)
        assert not order
        started.set()
        await asyncio.gather(first, *waiting)

    asyncio.run(main())
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_short_body_does_not_wait_for_long_ones():
    async def main() -> None:
        parsers, never = BodyParsers(), threading.Event()
        long = [asyncio.create_task(parsers.run(b"a", SHORT + 1, never.wait)) for _ in range(3)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(parsers.run(b"a", SHORT, str, 5), 20) == "5"
        never.set()
        await asyncio.gather(*long)

    asyncio.run(main())


def test_an_error_is_raised_and_frees_the_thread():
    async def main() -> None:
        thread = FairThread("test")
        with pytest.raises(ValueError, match="invalid literal"):
            await thread.run(b"a", int, "x")
        assert await thread.run(b"a", int, "5") == 5

    asyncio.run(main())


def test_random_cancellations_lose_no_turn():
    async def main() -> None:
        rng, thread, done = np.random.default_rng(0), FairThread("test"), []
        tasks = []
        for number in range(500):
            owner = bytes([int(rng.integers(4))])
            tasks.append(asyncio.create_task(thread.run(owner, done.append, number)))
            if rng.random() < 0.3:
                await asyncio.sleep(0)
            if rng.random() < 0.4:
                tasks[int(rng.integers(len(tasks)))].cancel()
        ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        lost = sum(isinstance(end, asyncio.CancelledError) for end in ended)
        assert 50 < lost < 450 and len(done) >= 500 - lost
        assert await asyncio.wait_for(thread.run(b"", int, "5"), 20) == 5

    asyncio.run(main())
