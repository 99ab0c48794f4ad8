"""Prefixes on the disk: equal answers after a restart, and every fault of a disk."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest

from jaxkv.errors import UserError
from jaxkv.serve.engine import Engine, PrefixConfig, PrefixFolder, Request, disk_tier, store
from jaxkv.state import batch
from tests.seldom import seldom
from tests.serve.engine.plain import CHUNK, Recorder, ask, new_engine
from tests.serve.engine.test_prefixes import SHARED, branches, usable
from tests.serve.http.conftest import eventually

BOTH = ["full", "streaming:sinks=2,window=14"]
OFTEN = [*BOTH, "0=full;*=streaming:sinks=2,window=14", "full:storage=int8"]
SELDOM = [
    "balance:sinks=2,window=4,rounds=1,storage=int8", "magicpig:K=4,L=6,sinks=2,window=4",
    "reservoir:sinks=2,window=6,sample=8",
]  # fmt: skip
ASKED = [Request(prompt, 6, logprobs=3) for prompt in (SHARED, *branches((31, 48, 130)))]


def stored(
    path: Path, policy: str, limit: int = 2**30, blocks: int = 64, seed: int = 0, **fields
) -> Engine:
    """An engine whose prefixes are stored in a folder."""
    config = PrefixConfig(num_blocks=blocks, folder=PrefixFolder(path, limit))
    return new_engine(policy, config, seed, **fields)


def answers(engine: Engine, asked=ASKED) -> list[tuple[list, int]]:
    """The scored tokens and the cached tokens of each answer, and the engine's end."""
    listeners = [ask(engine, request)[0] for request in asked]
    engine.stop()
    return [(listener.scored, listener.outcome.cached_tokens) for listener in listeners]


def alone(policy: str, asked=ASKED) -> list[list]:
    """The scored tokens of each request without a prefix cache."""
    engine = new_engine(policy)
    return [ask(engine, request)[0].scored for request in asked]


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*.prefix"))


def expected_answers(policy: str) -> list[tuple[list, int]]:
    """Equal answers, and as many cached tokens as after the same prompt."""
    pairs = zip(alone(policy), ASKED, strict=True)
    return [(scored, usable(len(request.tokens))) for scored, request in pairs]


@pytest.mark.parametrize("policy", [*OFTEN, *map(seldom, SELDOM)])
def test_answers_after_restarts_equal_those_without_a_cache(tmp_path, policy):
    expected = expected_answers(policy)
    first = answers(stored(tmp_path, policy))
    assert [scored for scored, _ in first] == [scored for scored, _ in expected]
    count = len(files(tmp_path))
    assert count >= 4
    for _ in range(2):
        engine = stored(tmp_path, policy)
        assert answers(engine) == expected
        metrics = engine.metrics()
        assert metrics["disk_hits"] and not metrics["disk_failures"]
        assert metrics["disk_writes"] == metrics["disk_entries_waiting"] == 0
        assert metrics["disk_entries"] == len(files(tmp_path)) == count
        assert metrics["disk_bytes"] == sum(file.stat().st_size for file in files(tmp_path))
        assert metrics["prefix_hits"] == sum(cached for _, cached in expected)
        missed = sum(metrics["misses"].values())
        assert metrics["prefix_hits"] + missed == metrics["prefix_queries"]


@pytest.mark.parametrize("policy", BOTH)
def test_files_are_private_and_name_no_owner(tmp_path, policy):
    folder = tmp_path / "new" / "prefixes"
    request = Request(SHARED, 2, salt="key 5ec2e7", owner="5ec2e7")
    answers(stored(folder, policy), [request])
    assert files(folder) and folder.stat().st_mode & 0o777 == 0o700
    for file in files(folder):
        assert file.stat().st_mode & 0o777 == 0o600
        assert b"5ec2e7" not in file.name.encode() + file.read_bytes()


