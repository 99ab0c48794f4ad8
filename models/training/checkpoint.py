"""The checkpoints in the folder of a training run (models/training/run_folder.py).

    OUT/last/STEP    the newest two checkpoints, to resume from
    OUT/best/STEP    the one with the least loss on the valid split

Orbax writes them in the background, each completely or not at all.
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
from jaxkv.models.training.run_folder import unwritten
from jaxkv.models.training.training import Training
from jaxkv.typing import Array, UInt32

MAX_TO_KEEP = {"last": 2, "best": 1}
# The causes of failed writes, as they occur within the error messages of other libraries.
CAUSES = ("No space left on device", "File too large", "Disk quota exceeded", "Permission denied",
          "Read-only file system")  # fmt: skip


@jax.jit
def checksum(training: Training) -> UInt32[Array, ""]:
    """A checksum of all bits; it does not depend on how the leaves are sharded."""
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
    """Saves and restores checkpoints of one run; they are on disk only after `wait`."""

    def __init__(self, folder: Path, run: Mapping[str, Any]):
        for name in ("absl", "asyncio"):  # their messages are raised as errors too
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.folder, self._run = folder, json.loads(json.dumps(run))
        self._managers = {
            name: ocp.CheckpointManager(
                (folder / name).absolute(),
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=count, enable_async_checkpointing=True, create=True
                ),
            )
            for name, count in MAX_TO_KEEP.items()
        }

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        # Report the error that ended the run, not a later one at its end.
        with contextlib.suppress(*[UserError] * (kind is not None)), contextlib.ExitStack() as all_:
            for manager in self._managers.values():
                all_.enter_context(self._writing())
                all_.callback(manager.close)

    def save(self, training: Training, name: str = "last") -> None:
        """Start writing a checkpoint of this step, if there is none; raise earlier write errors.

        Raises UserError where checkpoints cannot be written.
        """
        step = int(training.step)
        # A resumed run may find a checkpoint of this step already. It has the same bits.
        if step <= (self.newest(name) or -1):
            return
        self.wait()  # with several processes two saves at once would share one barrier
        self._check_room(training)
        about = {"run": self._run, "checksum": int(checksum(training))}
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(training._asdict()),
            told=ocp.args.JsonSave(
                about
            ),  # named `told` on disk, in checkpoints of earlier runs too
        )
        with self._writing():
            self._managers[name].save(step, args=args)

    def _check_room(self, training: Training) -> None:
        """Raise UserError if the disk has no room; Orbax would fail later, with a long message."""
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(training))
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            reason = f"a checkpoint takes {needed / 1e6:,.1f} MB and {free / 1e6:,.1f} MB are free"
            raise unwritten(self.folder, reason)

    def wait(self) -> None:
        """Wait until all checkpoints are on disk."""
        for manager in self._managers.values():
            with self._writing():
                manager.wait_until_finished()

    def newest(self, name: str = "last") -> int | None:
        """The step of the newest checkpoint; None where there is none."""
        return self._managers[name].latest_step()

    def restore(self, like: Training) -> Training | None:
        """The newest checkpoint; None where there is none yet.

        like: the shapes and shardings of a run (training.abstract_training).
        Raises UserError for a checkpoint that cannot be read or belongs to another run.
        """
        step = self.newest()
        if step is None:
            return None
        where = self.folder / "last" / str(step)
        remedy = "move that folder away to resume from the checkpoint before it"
        restore = self._managers["last"].restore
        try:
            about = restore(step, args=ocp.args.Composite(told=ocp.args.JsonRestore())).told
            if about["run"] != self._run:
                raise UserError(f"the checkpoint {where} is that of another run; {remedy}")
            state = ocp.args.StandardRestore(like._asdict())
            restored = Training(**restore(step, args=ocp.args.Composite(state=state)).state)
            if about["checksum"] != int(checksum(restored)):
                raise ValueError("its checksum differs")
            return restored
        except (UserError, MemoryError):
            raise
        except Exception as error:  # a damaged file raises no specific exception
            if "RESOURCE_EXHAUSTED" in str(error):  # the device's memory
                raise
            # TensorStore appends its own details to the reason.
            reason = " ".join(str(error).split()).split(" See full")[0].rstrip(".")[:160]
            raise UserError(f"the checkpoint {where} cannot be read: {reason}; {remedy}") from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each library has its own exception for a full disk
            text = " ".join(str(error).split())
            reason = next((cause for cause in CAUSES if cause in text), None)
            if reason is None and not isinstance(error, OSError):
                raise  # a bug, not a disk error
            raise unwritten(self.folder, reason or text[:160]) from error
