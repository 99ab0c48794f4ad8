"""Runs the parts of the lab whose files changed since they last passed.

    python -m tests.lab.parts [--all] [PYTEST_OPTION ...]

`~/.cache/jaxkv/lab_passed.json` has the last commit of each part that passed. Without this file, or
with --all, every part runs. A change of the library alone runs no experiment again, because the
other tiers test the library: run `.ci/run --all` before a release.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from tests.conftest import COMPILED

ROOT = Path(__file__).resolve().parents[2]
PASSED = COMPILED.with_name("lab_passed.json")
LAB, SLOW = "not record", "slow and not record"


class Part(NamedTuple):
    """Tests, patterns of the other files on which they depend, and which marks run."""

    tests: tuple[str, ...]
    files: tuple[str, ...]
    marks: str = LAB


def experiments(name: str) -> Part:
    return Part((f"tests/lab/evals/{name}",), (f"evals/{name}/*", "evals/lib/*", "evals/results/*"))


FOLDERS = sorted(path.parent.name for path in ROOT.glob("tests/lab/evals/*/__init__.py"))
PARTS = {f"evals/{name}": experiments(name) for name in FOLDERS} | {
    "every experiment": Part(
        ("tests/lab/evals/test_measures.py", "tests/lab/evals/test_records.py"), ("evals/*",)
    ),
    "pages": Part(("tests/lab/test_pages.py",), ("*.md", "docs/*")),
    "readme": Part(("tests/lab/test_readme.py",), ("README.md", "pyproject.toml", "jaxkv/cli/*")),
    "examples": Part(
        ("tests/lab/test_examples.py",),
        ("README.md", "docs/*.md", "jaxkv/cli/*", "tests/pages.py"),
    ),
    "rehearsal": Part(("tests/lab/test_accelerator.py",), ("ACCELERATOR.md", "models/training/*")),
    "TPU": Part(
        ("tests/lab/test_tpu.py",),
        ("pallas_kernels/*", "jaxkv/platform/*", "evals/benchmarks/compiled_worker.py"),
    ),
    "adapters": Part(  # skipped here: `.ci/run` has the extras
        ("tests/lab/adapters",),
        ("jaxkv/adapters/*", "models/training/grpo.py", "evals/training/*", "colab/09_*"),
    ),
    "notebooks": Part(("tests/lab/colab",), ("colab/*",)),
    "deploy": Part(
        ("tests/lab/test_deploy.py",), ("deploy/*", "pyproject.toml", "jaxkv/cli/serve.py")
    ),
    "wheel": Part(("tests/lab/test_wheel.py",), ("pyproject.toml", "jaxkv/evals/*")),
    "order of tests": Part(
        ("tests/lab/test_schedule.py", "tests/lab/test_parts.py", "tests/lab/test_memory.py"),
        ("tests/conftest.py", "tests/schedule.py", "tests/lab/parts.py"),
    ),
    "real model": Part(
        ("tests/models",), ("models/loading/*", "models/network/*"), "real_model and not record"
    ),
    "peers": Part(
        ("tests/core", "tests/serve", "tests/models"),
        ("models/*", "jaxkv/policies/prompt_compression/*", "jaxkv/sampling.py", "jaxkv/serve/*"),
        "(parity or router) and not record and not real_model",
    ),
    "slow cases of the core": Part(
        ("tests/core",), ("pallas_kernels/*", "jaxkv/cache/*", "jaxkv/policies/*"), SLOW
    ),
    "slow cases of serving": Part(("tests/serve",), ("jaxkv/serve/*",), SLOW),
    "slow cases of models": Part(("tests/models",), ("models/*",), SLOW),
}


def git(*words: str) -> str:
    run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout


def changed_since(commit: str) -> list[str] | None:
    """The paths that differ from a commit, untracked ones too; None for an unknown commit."""
    try:
        changes = git("diff", "--name-only", commit)
    except subprocess.CalledProcessError:
        return None
    return (changes + git("ls-files", "--others", "--exclude-standard")).splitlines()


def reason(part: Part, paths: Sequence[str] | None) -> str:
    """Why a part runs, or an empty string. paths: changed since it passed; None if unknown."""
    if paths is None:
        return "no commit is known to have passed"
    own_tests = [test for test in part.tests if test.startswith("tests/lab/")]
    patterns = (*part.files, *own_tests, *(f"{test}/*" for test in own_tests))
    own = [path for path in paths if any(fnmatch(path, pattern) for pattern in patterns)]
    return f"{own[0]} changed" if own else ""


def read_passed() -> dict[str, str]:
    try:
        return json.loads(PASSED.read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def chosen(everything: bool) -> list[str]:
    """The names of the parts to run; prints the reason for each part."""
    passed, names = read_passed(), []
    for name, part in PARTS.items():
        paths = changed_since(passed[name]) if name in passed else None
        why = "--all" if everything else reason(part, paths)
        print(f"lab: {name}: {why or f'left out, unchanged since {passed[name][:8]}'}", flush=True)
        names += [name] if why else []
    return names


def main(words: Sequence[str]) -> int:
    """Run the chosen parts, in one pytest per expression of marks; the exit code."""
    names = chosen("--all" in words)
    options = [word for word in words if word != "--all"]
    for marks in dict.fromkeys(PARTS[name].marks for name in names):
        group = [name for name in names if PARTS[name].marks == marks]
        tests = [test for name in group for test in PARTS[name].tests]
        command = [sys.executable, "-m", "pytest", *tests, "-m", marks, *options]
        if code := subprocess.run(command, cwd=ROOT).returncode:
            return code
        if not git("status", "--porcelain"):  # uncommitted changes belong to no commit
            passed = read_passed() | dict.fromkeys(group, git("rev-parse", "HEAD").strip())
            PASSED.parent.mkdir(parents=True, exist_ok=True)
            PASSED.write_text(json.dumps(passed, indent=1), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
