"""The order of tests in several processes: related tests in one process, the longest first.

Tests of a file share fixtures and compiled programs. tests/core/laws shares them by policy.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

LAWS = "tests/core/laws/test_laws.py"


def group_of(test: str) -> str:
    """The group of a test: its file, or its policy in tests/core/laws."""
    file, _, name = test.partition("::")
    case = name.partition("[")[2].rstrip("]").partition(":")[0]
    return f"{file}[{case}]" if file == LAWS and case else file


class LongestFirst(LoadScopeScheduling):
    """Gives each process the longest group, so that at the end none waits for another.

    seconds: of each test in earlier runs; a test without an entry counts as one second.
    """

    seconds: Mapping[str, float]

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _assign_work_unit(self, node) -> None:
        longest = max(self.workqueue, key=self._time_of)
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)

    def remove_node(self, node) -> str | None:
        """The test in which this process crashed; another process continues after that test.

        pytest-xdist 3.8 would give the crashed test again, and finished groups, at which a
        process waits forever.
        """
        groups = self.assigned_work.pop(node)
        unfinished = [test for tests in groups.values() for test, done in tests.items() if not done]
        if not unfinished:
            return None
        crashed, *unfinished = unfinished
        for test in unfinished:
            self.workqueue.setdefault(group_of(test), {})[test] = False
        for peer in self.nodes:
            self._reschedule(peer)
        return crashed

    def _reschedule(self, node) -> None:
        if node in self.registered_collections:  # not the successor of a crash, still collecting
            super()._reschedule(node)

    def _time_of(self, group: str) -> float:
        return sum(self.seconds.get(test, 1.0) for test in self.workqueue[group])


def durations(reporter) -> Counter:
    """The seconds of each test that another process ran."""
    seconds = Counter()
    for report in (report for reports in reporter.stats.values() for report in reports):
        if hasattr(report, "node"):
            seconds[report.nodeid] += report.duration
    return seconds


def read_durations(file: Path) -> dict[str, float]:
    with suppress(OSError, ValueError):  # the first run, or a file of something else
        return json.loads(file.read_text("utf-8"))
    return {}


def write_durations(file: Path, seconds: Mapping[str, float]) -> None:
    """Add the durations of this run to the file. Another run may write at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text(json.dumps(read_durations(file) | seconds), "utf-8")
    new.replace(file)
