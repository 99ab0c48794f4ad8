"""Peak memory of a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAD = """
import re, sys
from pathlib import Path
import jax.numpy as jnp
"""
TAIL = """
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def peak_of(code: str, *words: str) -> int:
    """Peak resident bytes of a process that runs the code with these arguments, as sys.argv[1:].

    The code may use re, sys, Path and jnp. Needs Linux's /proc.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    environment |= {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", HEAD + code + TAIL, *words],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout) * 1024
