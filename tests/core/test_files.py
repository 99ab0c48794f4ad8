"""Atomic writes of files."""

import os

import pytest

from jaxkv import files


def test_a_file_gets_its_name_when_complete(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with files.atomic_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert os.listdir(tmp_path) == ["file"]


def test_a_failed_write_changes_no_file(tmp_path):
    (tmp_path / "one").write_bytes(b"old")
    with pytest.raises(OSError):
        files.write({tmp_path / "one": b"new", tmp_path / "absent" / "two": b"new"})
    assert os.listdir(tmp_path) == ["one"]
    assert (tmp_path / "one").read_bytes() == b"old"


def test_a_link_stays_and_a_device_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    files.write({tmp_path / "link": b"new"})
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_bytes() == b"new"
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        files.write({pipe: b"new"})
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "pipe"]


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask
