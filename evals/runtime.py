"""What the notebooks under colab/ begin with: where they run, how large they are, their pictures.

Nothing here imports jax before `begin` has said how much memory it may take and where compilations
are kept.
"""

from __future__ import annotations

import contextlib
import html
import io
import json
import logging
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jaxkv.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from models.llm import Llm

HERE = Path(__file__).parent
SMOKE = os.environ.get("JAXKV_SMOKE", "0") not in ("", "0")
PLATFORMS = ("cpu", "gpu", "tpu")
PASSAGE = HERE / "passage.txt"  # the beginning of a novel that the default model has not seen
COLOURS = 64  # of a picture that is kept
Size = TypeVar("Size")


def begin(name: str) -> None:
    """Say what this runtime can do, and how long the notebook of this name takes.

    Raises UserError where the runtime has a GPU or TPU that JAX does not use.
    """
    if "jax" not in sys.modules:  # read when it is imported
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    import jax

    from models.compilation import keep_compilations

    keep_compilations()
    warnings.showwarning = say_warning
    sys.stderr = sys.stdout  # progress is no error: notebooks show that on a red ground
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    platform_found = jax.default_backend()
    check(platform_found, accelerator(), os.environ.get("JAX_PLATFORMS", ""))
    print(f"jaxkv {version('jaxkv')}, jax {jax.__version__}, Python {platform.python_version()}")
    print(f"runs on {device()}")
    print(*minutes(name), sep="\n")
    if SMOKE:
        print("JAXKV_SMOKE is set: sizes are a test's, and figures mean nothing")


def say_warning(message: Warning | str, *where: object) -> None:
    """In one line, without the place in the library that it comes from."""
    print(f"warning: {message}")


def device() -> str:
    """What computes, in words."""
    from models.device import used_by

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
    if shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists():
        return "GPU"
    if (
        os.environ.get("TPU_NAME")
        or os.environ.get("COLAB_TPU_ADDR")
        or Path("/dev/accel0").exists()
    ):
        return "TPU"
    return ""


def minutes(name: str) -> list[str]:
    """How long a notebook took where it was measured, and where it was not."""
    lines = []
    for kind in PLATFORMS:
        file = HERE / "results" / f"notebooks_{kind}.json"
        record = json.loads(file.read_text("utf-8")) if file.exists() else None
        if record is None or name not in record["results"]["minutes"]:
            lines.append(f"on a {kind.upper()}: not measured yet")
            continue
        device = record["cpu"]["model"] if kind == "cpu" else record["device"]
        count = f"{record['cpu']['cores']} cores of " if kind == "cpu" else ""
        took = record["results"]["minutes"][name]
        lines.append(f"on a {kind.upper()}: {took:.1f} minutes ({count}{device})")
    return lines


def size(full: Size, smoke: Size) -> Size:
    """How large something is: as it is meant, or as a test can afford it."""
    return smoke if SMOKE else full


def passage(llm: Llm, tokens: int) -> list[int]:
    """So many tokens of a novel: "The Hound of the Baskervilles" (1902), which is free to share.

    Raises UserError where it has not so many.
    """
    ids = llm.tokenizer.encode(PASSAGE.read_text("utf-8"))
    if len(ids) < tokens:
        raise UserError(f"the passage has {len(ids)} tokens, got {tokens}; ask for fewer")
    return ids[:tokens]


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
        style = "white-space:pre;overflow-x:auto;line-height:1.3;margin:0"
        return f'<pre style="{style}">{html.escape(self.text)}</pre>'


def picture(figure: Figure, caption: str, dpi: int = 90) -> Picture:
    """A figure with its caption below, small enough to be kept in a notebook."""
    figure.supxlabel(caption, fontsize=8, color="#404040", wrap=True)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=dpi, format="png")
    figure.clear()
    return shrink(buffer.getvalue())


def shrink(png: bytes) -> Picture:
    """A drawing in a palette of its own colours: a third of the bytes, and nobody sees it."""
    from PIL import Image

    buffer = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        flat = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        flat.save(buffer, "png", optimize=True)
    return Picture(buffer.getvalue())


def axes(width: float = 7.0, height: float = 3.8, columns: int = 1) -> tuple[Figure, Any]:
    """A figure and its axes as all pictures here look; without a window, whatever the backend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    made = figure.subplots(1, columns, squeeze=False)[0]
    for one in made:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(axis="y", color="#e6e6e6", lw=0.6)
        one.set_axisbelow(True)
    return figure, made[0] if columns == 1 else made
