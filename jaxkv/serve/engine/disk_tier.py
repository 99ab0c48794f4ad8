"""The part of a prefix store that lies on the disk and survives a restart.

Entries wait in the store until the writer's thread has room. So the engine's thread never waits for
a write, and at most WRITES_AHEAD copies are in memory. An entry that is evicted before is lost.
"""

from __future__ import annotations

import logging
import os
import platform
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxkv import __version__
from jaxkv.errors import UserError
from jaxkv.serve.prefix.block_hash import root_hash
from jaxkv.serve.prefix.folder import PrefixFolder
from jaxkv.serve.prefix.index import Entry
from jaxkv.serve.prefix.owners import Owner
from jaxkv.state import batch, memory

WRITES_AHEAD = 2  # copies of entries that wait for the disk
PAUSE = 60.0  # seconds without a write after one that failed
READ_SECONDS = 1.0  # after which the rest of a prompt is computed, because the engine waits
POLL = 0.05  # seconds after which an idle engine looks whether the writer has room
FILE_OVERHEAD = 2**16  # bytes of a file besides arrays and tokens, at most
LOG = logging.getLogger(__name__)


def check_limit(folder: PrefixFolder, size: int) -> None:
    """Raise UserError for a folder that cannot hold one prefix of so many bytes."""
    size += FILE_OVERHEAD
    if folder.limit < size:
        raise UserError(
            f"a prefix folder must hold one prefix, which takes {memory.show(size)}, got "
            f"{memory.show(folder.limit)}; give it (--prefix-dir-size) more"
        )


