"""What the notebooks under colab/ begin with: where they run, how large they are, their pictures.

Nothing here imports jax before `begin` has said how much memory it may take and where compilations
are cached.
"""

from __future__ import annotations

import contextlib
import html
import io
import json
import logging
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from jaxkv.errors import UserError
from jaxkv.evals.lib.record import RESULTS
from jaxkv.evals.lib.text import passage as passage  # notebooks call runtime.passage
from jaxkv.models import pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SMOKE = os.environ.get("JAXKV_SMOKE", "0") not in ("", "0")
PLATFORMS = ("cpu", "gpu", "tpu")
# Google as a vendor of PCI devices, and which of its devices are TPUs (jax/_src/hardware_utils.py).
GOOGLE = "0x1ae0"
TPUS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x0083", "0x007c")
COLOURS = 64  # of a picture of lines and letters
Size = TypeVar("Size")


def begin(name: str) -> None:
    """Say what this runtime can do, and how long the notebook of this name takes.

    Raises UserError where the runtime has a GPU or TPU that JAX does not use.
    """
    if "jax" not in sys.modules:  # read when it is imported
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    import jax

    from jaxkv.models.compilation import enable_compilation_cache

    enable_compilation_cache()
    warnings.showwarning = say_warning
    sys.stderr = sys.stdout  # progress is no error: notebooks show that on a red ground
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    platform_found = jax.default_backend()
    check(platform_found, accelerator(), os.environ.get("JAX_PLATFORMS", ""))
    print(f"jaxkv {version('jaxkv')}, jax {jax.__version__}, Python {platform.python_version()}")
    print(f"runs on {device()}; {powers()}")
    print(*minutes(name), sep="\n")
    if SMOKE:
        print("JAXKV_SMOKE is set: sizes are a test's, and figures mean nothing")


def say_warning(message: Warning | str, *where: object) -> None:
    """In one line, without the place in the library that it comes from."""
    print(f"warning: {message}")


def powers() -> str:
    """What the device has and can do: free memory, what it computes in, which kernels it takes."""
    import jax

    from jaxkv.models.device import native_dtype
    from jaxkv.pallas_kernels import triton
    from jaxkv.state import memory

    free = memory.available()
    of_gpu = "Triton's" if triton.is_supported() else "XLA's"
    kernels = {"gpu": of_gpu, "tpu": "Mosaic's"}.get(jax.default_backend(), "XLA's")
    reported = "" if free is None else f"{memory.show(free)} free, "
    return f"{reported}computes in {native_dtype(jax.local_devices()[0])}, by {kernels} kernels"


def device() -> str:
    """What computes, in words."""
    from jaxkv.models.device import used_by

    return used_by(None)


def check(found: str, there: str, asked: str) -> None:
    """Raise UserError where JAX computes on a CPU beside an accelerator, unless that was asked.

    found: JAX's platform; there: the accelerator of the machine, or nothing; asked: JAX_PLATFORMS.
    """
    if found == "cpu" and there and not asked.startswith("cpu"):
        raise UserError(
            f"JAX must use the {there} of this runtime, got the CPU: jax and its plug-in do not "
            "match; delete the runtime, take a new one and run the cells in order, or set "
            "JAX_PLATFORMS=cpu before the first one to stay on the CPU"
        )


def accelerator() -> str:
    """What this machine has besides a CPU, whether or not JAX found it."""
    if has_gpu():
        return "GPU"
    return "TPU" if has_tpu() else ""


def has_gpu() -> bool:
    """Whether NVIDIA's driver lists a device; the program alone may be there without one."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and listed.stdout.startswith(b"GPU ")


def has_tpu(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether a TPU is attached; Google's network cards have the same vendor."""
    return any(
        (device / "vendor").read_text().strip() == GOOGLE
        and (device / "device").read_text().strip() in TPUS
        for device in devices.glob("*")
    )


def minutes(name: str) -> list[str]:
    """How long a notebook took on each device where it was run, and where nobody has run it."""
    files = sorted(RESULTS.glob("notebooks_*.json"))
    records = [json.loads(file.read_text("utf-8"))["results"] for file in files]
    lines = []
    for kind in PLATFORMS:
        there = [one for one in records if one["platform"] == kind and name in one["notebooks"]]
        for one in there:
            lines.append(f"on {one['device']}: {one['notebooks'][name]['minutes']:.1f} minutes")
        if not there:
            lines.append(f"on a {kind.upper()}: nobody has run it yet")
    return lines


def size(full: Size, smoke: Size) -> Size:
    """How large something is: as it is meant, or as a test can afford it."""
    return smoke if SMOKE else full


def verify(
    model: str,
    always: Mapping[str, bool],
    ours: Mapping[str, bool] | None = None,
    times: Mapping[str, bool] | None = None,
) -> None:
    """Say what held, and raise AssertionError where something did not that should.

    model: that of the reader's choice, or nothing. always: what must hold for any model. ours: what
    a notebook says of the model that comes with jaxkv; for another one it is told and no more.
    times: what it says of times, which holds for our model on a CPU; elsewhere it is told.
    """
    import jax

    elsewhere = "not with this model" if model else "FAILS"
    slower = "not on this device" if jax.default_backend() != "cpu" else elsewhere
    failed = []
    for claims, verdict in ((always, "FAILS"), (ours or {}, elsewhere), (times or {}, slower)):
        for says, holds in claims.items():
            print(f"{'holds' if holds else verdict}  {says}")
            if not holds and verdict == "FAILS":
                failed.append(says)
    if failed:
        raise AssertionError(f"must hold: {'; '.join(failed)}")


@contextlib.contextmanager
def quietly(name: str) -> Iterator[Callable[[int], None]]:
    """Shows no progress: for what takes seconds."""
    yield lambda _: None


@dataclass(frozen=True)
class Picture:
    """What a notebook shows when it is the last value of a cell."""

    png: bytes = field(repr=False)

    def _repr_png_(self) -> bytes:
        return self.png


@dataclass(frozen=True)
class Text:
    """Lines that keep their columns however narrow the page, and are scrolled there."""

    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        style = "font-family:monospace;white-space:pre;overflow-x:auto;line-height:1.3;margin:0"
        return f'<pre style="{style}">{html.escape(self.text)}</pre>'


@dataclass(frozen=True)
class Page:
    """HTML that a notebook shows when it is the last value of a cell."""

    html: str = field(repr=False)

    def _repr_html_(self) -> str:
        return self.html


def picture(figure: Figure, caption: str, dpi: int = 90, colours: int = COLOURS) -> Picture:
    """A figure with its caption below, small enough to be kept in a notebook."""
    return shrink(pictures.finish(figure, caption, dpi), colours)


def shrink(png: bytes, colours: int = COLOURS) -> Picture:
    """A drawing in this many of its own colours, 256 at most: a third of the bytes.

    Lines look the same in a few; where a colour is a value, all are wanted.
    """
    from PIL import Image

    buffer = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        flat = image.convert("RGB").quantize(colours, dither=Image.Dither.NONE)
        flat.save(buffer, "png", optimize=True)
    return Picture(buffer.getvalue())
