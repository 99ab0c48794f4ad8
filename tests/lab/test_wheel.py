"""The wheel, built from the tracked files and imported outside of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_INDEX = "Could not find a version that satisfies the requirement setuptools"
WITHOUT_FLAX = """
import sys
sys.modules["flax"] = None
import jaxkv
print(jaxkv.__file__)
try:
    jaxkv.models
except ModuleNotFoundError as error:
    print(error)
"""


def git_files() -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    return done.stdout.decode().rstrip("\0").split("\0")


def build_wheel(names: Iterable[str], source: Path, *words: object) -> None:
    """Build the wheel from these files, copied into `source`, by `pip WORDS source`."""
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", *words, source]
    done = subprocess.run(pip, capture_output=True, text=True)
    if NO_INDEX in done.stderr:
        pytest.skip("no package index is reachable, and pip builds wheels with setuptools from it")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the content of the wheel, without its dependencies."""
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "installed"))
    build_wheel(git_files(), source, "install", "--no-deps", "--target", target)
    return target


def start(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess:
    """A new Python that finds the wheel first."""
    variables = os.environ | {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    python = [sys.executable, *words]
    return subprocess.run(python, cwd=folder, env=variables, capture_output=True, text=True)


def run(installed: Path, folder: Path, *words: str) -> str:
    """What it prints."""
    done = start(installed, folder, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_core_imports_without_flax(installed, tmp_path):
    file, error = run(installed, tmp_path, "-c", WITHOUT_FLAX).splitlines()
    assert Path(file).is_relative_to(installed)
    assert error == "jaxkv.models needs Flax; pip install 'jaxkv[models]'"


def test_the_first_command_of_readme_runs(installed, tmp_path):
    words = ["-m", "jaxkv", "generate", "Once upon a time", "--max-new-tokens", "20"]
    assert len(run(installed, tmp_path, *words).split()) > 10
    assert not any(tmp_path.iterdir())


def test_the_server_of_the_wheel_starts(installed, tmp_path):
    assert "--api-key-file" in run(installed, tmp_path, "-m", "jaxkv", "serve", "--help")


def test_one_package_is_installed(installed):
    """Nobody's site-packages gets a top-level `models`, and no wheel has the experiments."""
    names = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert names <= {"jaxkv", "bin"}
    assert [path.name for path in (installed / "jaxkv/evals").glob("*.*")] == ["__init__.py"]


@pytest.mark.parametrize("module", ["streaming.tables", "no_such_module"])
def test_an_experiment_says_to_clone(installed, tmp_path, module):
    done = start(installed, tmp_path, "-m", f"jaxkv.evals.{module}")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("jaxkv: error: experiments are in a clone of the repository")
    assert "git clone https://" in done.stderr and "pip install -e" in done.stderr


def test_an_import_of_the_experiments_says_to_clone(installed, tmp_path):
    done = start(installed, tmp_path, "-c", "import jaxkv.evals.lib")
    assert done.returncode == 1 and "ModuleNotFoundError: experiments are in a clone" in done.stderr


def test_a_clone_has_its_experiments():
    from jaxkv.evals.lib import record

    assert Path(record.__file__) == ROOT / "evals/lib/record.py"
