"""Parts of a long experiment, stored under out/, so that an interrupted run continues.

A part is one array with the commit that computed it. A record lists the commits of its parts.
"""

from __future__ import annotations

import io
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxkv import files
from jaxkv.contract import Policy
from jaxkv.evals.lib import memory_maps
from jaxkv.evals.lib.record import TRIALS, Record
from jaxkv.policy_spec import budgets_identity


def named(policy: str, policies: Sequence[Policy]) -> str:
    """A policy in the name of a part: its string, and the budgets that it has from a file.

    policies: of the layers.
    """
    identity = budgets_identity(policies)
    return f"{policy} with budgets {identity}" if identity else policy


class Parts:
    """The parts of one record, in the folder out/evals/NAME."""

    def __init__(self, record: Record, count: int):
        """count: the number of parts that the run needs, for its progress."""
        self.folder: Path = TRIALS / f"{record.file.stem}.parts"
        self.commit = record.about["commit"] + ("+" if record.about["dirty"] else "")
        self.count, self.done = count, 0
        self.seconds, self.computed = 0.0, 0
        self.commit_of: dict[str, str] = {}  # by name: the commit that computed the part

    @property
    def commits(self) -> Counter[str]:
        """How many parts each commit computed."""
        return Counter(self.commit_of.values())

    def part(self, name: str, compute: Callable[[], np.ndarray], again: bool = False) -> np.ndarray:
        """The part of that name, read from its file or computed now.

        name: unique within the record; it must name everything that the part depends on. again:
        compute it even if there is a file.
        """
        file = self.folder / f"{name.replace('/', '_')}.npz"
        self.done += name not in self.commit_of
        if file.exists() and not again:
            with np.load(file) as part:
                self.commit_of[name] = str(part["commit"])
                return part["value"]
        memory_maps.release()
        start = time.perf_counter()
        value = compute()
        seconds = time.perf_counter() - start
        out = io.BytesIO()
        np.savez(out, value=value, commit=self.commit, seconds=seconds)
        self.folder.mkdir(parents=True, exist_ok=True)
        files.write({file: out.getvalue()})
        self.commit_of[name] = self.commit
        self.seconds, self.computed = self.seconds + seconds, self.computed + 1
        seconds_left = (self.count - self.done) * self.seconds / self.computed
        print(f"part {self.done} of {self.count}, {name}: {seconds:,.0f} s, at most "
              f"{seconds_left:,.0f} s left", flush=True)  # fmt: skip
        return value
