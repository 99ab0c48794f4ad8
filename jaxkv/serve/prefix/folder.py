"""A folder of prefixes that survives a restart: its files, their bytes and their order of use.

A prefix is one file. Its name has the settings that the prefix was computed with, its owner and its
hash, so the index is read from the names alone. No name contains an API key: an owner is a hash.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jaxkv.errors import UserError, check_int
from jaxkv.serve.prefix.block_hash import sha256
from jaxkv.serve.prefix.owners import FairLRU, Owner, Shares

LOCK = "lock"
TICK = 1e-6  # seconds between two uses, so that a restart finds their order
NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{64})\.prefix")
UNFINISHED = re.compile(rf"\.{NAME.pattern}\..*")


@dataclass(slots=True, eq=False)
class PrefixFile:
    """One file. used: the time of its last use. stored: that time in the file's metadata. refs: its
    current readers, which protect it from deletion."""

    name: str
    owner: Owner
    bytes: int
    used: float
    stored: float = 0.0
    refs: int = 0


class PrefixFolder:
    """The files of one folder, which one process uses at a time.

    path: made if it is absent, readable by its user only. limit: most bytes of its files; the least
    recently used ones are deleted first, and owners have equal shares (owners.py). Files of other
    settings count too, and are never read. problem: why the folder cannot be written; its prefixes
    are then read only. lost: whether the folder was removed, and its lock with it; it then has no
    files, because another process may use a new folder of that name. Any thread may call the
    methods.
    Raises UserError if the path is no folder, or if another process uses it.
    """

    def __init__(self, path: str | os.PathLike, limit: int) -> None:
        check_int("limit", limit)
        self.path, self.limit, self.problem = Path(path).expanduser(), limit, ""
        self.lost = False
        self.bytes = self.evictions = 0
        self._files: dict[tuple[str, str], PrefixFile] = {}  # by settings and hash
        self._shares = Shares()
        self._order: FairLRU[PrefixFile] = FairLRU(self._shares)
        self._guard = threading.Lock()
        self._lock: int | None = None
        self._attached = False
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = self._take_lock()
            self._read(os.scandir(self.path))
        except OSError as error:
            self.close()
            raise UserError(
                f"a prefix folder must be one that exists or can be created, and can be read, got "
                f"{self.path}: {error.strerror}; give another"
            ) from None

    def attach(self) -> None:
        """Note that an engine uses the folder; raises UserError for a second one."""
        if self._attached:
            raise UserError(
                f"a prefix folder serves one engine, and {self.path} was given to two; open it "
                "again when the first has stopped"
            )
        self._attached = True

    def _take_lock(self) -> int | None:
        """The open lock file; None if the folder cannot be written, where no lock is needed."""
        try:
            import fcntl
        except ModuleNotFoundError:  # on Windows
            raise UserError(
                "a prefix folder needs the file locks of POSIX, which this system lacks; leave it "
                "out"
            ) from None
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            lock = os.open(self.path / LOCK, flags, 0o600)
        except OSError as error:
            self.problem = error.strerror
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UserError(
                f"a prefix folder belongs to one server at a time, and another one uses "
                f"{self.path}; give each its own"
            ) from None
        except OSError as error:
            os.close(lock)
            raise UserError(
                f"a prefix folder must be on a disk with file locks, and {self.path} has none: "
                f"{error.strerror}; give a folder on another disk"
            ) from None
        return lock

    def _read(self, entries: Iterable[os.DirEntry]) -> None:
        """Index the files, and delete those that an earlier process did not finish."""
        files = []
        for entry in entries:
            with contextlib.suppress(OSError):  # a file that is gone, or a read-only folder
                if NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    files.append(described(entry.name, entry.stat()))
                elif NAME.fullmatch(entry.name) or UNFINISHED.fullmatch(entry.name):
                    remove(Path(entry.path))  # a pipe, for one, which cannot be replaced or read
        for file in sorted(files, key=lambda file: file.used):
            if (old := self._files.get(key_of(file.name))) is not None:
                self.discard(old)  # a copy that somebody made under the name of another owner
            self._insert(file)
        with contextlib.suppress(OSError):  # the first write reports it
            self.make_room(None, 0)

    def __len__(self) -> int:
        return len(self._files)

    def detect_loss(self) -> bool:
        """Whether this call is the first to find the folder or its lock removed or replaced."""
        with self._guard:
            if self._lock is None or self.lost:
                return False
            locked = os.fstat(self._lock)
            try:
                named = os.stat(self.path / LOCK, follow_symlinks=False)
            except FileNotFoundError:
                named = None
            except OSError:  # a disk that fails may come back
                named = locked
            self.lost = named is None or not os.path.samestat(named, locked)
            for file in list(self._files.values()) if self.lost else ():
                self._remove(file)
            return self.lost

    def count(self, settings: str) -> int:
        """The files of these settings."""
        with self._guard:
            return sum(key[0] == settings for key in self._files)

    def has(self, settings: str, hash: bytes) -> bool:
        return (settings, hash.hex()) in self._files

    def touch(self, settings: str, hashes: Iterable[bytes], owner: Owner) -> None:
        """Mark the files of these hashes as used, the last one most recently, and their owner."""
        now = time.time()
        with self._guard:
            self._shares.touch(owner_tag(owner))
            for hash in hashes:
                if file := self._files.get((settings, hash.hex())):
                    file.used = now = now + TICK
                    self._order.touch(file)

    def hold(self, settings: str, hash: bytes) -> PrefixFile | None:
        """The file of a hash, protected until `release`; None if there is none."""
        with self._guard:
            file = self._files.get((settings, hash.hex()))
            if file is not None:
                file.refs += 1
        return file

    def release(self, file: PrefixFile) -> None:
        with self._guard:
            file.refs -= 1

    def name(self, settings: str, owner: Owner, hash: bytes) -> str:
        """The name of the file of a prefix."""
        return f"{settings}-{owner_tag(owner)}-{hash.hex()}.prefix"

    def make_room(self, owner: Owner, size: int) -> bool:
        """Delete files until `size` more bytes fit; False if they never do.

        owner: who needs them. Raises OSError if a file cannot be deleted.
        """
        while True:
            with self._guard:
                if self.bytes + size <= self.limit:
                    return True
                file = self._order.oldest(owner_tag(owner))
                if file is None:
                    return False
                self._remove(file)
            try:
                (self.path / file.name).unlink(missing_ok=True)
            except OSError:
                with self._guard:
                    self._insert(file)
                raise
            self.evictions += 1

    def add(self, name: str) -> None:
        """Index a file that was written. Raises OSError if it is gone."""
        file = described(name, os.stat(self.path / name, follow_symlinks=False))
        with self._guard:
            self._insert(file)

    def discard(self, file: PrefixFile) -> None:
        """Delete a file that cannot be used."""
        with self._guard:
            if self._files.get(key_of(file.name)) is file:
                self._remove(file)
        with contextlib.suppress(OSError):
            remove(self.path / file.name)

    def clear(self, settings: str) -> None:
        """Delete all files of these settings."""
        with self._guard:
            files = [file for key, file in self._files.items() if key[0] == settings]
        for file in files:
            self.discard(file)

    def close(self) -> None:
        """Store when each file was used last, and let another process use the folder."""
        with self._guard:
            changed = [file for file in self._files.values() if file.used != file.stored]
        for file in changed:
            with contextlib.suppress(OSError):
                os.utime(self.path / file.name, (file.used, file.used), follow_symlinks=False)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _insert(self, file: PrefixFile) -> None:
        self._files[key_of(file.name)] = file
        self._order.add(file)
        self.bytes += file.bytes

    def _remove(self, file: PrefixFile) -> None:
        del self._files[key_of(file.name)]
        self._order.remove(file)
        self.bytes -= file.bytes


def remove(path: Path) -> None:
    """Delete a file, pipe, link or empty folder. Raises OSError."""
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def key_of(name: str) -> tuple[str, str]:
    """The settings and the hash in the name of a file."""
    match = NAME.fullmatch(name)
    return match[1], match[3]


def described(name: str, stat: os.stat_result) -> PrefixFile:
    return PrefixFile(
        name, NAME.fullmatch(name)[2], stat.st_size, stat.st_mtime, stored=stat.st_mtime
    )


def owner_tag(owner: Owner) -> str:
    """The name of an owner on the disk, equal after a restart."""
    return sha256(b"jaxkv prefix owner " + repr(owner).encode()).hex()[:16]
