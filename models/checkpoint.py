"""The folder of a training run: its lock, what it is a run of, and its checkpoints.

    OUT/run.json     the recipe and the data: a folder belongs to one run
    OUT/last/STEP    the newest two checkpoints, to go on from
    OUT/best/STEP    the one with the least loss on the valid split

Orbax writes them beside the training, each whole under its name or not at all.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxkv.errors import UserError
from jaxkv.files import whole_file
from jaxkv.models.hf.folder import read_json
from jaxkv.models.training import Training
from jaxkv.typing import Array, UInt32

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

RUN, LOCK = "run.json", "lock"
KEPT = {"last": 2, "best": 1}
# Why nothing can be written, as it stands somewhere in what the layers below say of it.
CAUSES = ("No space left on device", "File too large", "Disk quota exceeded", "Permission denied",
          "Read-only file system")  # fmt: skip


@contextlib.contextmanager
def own(folder: Path, run: Mapping[str, Any]) -> Iterator[None]:
    """Hold a folder for one run, alone, where the system has locks for files.

    Raises UserError where another process holds it, where it belongs to another run, or where it
    holds files and no run at all.
    """
    with contextlib.ExitStack() as held:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            names = {path.name for path in folder.iterdir()}
            # A run that was killed while it wrote run.json leaves what it wrote beside it.
            others = {n for n in names if n != LOCK and not n.startswith(f".{RUN}.")}
            if RUN not in names and others:
                raise UserError(
                    f"--out must be a new folder or that of a run to go on with: {folder} holds "
                    f"other files ({min(others)}); choose another"
                )
            lock = held.enter_context((folder / LOCK).open("w"))
            try:
                if fcntl is not None:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"one run writes to a folder, and another is writing to {folder}; wait for it "
                    "or choose another"
                ) from None
            _belong(folder, run)
        yield


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Inside, what cannot be written is the user's to mend."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _unwritten(folder, error.strerror or str(error)) from None


def _unwritten(folder: Path, reason: str) -> UserError:
    return UserError(
        f"--out must be a folder that can be written to: {folder}: {reason}; make room, or choose "
        "another; the same command goes on from the last checkpoint"
    )


def _belong(folder: Path, run: Mapping[str, Any]) -> None:
    """Note whose folder it is, or check it."""
    held = read_json(folder / RUN, "make the run anew in another folder")
    if not (folder / RUN).exists():
        with whole_file(folder / RUN) as file:
            file.write((json.dumps(run, indent=1) + "\n").encode())
        return
    before, now = _flat(held), _flat(run)
    changed = [name for name in sorted(before | now) if before.get(name) != now.get(name)]
    if changed:
        told = "; ".join(f"{n} was {before.get(n)!r} and is now {now.get(n)!r}" for n in changed)
        raise UserError(
            f"{folder} is the folder of another run: {told}; go on with what it was begun with, or "
            "choose another --out"
        )


def _flat(run: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the recipe beside the others."""
    return {k: v for k, v in run.items() if k != "recipe"} | dict(run.get("recipe", {}))


@jax.jit
def checksum(training: Training) -> UInt32[Array, ""]:
    """A number that one changed bit changes, the same however the leaves are split."""
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(training):
        words = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
        place = jnp.zeros(words.shape, jnp.uint32)
        for axis, length in enumerate(words.shape):
            place = place * np.uint32(length) + jax.lax.broadcasted_iota(
                jnp.uint32, words.shape, axis
            )
        odd = 2 * place + np.uint32(1)
        total = total * np.uint32(31) + jnp.sum(words * odd, dtype=jnp.uint32)
    return total


class Checkpoints:
    """Saves and restores of one run; nothing is on the disk for certain before `wait`."""

    def __init__(self, folder: Path, run: Mapping[str, Any]):
        for name in ("absl", "asyncio"):  # what they would say is raised as well
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.folder, self._run = folder, json.loads(json.dumps(run))
        self._managers = {
            name: ocp.CheckpointManager(
                (folder / name).absolute(),
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=kept, enable_async_checkpointing=True, create=True
                ),
            )
            for name, kept in KEPT.items()
        }

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        # What ended the run is told, and not what else went wrong at its end.
        with contextlib.suppress(*[UserError] * (kind is not None)), contextlib.ExitStack() as all_:
            for manager in self._managers.values():
                all_.enter_context(self._writing())
                all_.callback(manager.close)

    def save(self, training: Training, name: str = "last") -> None:
        """Begin to write one, where there is none of this step; what went wrong before is raised.

        Raises UserError where checkpoints cannot be written.
        """
        step = int(training.step)
        # A run that was killed may find one that it kept before: equal bits, for it is a step's.
        if step <= (self.newest(name) or -1):
            return
        self.wait()  # over several processes two at once would take one barrier
        self._check_room(training)
        told = {"run": self._run, "checksum": int(checksum(training))}
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(training._asdict()), told=ocp.args.JsonSave(told)
        )
        with self._writing():
            self._managers[name].save(step, args=args)

    def _check_room(self, training: Training) -> None:
        """A disk that is full is told before it is: what writes beside us would tell at length."""
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(training))
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            reason = f"a checkpoint takes {needed / 1e6:,.1f} MB and {free / 1e6:,.1f} MB are free"
            raise _unwritten(self.folder, reason)

    def wait(self) -> None:
        """Until all is on the disk."""
        for manager in self._managers.values():
            with self._writing():
                manager.wait_until_finished()

    def newest(self, name: str = "last") -> int | None:
        """The step of the newest checkpoint; None where there is none."""
        return self._managers[name].latest_step()

    def restore(self, like: Training) -> Training | None:
        """The newest checkpoint; None where there is none yet.

        like: the shapes of a run, and where its leaves lie (models.training.shape).
        Raises UserError for one that cannot be read, or is of another run.
        """
        step = self.newest()
        if step is None:
            return None
        where = self.folder / "last" / str(step)
        remedy = "move that folder away to go on from the one before it"
        restore = self._managers["last"].restore
        try:
            told = restore(step, args=ocp.args.Composite(told=ocp.args.JsonRestore())).told
            if told["run"] != self._run:
                raise UserError(f"the checkpoint {where} is that of another run; {remedy}")
            state = ocp.args.StandardRestore(like._asdict())
            found = Training(**restore(step, args=ocp.args.Composite(state=state)).state)
            if told["checksum"] != int(checksum(found)):
                raise ValueError("its numbers are not those that were written")
            return found
        except (UserError, MemoryError):
            raise
        except Exception as error:  # what a damaged file comes to has no kind of its own
            if "RESOURCE_EXHAUSTED" in str(error):  # the device's memory
                raise
            # TensorStore puts details of its own behind what is wrong.
            reason = " ".join(str(error).split()).split(" See full")[0].rstrip(".")[:160]
            raise UserError(f"the checkpoint {where} cannot be read: {reason}; {remedy}") from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a full disk is an error of another kind in every layer
            text = " ".join(str(error).split())
            reason = next((cause for cause in CAUSES if cause in text), None)
            if reason is None and not isinstance(error, OSError):
                raise  # a mistake of ours, not of the disk
            raise _unwritten(self.folder, reason or text[:160]) from error
