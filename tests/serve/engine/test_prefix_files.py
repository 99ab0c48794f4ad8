"""A prefix folder whose files other programs replaced or removed, at the start and at run time."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from pathlib import Path

import pytest

from jaxkv.serve.engine import PrefixFolder, Request
from tests.serve.engine.plain import CHUNK, ask
from tests.serve.engine.test_failure import wait_for
from tests.serve.engine.test_prefix_folder import (
    ASKED,
    BOTH,
    alone,
    answers,
    files,
    stored,
)
from tests.serve.engine.test_prefixes import SHARED, usable


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


def test_a_lock_that_is_no_file_does_not_stop_the_start(tmp_path):
    os.mkfifo(tmp_path / "lock")
    PrefixFolder(tmp_path, 2**30).close()


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_folder_that_disappears(tmp_path, caplog, renamed, again):
    """The engine goes on without it; what is in memory still helps.

    Another server may use a folder of the same name, into which this one then writes nothing.
    """
    folder = tmp_path / "folder"
    engine = stored(folder, "full")
    ask(engine, ASKED[0])
    wait_for(lambda: not engine._store.disk._jobs.unfinished_tasks)
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