@pytest.mark.parametrize("policy", BOTH)
def test_owners_stay_apart(tmp_path, policy):
    """Salts separate prefixes on the disk as in memory, and owners have equal shares of it."""
    mine, yours = (Request(SHARED, 2, salt=name, owner=name) for name in ("mine", "yours"))
    answers(stored(tmp_path, policy), [mine])
    answered = answers(stored(tmp_path, policy), [yours, mine])
    assert [cached for _, cached in answered] == [0, usable(200)]
    size = sum(file.stat().st_size for file in files(tmp_path))  # those of both
    flood = [
        Request((number, *SHARED[1:]), 1, salt="yours", owner="yours") for number in range(1, 6)
    ]
    answers(stored(tmp_path, policy, limit=size + disk_tier.FILE_OVERHEAD), [mine, *flood])
    answered = answers(stored(tmp_path, policy), [mine])
    assert answered[0][1] == usable(200)


@pytest.mark.parametrize("policy", BOTH)
@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "other"])
def test_a_damaged_file_is_deleted_and_computed_again(tmp_path, caplog, policy, damage):
    expected = expected_answers(policy)
    answers(stored(tmp_path, policy))
    for file in files(tmp_path):
        raw = bytearray(file.read_bytes())
        if damage == "flipped":
            raw[::50] = bytes(byte ^ 1 for byte in raw[::50])
        file.write_bytes(
            {"truncated": raw[: len(raw) // 2], "empty": b"", "flipped": raw, "other": b"x" * 99}[
                damage
            ]
        )
    engine = stored(tmp_path, policy)
    actual = answers(engine)
    assert [scored for scored, _ in actual] == [scored for scored, _ in expected]
    assert engine.metrics()["disk_failures"] > 0 and not engine.failure
    warnings = [line.getMessage() for line in caplog.records]
    assert len(warnings) == engine.metrics()["disk_failures"]
    assert all(
        "cannot be read, is deleted and computed again" in warning and "\n" not in warning
        for warning in warnings
    )
    assert answers(stored(tmp_path, policy)) == expected, "the files were written again"


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"chunk": 32}, {"policy": "streaming:sinks=3,window=13"}, {"max_len": 1024}],
)
def test_prefixes_of_other_settings_are_not_read(tmp_path, caplog, change):
    answers(stored(tmp_path, "full"))
    before = files(tmp_path)
    engine = stored(tmp_path, **{"policy": "full"} | change)
    (record,) = caplog.records
    assert f"{len(before)} of {len(before)} prefixes" in record.getMessage()
    assert answers(engine, ASKED[:1])[0][1] == 0
    assert engine.metrics()["disk_failures"] == 0 and set(before) < set(files(tmp_path))
    again = stored(tmp_path, "full")
    assert answers(again) == expected_answers("full"), "the others stay"


@pytest.mark.parametrize("policy", BOTH)
def test_a_read_only_folder_is_read(tmp_path, caplog, monkeypatch, policy):
    answers(stored(tmp_path, policy), ASKED[:1])
    before, real = files(tmp_path), os.open

    def refuse(path, flags, *arguments, **fields):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *arguments, **fields)

    monkeypatch.setattr(os, "open", refuse)
    engine = stored(tmp_path, policy)
    assert answers(engine) and files(tmp_path) == before
    (record,) = caplog.records
    assert "cannot be written (Read-only file system)" in record.getMessage()
    metrics = engine.metrics()
    assert metrics["disk_hits"] > 0 and metrics["disk_failures"] == metrics["disk_writes"] == 0


@pytest.mark.parametrize("policy", BOTH)
def test_a_full_disk_is_reported_once(tmp_path, caplog, monkeypatch, policy):
    """Writing goes on when the disk has room again, with everything that memory still has."""
    real, full = batch.atomic_file, True

    def refuse(*arguments):
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(batch, "atomic_file", refuse)
    monkeypatch.setattr(disk_tier, "PAUSE", 0.2)
    engine = stored(tmp_path, policy)
    engine.start()
    for _ in range(2):
        for request in ASKED:
            done = Recorder()
            engine.submit(request, done)
            eventually(lambda: done.outcomes)  # noqa: B023
        eventually(lambda: engine.metrics()["disk_failures"] >= 2)
    assert engine.healthy and not files(tmp_path)
    (record,) = caplog.records
    message = record.getMessage()
    assert "the server goes on" in message and "No space left" in message and "\n" not in message
    full = False
    eventually(lambda: engine.metrics()["disk_entries_waiting"] == 0)
    assert engine.stop() and files(tmp_path)
    assert len(list(tmp_path.iterdir())) == len(files(tmp_path)) + 1, "only the lock besides"


