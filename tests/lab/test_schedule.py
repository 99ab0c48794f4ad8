"""The order of tests in several processes, and their cache of compiled programs."""

import os
import shutil
import subprocess
import sys
from collections import OrderedDict

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests import schedule
from tests.conftest import delete_oldest


@pytest.mark.parametrize("test, group", [
    ("tests/serve/engine/test_queue.py::test_order[a:b]", "tests/serve/engine/test_queue.py"),
    (f"{schedule.LAWS}::test_law[full:gradients_exist]", f"{schedule.LAWS}[full]"),
    (f"{schedule.LAWS}::test_law_6_sharded_is_unsharded[full]", f"{schedule.LAWS}[full]"),
    (f"{schedule.LAWS}::test_every_policy_has_a_case", schedule.LAWS),
])  # fmt: skip
def test_a_group_is_a_file_or_a_policy(test, group):
    assert schedule.group_of(test) == group


def test_the_longest_group_begins_first(monkeypatch):
    """A test that no earlier run has measured counts as one second."""
    started = []
    take = lambda self, node: started.append(self.workqueue.popitem(last=False)[0])
    monkeypatch.setattr(LoadScopeScheduling, "_assign_work_unit", take)
    queue = object.__new__(schedule.LongestFirst)
    queue.seconds = {"short": 0.1, "long": 3.0}
    groups = {"a": ["short"], "b": ["new", "newer"], "c": ["long"]}
    queue.workqueue = OrderedDict((name, dict.fromkeys(x, False)) for name, x in groups.items())
    for _ in groups:
        queue._assign_work_unit(None)
    assert started == ["c", "b", "a"]


@pytest.mark.parametrize("crashes", [1, 2, 6])
def test_a_run_continues_after_processes_crashed(crashes, tmp_path):
    """The test that crashed fails, the others of its file and of other files run once."""
    shutil.copy(schedule.__file__, tmp_path / "schedule.py")
    (tmp_path / "conftest.py").write_text("""
import os, time

def pytest_collection():  # later processes collect longer
    time.sleep(int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) / 4)

def pytest_xdist_make_scheduler(config, log):
    from schedule import LongestFirst
    made = LongestFirst(config, log)
    made.seconds = dict()
    return made
""")
    for file in range(6):
        crash = "os.abort()" if file < crashes else "pass"
        (tmp_path / f"test_{file}.py").write_text(
            f"import os\n\ndef test_a(): pass\ndef test_b(): {crash}\ndef test_c(): pass\n"
        )
    flags = ["-p", "xdist", "-p", "no:cacheprovider", "-n", "2", "--dist=loadscope"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *flags, tmp_path],
        cwd=tmp_path, env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, capture_output=True,
        text=True, timeout=100,
    )  # fmt: skip
    assert f"{crashes} failed, {18 - crashes} passed" in run.stdout, run.stdout
    for file in range(crashes):
        assert f"crashed while running 'test_{file}.py::test_b'" in run.stdout


def test_the_oldest_compiled_programs_are_deleted(tmp_path):
    for age in range(6):
        file = tmp_path / f"{age}-cache"
        file.write_bytes(bytes(100))
        os.utime(file, (1000 - age, 1000 - age))
    delete_oldest(tmp_path, 600)
    assert len(list(tmp_path.iterdir())) == 6
    delete_oldest(tmp_path, 599)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-cache", "1-cache"]
