"""What it takes to repeat a run: its command, code, machine, package versions and data.

The records of the evaluations and the JSON of `jaxkv compare` begin with these fields. Paths are
relative to the repository, so that no field names a folder of one machine.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CODE = ("jaxkv", "models", "pallas_kernels", "evals/*.py", "pyproject.toml")
PACKAGES = (
    *("jax", "jaxlib", "flax", "numpy", "torch", "transformers"),
    *("google-tunix", "gemma", "llguidance"),
)


def run_metadata(name: str, data: Iterable[Path], seeds: Sequence[int]) -> dict[str, Any]:
    """Describe the run that begins now.

    name: the experiment or command. data: files whose SHA-256 is noted. seeds: the run's seeds.
    `commit` is empty where neither git nor JAXKV_COMMIT tells it.
    """
    import jax

    from jaxkv.models.network.device import cores, processor

    changed = [line[3:] for line in _git("status", "--porcelain", "--", *CODE).splitlines()]
    device = jax.devices()[0]
    return {
        "name": name,
        "command": command(),
        "commit": _git("rev-parse", "HEAD").strip() or os.environ.get("JAXKV_COMMIT", ""),
        "dirty": bool(changed),
        "changed": changed,  # code that differs from the commit
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": f"{device.platform}: {device.device_kind}",
        "cpu": {"model": processor(), "cores": cores(), "load": load()},
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version()} | _versions(),
        "seeds": list(seeds),
        "data": {portable(path): sha256(path) for path in data},
    }


def command() -> str:
    """The command line of this run, as one would type it in the repository."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    module = main.name.removesuffix(".__main__") if main else ""
    script = Path(sys.argv[0])
    by_path = "jaxkv" if script.name == "jaxkv" else f"python {portable(script)}"
    program = f"python -m {module}" if main else by_path
    words = [portable(Path(word)) if word.startswith("/") else word for word in sys.argv[1:]]
    return " ".join([program, *words])


def portable(path: Path) -> str:
    """A path relative to the repository, or its last two parts if it is far from it."""
    relative = Path(os.path.relpath(path, ROOT))
    is_outside = relative.parts[:2] == ("..", "..") or relative.is_absolute()
    return "/".join(Path(path).parts[-2:]) if is_outside else relative.as_posix()


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load() -> float | None:
    """Processes that wanted a core in the last minute, on average; well below 1 if idle."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _git(*words: str) -> str:
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout
    except FileNotFoundError:
        return ""


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
