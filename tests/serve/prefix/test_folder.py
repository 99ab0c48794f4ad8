"""The folder of prefixes: order of use over restarts, shares of owners, bytes, and its lock."""

from __future__ import annotations

import os

import pytest

from jaxkv.errors import UserError
from jaxkv.serve.prefix.block_hash import sha256
from jaxkv.serve.prefix.folder import PrefixFolder, owner_tag

SETTINGS, OTHER = "0" * 16, "f" * 16
SIZE = 100


def hash_of(number: int) -> bytes:
    return sha256(bytes([number]))


def write(folder: PrefixFolder, number: int, owner: str | None = None, settings=SETTINGS) -> bool:
    """Write a file as the engine's writer does; returns whether there was room."""
    if not folder.make_room(owner, SIZE):
        return False
    name = folder.name(settings, owner, hash_of(number))
    (folder.path / name).write_bytes(bytes(SIZE))
    folder.add(name)
    return True


def numbers(folder: PrefixFolder) -> set[int]:
    """The numbers of the indexed files, which must be those on the disk."""
    entries = {n for n in range(100) if folder.has(SETTINGS, hash_of(n))}
    names = {path.name for path in folder.path.glob("*.prefix") if path.name.startswith(SETTINGS)}
    assert {name[-71:-7] for name in names} == {hash_of(n).hex() for n in entries}
    assert folder.bytes == sum(path.stat().st_size for path in folder.path.glob("*.prefix"))
    return entries


def test_the_least_recently_used_file_leaves_first_also_after_a_restart(tmp_path):
    folder = PrefixFolder(tmp_path, 4 * SIZE)
    for number in range(4):
        write(folder, number)
    folder.touch(SETTINGS, [hash_of(1), hash_of(0), hash_of(77)], None)
    folder.close()
    folder = PrefixFolder(tmp_path, 4 * SIZE)
    for number in (4, 5, 6):
        write(folder, number)
    assert numbers(folder) == {0, 4, 5, 6} and folder.evictions == 3
    folder.close()
    folder = PrefixFolder(tmp_path, 2 * SIZE)  # a smaller limit holds at the start
    assert len(numbers(folder)) == 2
    folder.close()


def test_a_file_in_use_stays(tmp_path):
    folder = PrefixFolder(tmp_path, 2 * SIZE)
    write(folder, 0)
    write(folder, 1)
    first, second = (folder.hold(SETTINGS, hash_of(n)) for n in (0, 1))
    assert not write(folder, 2) and numbers(folder) == {0, 1}
    folder.release(second)
    assert write(folder, 2) and numbers(folder) == {0, 2}
    folder.release(first)
    assert folder.hold(SETTINGS, hash_of(1)) is None
    folder.close()


def test_no_owner_takes_the_share_of_another(tmp_path):
    folder = PrefixFolder(tmp_path, 6 * SIZE)
    for number in range(3):
        folder.touch(SETTINGS, [], "a")
        write(folder, number, "a")
    for number in range(10, 30):
        folder.touch(SETTINGS, [], "b")
        write(folder, number, "b")
    assert numbers(folder) == {0, 1, 2, 27, 28, 29}
    folder.close()


def test_files_of_other_settings_count_and_leave_first(tmp_path):
    folder = PrefixFolder(tmp_path, 3 * SIZE)
    write(folder, 0, settings=OTHER)
    write(folder, 0)
    assert len(folder) == 2 and folder.count(SETTINGS) == 1 and folder.bytes == 2 * SIZE
    folder.touch(SETTINGS, [hash_of(0)], None)
    write(folder, 1)
    write(folder, 2)
    assert not folder.count(OTHER) and numbers(folder) == {0, 1, 2}
    folder.clear(SETTINGS)
    assert not numbers(folder) and folder.bytes == 0
    folder.close()


def test_a_file_that_cannot_be_deleted_stays_in_the_index(tmp_path, monkeypatch):
    folder = PrefixFolder(tmp_path, SIZE)
    write(folder, 0)

    def refuse(*_, **__):
        raise PermissionError("read-only")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.unlink", refuse)
        with pytest.raises(PermissionError):
            write(folder, 1)
    assert numbers(folder) == {0} and folder.evictions == 0
    assert write(folder, 1) and numbers(folder) == {1}
    folder.close()


def test_only_its_own_files_are_touched(tmp_path):
    kept = [
        "notes.txt",
        f"{SETTINGS}.prefix",
        ".hidden",
        f"{SETTINGS}-{SETTINGS}-{'z' * 64}.prefix",
    ]
    for name in kept:
        (tmp_path / name).write_text("x" * 999)
    folder = PrefixFolder(tmp_path, SIZE)
    write(folder, 0)
    write(folder, 1)
    folder.close()
    assert all((tmp_path / name).exists() for name in kept) and folder.bytes == SIZE


def test_one_process_and_one_engine_at_a_time(tmp_path):
    folder = PrefixFolder(tmp_path, SIZE)
    with pytest.raises(UserError, match="one server at a time"):
        PrefixFolder(tmp_path, SIZE)
    folder.attach()
    with pytest.raises(UserError, match="one engine"):
        folder.attach()
    folder.close()
    PrefixFolder(tmp_path, SIZE).close()


def test_an_unreadable_folder_is_not_locked(tmp_path, monkeypatch):
    def refuse(_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        with pytest.raises(UserError, match="can be read"):
            PrefixFolder(tmp_path, SIZE)
    PrefixFolder(tmp_path, SIZE).close()


def test_owners_have_names_that_are_no_keys():
    tags = {owner_tag(owner) for owner in (None, "", "None", "a", "b")}
    assert len(tags) == 5 and all(len(tag) == 16 for tag in tags)
    assert owner_tag("a") == owner_tag("a")
