"""Programs compiled ahead of time for a TPU that is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LIBTPU = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",  # libtpu ends the process at a flag of the CPU's compiler
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def reports_of(module: str) -> list[dict[str, Any]]:
    """The lines of JSON that a test module prints, from a process of its own: libtpu reads its
    settings as jax starts."""
    result = subprocess.run(
        [sys.executable, "-m", module], cwd=Path(__file__).parents[1], env=os.environ | LIBTPU,
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]
