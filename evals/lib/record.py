"""Records: measurements and what it takes to repeat them, as evals/results/NAME.json.

A run opens its record before it measures, so that commit, date and load are those of the start. It
saves the record whole at the end or not at all. No path of one machine gets into a record.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv import files

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "evals" / "results"
TRIALS = ROOT / "out" / "evals"  # quick runs: for trying things out, never for a claim
CODE = ("jaxkv", "models", "pallas_kernels", "evals/*.py", "colab/lib/*.py", "pyproject.toml")
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers")


class Record:
    """One run of one experiment; `save` writes it."""

    def __init__(
        self, name: str, data: Iterable[Path] = (), seeds: Sequence[int] = (), quick: bool = False
    ):
        import jax

        from jaxkv.models.device import cores, processor

        changed = [line[3:] for line in _git("status", "--porcelain", "--", *CODE).splitlines()]
        device = jax.devices()[0]
        self.file = (TRIALS if quick else RESULTS) / f"{name}.json"
        there = next(folder for folder in self.file.parents if folder.exists())
        if not os.access(there, os.W_OK):  # now, not after hours
            raise SystemExit(f"records go to {self.file.parent}: {there} cannot be written")
        self.about: dict[str, Any] = {
            "name": name,
            "command": command(),
            "commit": _commit(quick),
            "dirty": bool(changed),
            "changed": changed,  # code that differed from the commit
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": f"{device.platform}: {device.device_kind}",
            "cpu": {"model": processor(), "cores": cores(), "load": _load()},
            "system": f"{platform.system()} {platform.machine()}",
            "versions": {"python": platform.python_version()} | _versions(),
            "seeds": list(seeds),
            "data": {portable(path): sha256(path) for path in data},
        }

    def save(self, results: dict[str, Any]) -> Path:
        """Write the record in one move; a reader sees the old file or the new one."""
        self.about["cpu"]["load_at_end"] = _load()
        text = json.dumps(self.about | {"results": plain(results)}, indent=1, allow_nan=False)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        files.write({self.file: (text + "\n").encode()})
        return self.file


def read(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """The record of an experiment."""
    return json.loads((folder / f"{name}.json").read_text("utf-8"))


def spread(values: Sequence[float]) -> dict[str, float]:
    """A measured number: the median of its repeats, and how far they lay apart."""
    return {
        "median": float(np.median(values)),
        "min": float(np.min(values)),
        "max": float(np.max(values)),
        "n": len(values),
    }


def plain(value: Any) -> Any:
    """The same in plain numbers of 7 digits, which is more than a measurement is good for."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, float | np.floating):
        return float(f"{value:.7g}")
    return int(value) if isinstance(value, np.integer) else value


def command() -> str:
    """The command line of this run, as one would type it in the repository."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    module = main.name.removesuffix(".__main__") if main else ""
    program = f"python -m {module}" if main else f"python {portable(Path(sys.argv[0]))}"
    words = [portable(Path(word)) if word.startswith("/") else word for word in sys.argv[1:]]
    return " ".join([program, *words])


def portable(path: Path) -> str:
    """A path as seen from the repository, or its last parts where it lies far away."""
    relative = Path(os.path.relpath(path, ROOT))
    far = relative.parts[:2] == ("..", "..") or relative.is_absolute()
    return "/".join(Path(path).parts[-2:]) if far else relative.as_posix()


def sha256(path: Path) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def resident() -> int:
    """Bytes of this process that lie in memory now; 0 where nobody can tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def _git(*words: str) -> str:
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout
    except FileNotFoundError:
        return ""


def _commit(quick: bool) -> str:
    """Raises SystemExit where nobody says it; only a trial may do without."""
    found = _git("rev-parse", "HEAD").strip() or os.environ.get("JAXKV_COMMIT", "")
    if found or quick:
        return found
    raise SystemExit(
        "a record names the commit of its code: run this in a git checkout, or say it in "
        "JAXKV_COMMIT"
    )


def _load() -> float | None:
    """How many processes wanted a core in the last minute; a quiet machine is well below 1."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
