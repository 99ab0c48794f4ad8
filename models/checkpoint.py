"""The folder of a training run: its lock, what it is a run of, and its checkpoints.

    OUT/run.json     the recipe and the data: a folder belongs to one run
    OUT/last/STEP    the newest two checkpoints, to go on from
    OUT/best/STEP    the one with the least loss on the valid split

Orbax writes them beside the training, each whole under its name or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxkv.errors import UserError
from jaxkv.files import whole_file
from models.hf.folder import read_json
from models.training import Training

RUN, LOCK = "run.json", "lock"
KEPT = {"last": 2, "best": 1}


@contextlib.contextmanager
def own(folder: Path, run: Mapping[str, Any], writes: bool = True) -> Iterator[None]:
    """Hold a folder for one run, alone.

    writes: False in all processes of a run but one, which do not hold it.
    Raises UserError where another process holds it, where it belongs to another run, or where it
    holds files and no run at all.
    """
    if not writes:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / RUN).exists() and any(p.name != LOCK for p in folder.iterdir()):
            raise UserError(
                f"--out must be a new folder or that of a run to go on with: {folder} holds other "
                "files; choose another"
            )
        with (folder / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"one run writes to a folder, and another is writing to {folder}; wait for it "
                    "or choose another"
                ) from None
            _belong(folder, run)
            yield
    except OSError as error:
        raise UserError(
            f"--out must be a folder that can be written to: {folder}: {error.strerror or error}; "
            "make room, or choose another; the same command goes on from the last checkpoint"
        ) from None


def _belong(folder: Path, run: Mapping[str, Any]) -> None:
    """Note whose folder it is, or check it."""
    held = read_json(folder / RUN)
    if not held:
        with whole_file(folder / RUN) as file:
            file.write((json.dumps(run, indent=1) + "\n").encode())
        return
    for name in sorted(held.keys() | run.keys()):
        if held.get(name) != run.get(name):
            raise UserError(
                f"{folder} is the folder of another run: {name} was {held.get(name)!r} and is now "
                f"{run.get(name)!r}; go on with what it was begun with, or choose another --out"
            )


class Checkpoints:
    """Saves and restores of one run; nothing is on the disk for certain before `wait`."""

    def __init__(self, folder: Path):
        logging.getLogger("absl").setLevel(logging.ERROR)
        self.folder = folder
        self._managers = {
            name: ocp.CheckpointManager(
                (folder / name).absolute(),
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=kept, enable_async_checkpointing=True, create=True
                ),
            )
            for name, kept in KEPT.items()
        }

    def save(self, training: Training, name: str = "last") -> None:
        """Begin to write one; what went wrong in the one before is raised here."""
        step = int(training.step)
        if step not in self._managers[name].all_steps():
            self._managers[name].save(step, args=ocp.args.StandardSave(training._asdict()))

    def newest(self, name: str = "last") -> int | None:
        """The step of the newest checkpoint; None where there is none."""
        return self._managers[name].latest_step()

    def wait(self) -> None:
        """Until all is on the disk."""
        for manager in self._managers.values():
            manager.wait_until_finished()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        for manager in self._managers.values():
            manager.close()

    def restore(self, like: Training, name: str = "last") -> Training | None:
        """The newest checkpoint, placed as `like` is; None where there is none yet.

        like: a run's first state, or its shapes and places.
        Raises UserError for one that cannot be read, or is of another model.
        """
        manager = self._managers[name]
        step = manager.latest_step()
        if step is None:
            return None
        where = self.folder / name / str(step)
        wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
        try:
            held = manager.restore(step, args=ocp.args.StandardRestore(wanted))
        except Exception as error:  # each layer below raises kinds of its own
            reason = " ".join(str(error).split())[:160]
            raise UserError(
                f"the checkpoint {where} cannot be read: {reason}; remove that folder to go on "
                "from the one before it"
            ) from error
        return Training(**held)