@pytest.mark.parametrize("policy", BOTH)
def test_a_slow_disk_delays_no_answer(tmp_path, monkeypatch, policy):
    """The engine answers while the first write hangs; all prefixes are written afterwards."""
    released, real, began = threading.Event(), batch.atomic_file, threading.Event()

    def hang(*arguments):
        assert threading.current_thread().name == "jaxkv-prefix-writer"
        began.set()
        released.wait(60)
        return real(*arguments)

    monkeypatch.setattr(batch, "atomic_file", hang)
    engine = stored(tmp_path, policy)
    engine.start()
    listeners = [Recorder() for _ in ASKED]
    for request, listener in zip(ASKED, listeners, strict=True):
        engine.submit(request, listener)
    eventually(lambda: all(listener.outcomes for listener in listeners))
    eventually(began.is_set)
    assert not files(tmp_path)
    assert engine._store.disk._jobs.qsize() <= disk_tier.WRITES_AHEAD
    waiting = engine.metrics()["disk_entries_waiting"]
    assert waiting > disk_tier.WRITES_AHEAD + 1
    released.set()
    eventually(lambda: len(files(tmp_path)) == waiting)  # also while no request comes
    assert engine.stop()
    assert answers(stored(tmp_path, policy)) == expected_answers(policy)


def test_a_slow_disk_is_not_read_for_long(tmp_path, monkeypatch):
    """What is not read in time is computed; the answer is the same."""
    expected = expected_answers("full")[:1]
    answers(stored(tmp_path, "full"), ASKED[:1])
    real = batch.load

    def slow(*arguments):
        time.sleep(0.1)
        return real(*arguments)

    monkeypatch.setattr(batch, "load", slow)
    monkeypatch.setattr(store, "READ_SECONDS", 0.15)
    engine = stored(tmp_path, "full")
    ((scored, cached),) = answers(engine, ASKED[:1])
    assert scored == expected[0][0] and 0 < cached < expected[0][1]


def test_the_end_waits_so_long_and_no_longer(tmp_path, monkeypatch, caplog):
    released = threading.Event()
    monkeypatch.setattr(batch, "atomic_file", lambda *_: released.wait(60))
    engine = stored(tmp_path, "full")
    engine.start()
    done = Recorder()
    engine.submit(ASKED[0], done)
    eventually(lambda: done.outcomes)
    began = time.monotonic()
    assert engine.stop(0.5) and time.monotonic() - began < 5
    assert "prefixes were not written" in caplog.text
    with pytest.raises(UserError, match="one server at a time"):  # a write still runs
        PrefixFolder(tmp_path, 2**30)
    released.set()


def test_an_unfinished_file_is_deleted_at_the_start(tmp_path):
    answers(stored(tmp_path, "full"), ASKED[:1])
    name = files(tmp_path)[0].name
    (tmp_path / f".{name}.abcdef").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("not ours")
    PrefixFolder(tmp_path, 2**30).close()
    assert not (tmp_path / f".{name}.abcdef").exists() and (tmp_path / "notes.txt").exists()


