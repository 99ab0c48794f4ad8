"""The folder of one run of `jaxkv data` or `jaxkv pretrain`.

OUT/run.json has the settings and the data of the run: a folder belongs to one run.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxkv.errors import UserError
from jaxkv.files import atomic_file
from jaxkv.models.loading.hf.folder import read_json

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

RUN, LOCK = "run.json", "lock"


@contextlib.contextmanager
def lock_folder(folder: Path, run: Mapping[str, Any]) -> Iterator[None]:
    """Lock a folder for one run, where the system has file locks.

    Raises UserError where another process has the lock, where the folder belongs to another run, or
    where it contains other files and no run.
    """
    with contextlib.ExitStack() as stack:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            check_owner(folder, run)
            lock = stack.enter_context((folder / LOCK).open("w"))
            try:
                if fcntl is not None:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"another run is writing to {folder}; wait for it or choose another"
                ) from None
            check_owner(folder, run)  # again: the process before may have written run.json
            if not (folder / RUN).exists():
                with atomic_file(folder / RUN) as file:
                    file.write((json.dumps(run, indent=1) + "\n").encode())
        yield


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Inside, failed writes become UserErrors."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise unwritten(folder, error.strerror or str(error)) from None


def unwritten(folder: Path, reason: str) -> UserError:
    """The error for a folder that cannot be written, or whose disk is full."""
    return UserError(
        f"--out must be a folder that can be written to: {folder}: {reason}; make room, or choose "
        "another; then give the same command again"
    )


def check_owner(folder: Path, run: Mapping[str, Any]) -> None:
    """Raise UserError for a folder of another run, or with other files and no run."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if RUN not in names:
        # A run that was killed while writing run.json leaves a partial file beside it.
        other_files = {n for n in names if n != LOCK and not n.startswith(f".{RUN}.")}
        if other_files:
            raise UserError(
                f"--out must be a new folder or that of a run to resume: {folder} holds "
                f"other files ({min(other_files)}); choose another"
            )
        return
    before = _flat(read_json(folder / RUN, "start the run again in another folder"))
    now = _flat(run)
    changed = [name for name in sorted(before | now) if before.get(name) != now.get(name)]
    if changed:
        changes = "; ".join(f"{n} was {before.get(n)!r} and is now {now.get(n)!r}" for n in changed)
        raise UserError(
            f"{folder} is the folder of another run: {changes}; use its original "
            "settings, or choose another --out"
        )


def _flat(run: Mapping[str, Any]) -> dict[str, Any]:
    """The run with the fields of its recipe at the top level."""
    return {k: v for k, v in run.items() if k != "recipe"} | dict(run.get("recipe", {}))
