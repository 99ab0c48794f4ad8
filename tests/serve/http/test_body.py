"""Bodies: parsed as `json` does, bounded, and by threads that delay no other key or stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time

import numpy as np
import pytest

from jaxkv.serve.http import body
from jaxkv.serve.http.body import MEMBERS, SHORT, ParserThreads
from jaxkv.serve.http.errors import APIError

IDS = [int(token) for token in np.random.default_rng(0).integers(0, 50_000, 10_000)]
NAMES = {f"k{number}": "v" for number in range(400_000)}
# A body that stops Python's parser for as long as it is, and what it needs too much of.
HEAVY = {
    "names": json.dumps({"metadata": NAMES}),
    "brackets": json.dumps({"x": [[]] * 1_000_000}),
    "depth": '{"x": ' + "[" * 2_000_000 + "]" * 2_000_000 + "}",
    "texts": json.dumps({"prompt": [""] * 1_000_000}),
    "fractions": json.dumps({"prompt": [0.5] * 1_000_000}),
    "ids that end in a text": json.dumps({"prompt": [*IDS * 100, "x"]}),
    "short lists": json.dumps({"prompt": [[1, 2]] * 300_000}),
}


@pytest.mark.parametrize("case", HEAVY)
def test_members_are_bounded(case):
    raw = HEAVY[case].encode()
    assert len(raw) < 8 * 2**20
    with pytest.raises(APIError, match=f"may have {MEMBERS} members"):
        body.parse(raw)


def random_json(rng: np.random.Generator, depth: int = 0) -> object:
    """A value with texts full of brackets and quotes, and lists of ids of all lengths."""
    kind = rng.integers(7 if depth < 4 else 5)
    if kind < 2:
        letters = [*'ab"\\[]{},:\n1 é✓', "NaN", "[1, 2"]
        return "".join(rng.choice(letters, rng.integers(30)))
    if kind == 2:
        size = int(rng.choice([0, 1, 64, 5000]))
        return [int(number) for number in rng.integers(0, 2**31, size)]
    if kind < 5:
        return [None, True, -1, 0.5, 10**12, 1e300][rng.integers(6)]
    several = [random_json(rng, depth + 1) for _ in range(rng.integers(6))]
    return several if kind == 5 else {str(n): value for n, value in enumerate(several)}


@pytest.mark.parametrize("seed", range(6))
def test_long_bodies_are_parsed_as_short_ones(seed):
    """By Python's own parser; the text in front makes the rest be scanned."""
    rng = np.random.default_rng(seed)
    value = {"text": "," * MEMBERS, "rest": [random_json(rng) for _ in range(5)]}
    separators = [(",", ":"), (", ", ": "), (" ,\n", "\t:\r\n ")][seed % 3]
    text = json.dumps(value, ensure_ascii=bool(seed % 2), separators=separators)
    assert body.parse(text.encode()) == json.loads(text)


@pytest.mark.parametrize("case", [*HEAVY, "ids"])
def test_other_threads_go_on(case):
    """The largest gap of another thread is well below the time that `json` would stop it."""
    raw = HEAVY[case].encode() if case in HEAVY else json.dumps({"prompt": IDS * 26}).encode()
    gaps, ended = [0.0], threading.Event()

    def watch() -> None:
        last = time.perf_counter()
        while not ended.is_set():
            time.sleep(0.0005)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    def largest() -> float:
        gaps[:] = [0.0]
        with contextlib.suppress(APIError):
            body.parse(raw)
        time.sleep(0.005)
        return max(gaps)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        longest_pause = min(largest() for _ in range(3))
    finally:
        ended.set()
        thread.join()
    assert longest_pause < 0.1


def test_keys_take_turns_in_a_thread():
    order: list[str] = []

    async def main() -> None:
        parsers, begin = ParserThreads(), threading.Event()
        tasks = [asyncio.create_task(parsers.run(b"a", 1, begin.wait))]
        for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
            await asyncio.sleep(0)
            tasks.append(asyncio.create_task(parsers.run(name[:1].encode(), 1, order.append, name)))
        await asyncio.sleep(0)
        assert not order
        begin.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert order == ["b1", "c1", "a1", "b2", "a2", "a3"]


def test_a_short_body_does_not_wait_for_long_ones():
    async def main() -> None:
        parsers, never = ParserThreads(), threading.Event()
        long = [asyncio.create_task(parsers.run(b"a", SHORT + 1, never.wait)) for _ in range(3)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(parsers.run(b"a", SHORT, str, 5), 20) == "5"
        never.set()
        await asyncio.gather(*long)

    asyncio.run(main())


def test_an_error_and_random_cancellations_free_the_thread():
    async def main() -> None:
        rng, parsers, done = np.random.default_rng(0), ParserThreads(), []
        with pytest.raises(ValueError, match="invalid literal"):
            await parsers.run(b"", 1, int, "x")
        tasks = []
        for number in range(500):
            owner = bytes([int(rng.integers(4))])
            tasks.append(asyncio.create_task(parsers.run(owner, 1, done.append, number)))
            if rng.random() < 0.3:
                await asyncio.sleep(0)
            if rng.random() < 0.4:
                tasks[int(rng.integers(len(tasks)))].cancel()
        ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        lost = sum(isinstance(end, asyncio.CancelledError) for end in ended)
        assert 50 < lost < 450 and len(done) >= 500 - lost
        assert await asyncio.wait_for(parsers.run(b"", 1, int, "5"), 20) == 5

    asyncio.run(main())
