"""Runs the notebooks under colab/ and saves their outputs.

The source of each notebook is colab/NN_name.py in percent format. Beside it are the notebook with
its outputs and the picture of its cell tagged `picture`. A notebook runs in its own kernel and in
an empty folder. Its last cell checks the results; a wrong result ends the run.

    python -m jaxkv.colab.notebooks                     run all, save them and their run times
    python -m jaxkv.colab.notebooks --smoke [NAME ...]  run with JAXKV_SMOKE=1; save nothing
    python colab/lib/notebooks.py --smoke --install     without jaxkv: the first one installs it

With --install, the cell installs jaxkv from the commit of this checkout, and then the other
notebooks begin. The run fails if the cell changes any installed package, because that breaks
notebooks on Colab; `NEEDS` lists exceptions. Without NAME, a notebook whose module is not installed
is left out.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# jaxkv is imported inside functions, because the first notebook may install it.
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "colab"
if not (ROOT / "pyproject.toml").is_file():  # a wheel has this module for Colab alone
    message = "notebooks are in a clone of the repository; clone it, and run this there"
    print(f"jaxkv: error: {message}", file=sys.stderr)
    raise SystemExit(2)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
OWNER = REPOSITORY.removeprefix("https://github.com/")
BADGE = f"https://colab.research.google.com/github/{OWNER}/blob/main/colab/"
MODEL_FIELD = 'MODEL = ""'  # the line in which a reader names another model
# A module that a notebook needs beyond the others, and packages that its install cell may change.
NEEDS = {"09_bounded_rollouts": ("tunix", {"flax", "safetensors"})}
SMOKE_TIMEOUT = 600  # seconds per notebook with JAXKV_SMOKE=1; a busy machine took 188
CELL_TIMEOUT = 7200  # seconds per cell otherwise


def main() -> None:
    ask = argparse.ArgumentParser(
        prog="python -m jaxkv.colab.notebooks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ask.add_argument(
        "names", nargs="*", metavar="NAME", help="file names without suffix (default: all)"
    )
    ask.add_argument("--smoke", action="store_true", help="small sizes; save nothing")
    ask.add_argument("--install", action="store_true", help="with --smoke: run the install cell")
    arguments = ask.parse_args()
    names = [path.stem for path in sources()]
    unknown = [name for name in arguments.names if name not in names]
    if unknown:
        ask.error(f"NAME must be one of {', '.join(names)}, got {unknown[0]!r}")
    if arguments.install and not arguments.smoke:
        ask.error("--install needs --smoke: saved outputs are those of this checkout")
    chosen = arguments.names or runnable(names)
    if not arguments.smoke:
        run_and_save(chosen)
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        if arguments.install:
            installed = threading.Event()
            first = pool.submit(run_smoke_test, chosen.pop(0), installed)
            first.add_done_callback(lambda _: installed.set())  # it may fail before
            installed.wait()
        list(pool.map(run_smoke_test, chosen))
    if arguments.install:
        first.result()


def runnable(names: list[str]) -> list[str]:
    """The names without notebooks whose module is not installed, which are printed."""
    missing = {
        name: module
        for name, (module, _) in NEEDS.items()
        if name in names and find_spec(module) is None
    }
    for name, module in missing.items():
        print(f"{name} is left out, because {module} is not installed", flush=True)
    return [name for name in names if name not in missing]


def run_smoke_test(name: str, installed: threading.Event | None = None) -> None:
    """Run with JAXKV_SMOKE=1 and save nothing. If there is an event, install, and then set it.

    Raises SystemExit if it takes too long or if its install cell changes installed packages.
    """
    from nbclient.exceptions import CellTimeoutError

    try:
        _, took = run(name, smoke=True, install=installed is not None, installed=installed)
    except CellTimeoutError:
        raise SystemExit(
            f"{name} may take {SMOKE_TIMEOUT} s with JAXKV_SMOKE=1, a cell took longer; run it "
            "alone on an idle machine"
        ) from None
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    print(f"{name}: {took:.0f} s", flush=True)


def sources() -> list[Path]:
    return sorted(FOLDER.glob("[0-9][0-9]_*.py"))


def run_and_save(names: list[str]) -> None:
    """Run in full, save notebooks and pictures, and this device's run times."""
    import jax
    import nbformat

    from jaxkv.colab.runtime import RUN_TIMES, device
    from jaxkv.models.tools.run_metadata import run_metadata

    for name in names:
        about = run_metadata(name, (), ())
        notebook, took = run(name)
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        (FOLDER / f"{name}.png").write_bytes(picture_of(notebook))
        devices = json.loads(RUN_TIMES.read_text("utf-8"))
        record = {"platform": jax.default_backend(), "versions": about["versions"], "notebooks": {}}
        record = devices.setdefault(device(), record)
        record["notebooks"][name] = {"minutes": round(took / 60, 2), "commit": about["commit"],
                                     "date": about["date"]}  # fmt: skip
        RUN_TIMES.write_text(json.dumps(devices, indent=1) + "\n", "utf-8")
        update_run_times(name)
        print(f"{name}: {took / 60:.1f} minutes", flush=True)