@pytest.mark.parametrize(
    "stored_blocks, num_blocks, cached",
    [({0, 1, 2}, 8, 48), ({0, 1}, 8, 32), ({1, 2}, 8, 0), ({0, 1, 2}, 2, 32)],
)
def test_leading_blocks_are_restored_once(tmp_path, stored_blocks, num_blocks, cached):
    """As far as the files have no gap and pages are free; blocks in memory are not read again."""
    request = Request(SHARED[:50], 4, logprobs=1)
    engine = stored(tmp_path, "full")
    hashes = engine._store.index.hash_prompt(request.tokens, engine._store._root(None)).hashes
    expected = answers(engine, [request])[0][0]
    for number in {0, 1, 2} - stored_blocks:
        (file,) = tmp_path.glob(f"*{hashes[number].hex()}*")
        file.unlink()
    engine = stored(tmp_path, "full", blocks=num_blocks)
    (first,) = ask(engine, request)
    assert (first.scored, first.outcome.cached_tokens) == (expected, cached)
    hits = engine.metrics()["disk_hits"]
    assert answers(engine, [request])[0] == (expected, 48 if num_blocks == 8 else 32)
    metrics = engine.metrics()
    assert metrics["disk_hits"] == hits and metrics["disk_failures"] == 0
    assert metrics["prefix_hits"] + sum(metrics["misses"].values()) == 2 * 50


@pytest.mark.parametrize("policy", BOTH)
def test_a_valid_file_under_the_name_of_another_prefix_is_deleted(tmp_path, caplog, policy):
    """Once, with one line; then the prefix is stored again."""
    asked = [Request(SHARED[start : start + CHUNK + 1], 2, logprobs=1) for start in (0, CHUNK)]
    answers(stored(tmp_path, policy), asked)
    first, second = files(tmp_path)
    content = first.read_bytes()
    second.write_bytes(content)
    for failures in (1, 0):
        engine = stored(tmp_path, policy)
        actual = answers(engine, asked)
        assert [scored for scored, _ in actual] == alone(policy, asked)
        assert engine.metrics()["disk_failures"] == failures
        assert len(caplog.records) == 1 and "is deleted" in caplog.text
    assert [cached for _, cached in actual] == [CHUNK, CHUNK]


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_socket(path: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as bound:
        bound.bind("s")
    (path.parent / "s").rename(path)


PUT = {
    "pipe": put_pipe, "socket": put_socket, "folder": Path.mkdir,
    "link to a pipe": lambda path: (os.mkfifo(path.parent / "p"), path.symlink_to("p")),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to nothing": lambda path: path.symlink_to("absent"),
}  # fmt: skip


@pytest.mark.parametrize("at_start", [True, False])
@pytest.mark.parametrize("kind", PUT)
def test_what_is_no_regular_file_does_not_stop_the_engine(tmp_path, kind, at_start):
    """It is removed, and the prefix is computed and stored again."""
    policy = BOTH[1]
    answers(stored(tmp_path, policy), ASKED[:1])
    (name,) = files(tmp_path)
    engine = None if at_start else stored(tmp_path, policy)
    name.unlink()
    PUT[kind](name)
    engine = engine or stored(tmp_path, policy)
    assert answers(engine, ASKED[:1]) == [(alone(policy)[0], 0)]
    assert engine.metrics()["disk_failures"] == (not at_start)
    assert name.is_file() and not name.is_symlink()
    assert answers(stored(tmp_path, policy), ASKED[:1])[0][1] == usable(200)


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_folder_that_disappears(tmp_path, caplog, renamed, again):
    """The engine goes on without it; what is in memory still helps.

    Another server may use a folder of the same name, into which this one then writes nothing.
    """
    folder = tmp_path / "folder"
    engine = stored(folder, "full")
    ask(engine, ASKED[0])
    eventually(lambda: not engine._store.disk._jobs.unfinished_tasks)
    folder.rename(tmp_path / "old") if renamed else shutil.rmtree(folder)
    prefix_folder = PrefixFolder(folder, 2**30) if again else None
    for request, scored in zip(ASKED, alone("full"), strict=True):
        (listener,) = ask(engine, request)
        assert listener.scored == scored
    assert listener.outcome.cached_tokens > 0
    engine.stop()
    assert engine.metrics()["disk_failures"] == engine.metrics()["disk_entries_waiting"] == 0
    (record,) = caplog.records
    assert "was removed or replaced; the server goes on" in record.getMessage()
    assert folder.exists() == again and not files(folder)
    if prefix_folder is not None:
        prefix_folder.close()
