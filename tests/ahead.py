"""Compiles programs ahead of time for a TPU, on a machine without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LIBTPU = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",  # libtpu aborts on flags of XLA:CPU
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def reports_of(module: str) -> list[dict[str, Any]]:
    """Run a test module in a new process and parse the JSON lines that it prints.

    A new process is needed because libtpu reads its settings at the import of jax.
    """
    result = subprocess.run(
        [sys.executable, "-m", module], cwd=Path(__file__).parents[1], env=os.environ | LIBTPU,
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]