def update_run_times(name: str) -> None:
    """Run the third cell of a saved notebook again: it prints the run times, now recorded."""
    import nbformat

    kept = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    small = load(name)
    small.cells = small.cells[2:3]
    execute(small, smoke=False, install=False)
    kept.cells[2].outputs = small.cells[0].outputs
    nbformat.write(kept, FOLDER / f"{name}.ipynb")


def load(name: str) -> Any:
    """The cells of a source as a notebook without outputs; cells are numbered."""
    import jupytext

    notebook = jupytext.read(FOLDER / f"{name}.py")
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
    notebook.metadata = {
        "accelerator": "GPU",
        "colab": {"provenance": []},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def run(
    name: str,
    smoke: bool = False,
    install: bool = False,
    model: str = "",
    installed: threading.Event | None = None,
) -> tuple[Any, float]:
    """A notebook with its outputs, and the seconds that it took.

    model: value of its model field; an empty string selects the default model. installed: set when
    the install cell has run. Raises nbclient's CellExecutionError or CellTimeoutError, and
    RuntimeError if the run takes too long or the install cell changes installed packages.
    """
    notebook = load(name)
    sources = [cell.source for cell in notebook.cells]
    for cell in notebook.cells:
        if "install" in tags(cell) and not install:
            cell.source = ""
        cell.source = cell.source.replace(MODEL_FIELD, f"MODEL = {model!r}")
    before = packages() if install else {}
    took = execute(notebook, smoke, install, installed)
    for cell, source in zip(notebook.cells, sources, strict=True):
        cell.source = source
    if smoke and took > SMOKE_TIMEOUT:
        raise RuntimeError(f"{name} may take {SMOKE_TIMEOUT} s with JAXKV_SMOKE=1, took {took:.0f}")
    after = packages() if install else {}
    _, may_change = NEEDS.get(name, ("", set()))
    changed = [
        package
        for package, was in before.items()
        if after.get(package) != was and package not in may_change
    ]
    if changed:
        raise RuntimeError(f"the install cell must not change installed packages, changed "
                           f"{', '.join(changed)}")  # fmt: skip
    return notebook, took


def execute(
    notebook: Any, smoke: bool, install: bool, installed: threading.Event | None = None
) -> float:
    """Run all cells in a new kernel and an empty folder; the seconds that it took."""
    from nbclient import NotebookClient

    def executed(cell: Any, **_: Any) -> None:
        if installed and "install" in tags(cell):
            installed.set()

    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook, timeout=SMOKE_TIMEOUT if smoke else CELL_TIMEOUT, kernel_name="python3",
            resources={"metadata": {"path": folder}}, record_timing=False,
            on_cell_executed=executed,
        )  # fmt: skip
        start = time.perf_counter()
        client.execute(env=environment(smoke, install))
        return time.perf_counter() - start


def picture_of(notebook: Any) -> bytes:
    """The output of the cell tagged `picture`."""
    (cell,) = [cell for cell in notebook.cells if "picture" in tags(cell)]
    (png,) = [
        output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})
    ]
    return base64.b64decode(png)


def tags(cell: Any) -> list[str]:
    return cell.metadata.get("tags", [])


def environment(smoke: bool, install: bool) -> Mapping[str, str]:
    """The environment of the kernel, without PYTHONPATH: it imports the installed jaxkv."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if smoke:
        variables["JAXKV_SMOKE"] = "1"
    if install:  # redirect the repository's address to this checkout
        variables |= {
            "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.{ROOT.as_uri()}.insteadOf",
            "GIT_CONFIG_VALUE_0": REPOSITORY,
        }  # fmt: skip
    return variables


def packages() -> dict[str, str]:
    """Name and version of every installed package."""
    asked = [sys.executable, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"]
    reported = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    return dict(line.split("==", 1) for line in reported.splitlines() if "==" in line)


if __name__ == "__main__":
    main()