class DiskTier:
    """The files of one store's prefixes. Only `_run` is called in another thread than the engine's.

    folder: None for no disk.
    settings: what a prefix depends on besides its tokens and owner.
    like: the shapes of an entry's arrays.
    max_waiting: the number of entries that may wait, which is that of the store.
    get: an entry -> a copy of its arrays; None if the store no longer has it.
    Raises UserError if another engine has the folder.
    """

    def __init__(
        self,
        folder: PrefixFolder | None,
        settings: str,
        like: Any,
        max_waiting: int,
        get: Callable[[Entry], Any],
    ) -> None:
        self._folder, self._settings, self._like = folder, settings, like
        self._max_waiting, self._get = max_waiting, get
        self._waiting: dict[bytes, Entry] = {}
        self._jobs: queue.Queue[tuple[Entry, Any] | None] = queue.Queue(WRITES_AHEAD)
        self._writer: threading.Thread | None = None
        self._paused_until = 0.0
        self._failing = self._closed = False
        self.hits = self.writes = self.failures = self.lost = 0
        if folder is None:
            return
        folder.attach()
        self._size = batch.nbytes(like)
        if folder.problem:
            LOG.warning(
                "%s cannot be written (%s): its prefixes are read, and new ones are not stored",
                folder.path,
                folder.problem,
            )
        if foreign := len(folder) - folder.count(settings):
            LOG.warning(
                "%d of %d prefixes in %s are of another model, policy, version or machine and are "
                "not read; they are deleted when the folder is full",
                foreign,
                len(folder),
                folder.path,
            )

    @property
    def idle_seconds(self) -> float | None:
        """After how long an idle engine should call `write` again; None for never."""
        return max(POLL, self._paused_until - time.monotonic()) if self._waiting else None

    def has(self, hash: bytes) -> bool:
        return self._folder is not None and self._folder.has(self._settings, hash)

    def touch(self, hashes: list[bytes], owner: Owner) -> None:
        """Mark the prefixes of one prompt as used; a prefix outlives those that continue it."""
        if self._folder is not None:
            self._folder.touch(self._settings, reversed(hashes), owner)

    def add(self, entry: Entry) -> None:
        """Let an entry of the store wait until it is written."""
        folder = self._folder
        if folder is None or folder.problem or folder.lost or self.has(entry.hash):
            return
        self._waiting[entry.hash] = entry
        if len(self._waiting) > self._max_waiting:  # the oldest was evicted long ago
            del self._waiting[next(iter(self._waiting))]
            self.lost += 1

    def write(self) -> None:
        """Give waiting entries to the writer while it has room. It never waits."""
        if self._folder is not None and self._folder.lost:
            self._waiting.clear()
        while self._waiting and not self._jobs.full() and not self._is_paused():
            entry = self._waiting.pop(next(iter(self._waiting)))
            arrays = self._get(entry)
            if arrays is None:
                self.lost += 1
                continue
            if self._writer is None:
                self._writer = threading.Thread(
                    target=self._run, name="jaxkv-prefix-writer", daemon=True
                )
                self._writer.start()
            self._jobs.put_nowait((entry, arrays))

    def read(self, entry: Entry) -> Any:
        """The stored arrays of an entry, of numpy; None if there are none that can be used."""
        if not self._has_folder():
            return None
        file = self._folder.hold(self._settings, entry.hash)
        if file is None:
            return None
        like = {"prefix": _bytes(entry.data), "arrays": np.broadcast_to(np.uint8(0), self._size)}
        try:
            content = batch.load(self._folder.path / file.name, like, self._identity)
            if content["prefix"].tobytes() != entry.data:
                raise UserError("it has another prefix than its name says")
        except UserError as error:
            self.failures += 1
            LOG.warning(
                "the prefix in %s cannot be read, is deleted and computed again: %s",
                self._folder.path / file.name,
                str(error).partition(";")[0],
            )
            self._folder.discard(file)
            return None
        finally:
            self._folder.release(file)
        self.hits += 1
        return unpack(content["arrays"], self._like)

    def _has_folder(self) -> bool:
        """Whether there is a folder. One that is removed loses its lock, so another may use it."""
        if self._folder is not None and self._folder.detect_loss():
            LOG.warning(
                "%s was removed or replaced; the server goes on without it until it is restarted",
                self._folder.path,
            )
        return self._folder is not None and not self._folder.lost

    def discard(self, hashes: list[bytes]) -> None:
        """Delete the files of these hashes."""
        for hash in hashes:
            if file := self._folder.hold(self._settings, hash):
                self._folder.discard(file)

    def clear(self) -> None:
        """Delete all prefixes of these settings, also those that are being written."""
        self._waiting.clear()
        if self._folder is not None:
            self._jobs.join()
            self._folder.clear(self._settings)

    def close(self, seconds: float | None, keep: bool) -> None:
        """Write the entries that wait, for up to `seconds`, and give the folder back.

        keep: whether the waiting entries can be written; not after a failure of the engine.
        """
        if self._folder is None or self._closed:
            return
        until = None if seconds is None else time.monotonic() + seconds
        while keep and self._waiting and not self._is_paused() and _seconds_left(until):
            self.write()
            time.sleep(0.001)
        while self._writer is not None and self._jobs.full() and _seconds_left(until):
            time.sleep(0.001)
        end_sent = self._writer is not None and not self._jobs.full()
        if end_sent:
            self._jobs.put_nowait(None)
            self._writer.join(None if until is None else _seconds_left(until))
        unwritten = len(self._waiting) + max(0, self._jobs.unfinished_tasks - end_sent)
        if unwritten:
            LOG.warning("%d prefixes were not written to %s", unwritten, self._folder.path)
        if self._writer is None or not self._writer.is_alive():
            self._folder.close()
            self._closed = True

    def metrics(self) -> dict[str, int]:
        folder = self._folder
        return {
            "disk_entries": 0 if folder is None else folder.count(self._settings),
            "disk_bytes": 0 if folder is None else folder.bytes,
            "disk_entries_waiting": len(self._waiting) + self._jobs.unfinished_tasks,
            "disk_hits": self.hits,
            "disk_writes": self.writes,
            "disk_failures": self.failures,
            "disk_evictions": 0 if folder is None else folder.evictions,
            "disk_lost": self.lost,
        }

    @property
    def _identity(self) -> str:
        return f"jaxkv prefix {self._settings}"

    def _is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def _run(self) -> None:
        """The writer's thread."""
        while (job := self._jobs.get()) is not None:
            try:
                self._write(*job)
                self._failing = False
            except Exception as error:  # the thread must survive
                self.failures += 1
                self._paused_until = time.monotonic() + PAUSE
                if not self._failing:
                    LOG.warning("prefixes cannot be written, the server goes on: %s", error)
                self._failing = True
            finally:
                self._jobs.task_done()
                del job  # its arrays
        self._jobs.task_done()

    def _write(self, entry: Entry, arrays: Any) -> None:
        if not self._has_folder():
            self.lost += 1
            return
        size = self._size + len(entry.data) + FILE_OVERHEAD
        if not self._folder.make_room(entry.owner, size):
            self.lost += 1  # all other files are being read
            return
        name = self._folder.name(self._settings, entry.owner, entry.hash)
        content = {"prefix": _bytes(entry.data), "arrays": pack(arrays)}
        batch.save(self._folder.path / name, content, self._identity, private=True)
        self._folder.add(name)
        self.writes += 1


def settings_hash(root: bytes, shapes: Any) -> str:
    """A short hash of what the bits of a prefix depend on. root: the store's, without a salt."""
    device = jax.local_devices()[0]
    return root_hash(
        root=root,
        shapes=str(jax.tree.leaves(shapes)),
        jaxkv=__version__,
        jax=jax.__version__,
        jaxlib=jax.lib.__version__,
        device=f"{device.platform} {device.device_kind}",
        processor=_processor() if device.platform == "cpu" else "",
        flags=os.environ.get("XLA_FLAGS", ""),
    ).hex()[:16]


def pack(arrays: Any) -> np.ndarray:
    """The bytes of all arrays as one, because each array of a file takes time to open."""
    return _bytes(
        b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(batch.to_host(arrays)))
    )


def unpack(packed: np.ndarray, like: Any) -> Any:
    """The inverse of `pack`; like: the shapes of the arrays."""
    ends = np.cumsum([batch.nbytes(leaf) for leaf in jax.tree.leaves(like)])
    parts = iter(np.split(packed, ends[:-1]))
    return jax.tree.map(lambda leaf: next(parts).view(leaf.dtype).reshape(leaf.shape), like)


def _processor() -> str:
    """What XLA compiles for on a CPU: its instructions, and its number of threads."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.machine()} {threads} {flags}"


def _bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def _seconds_left(until: float | None) -> float:
    """The seconds until a time, 0 or more; endless without a limit."""
    return float("inf") if until is None else max(0.0, until - time.monotonic())
