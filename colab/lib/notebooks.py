"""Runs the notebooks under colab/ and keeps what they showed.

Each is a text in percent format, colab/NN_name.py, which is its source; beside it lies the notebook
of the same cells with what they printed and drew, and the picture of its cell tagged `picture`. A
notebook runs in a kernel of its own, in an empty folder, and checks its own results: a wrong one
ends the run.

    python -m jaxkv.colab.notebooks                     all in full, saved; minutes go into a record
    python -m jaxkv.colab.notebooks --smoke [NAME ...]  with JAXKV_SMOKE=1, and nothing is saved
    python colab/lib/notebooks.py --smoke --install     without jaxkv: the first one installs it
    python -m jaxkv.colab.notebooks --smoke --model DIR with another model in the field

That cell installs jaxkv, here from the commit of this folder, and no package that is there may
change: that is what goes wrong on Colab.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# jaxkv itself is imported inside functions: the first notebook installs it.
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "colab"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]  # the one place of the address
OWNER = REPOSITORY.removeprefix("https://github.com/")
BADGE = f"https://colab.research.google.com/github/{OWNER}/blob/main/colab/"
FIELD = 'MODEL = ""'  # the cell where a reader names another model begins so
LONGEST = 180  # seconds of a notebook with JAXKV_SMOKE=1
ANY = 7200  # seconds of a cell in full


def main() -> None:
    ask = argparse.ArgumentParser(
        prog="python -m jaxkv.colab.notebooks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ask.add_argument("names", nargs="*", metavar="NAME", help="as of the files; all by default")
    ask.add_argument("--smoke", action="store_true", help="small sizes; nothing is kept")
    ask.add_argument("--model", default="", help="with --smoke, another one than our own")
    ask.add_argument("--install", action="store_true", help="the first one installs")
    given = ask.parse_args()
    known = [path.stem for path in sources()]
    unknown = [name for name in given.names if name not in known]
    if unknown:
        ask.error(f"NAME must be one of {', '.join(known)}, got {unknown[0]!r}")
    chosen = given.names or list(known)
    if given.install and not given.smoke:
        ask.error("--install is for --smoke: what is kept is what this folder has")
    if given.model and not given.smoke:
        ask.error("--model is for --smoke: what is kept is of the model of our own")
    if given.model:
        if fixed := [name for name in given.names if not takes_model(name)]:
            ask.error(f"--model is for notebooks that take one, got {fixed[0]}")
        chosen = [name for name in chosen if takes_model(name)]
    if not given.smoke:
        keep(chosen)
        return
    if given.install:
        try_out(chosen.pop(0), given.model, install=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda name: try_out(name, given.model), chosen))


def try_out(name: str, model: str, install: bool = False) -> None:
    """Run with JAXKV_SMOKE=1; nothing is saved.

    Raises SystemExit where it takes too long, be it that the machine has other work, or where what
    it installs changes what was there.
    """
    from nbclient.exceptions import CellTimeoutError

    try:
        took = run(name, smoke=True, install=install, model=model)[1]
    except CellTimeoutError:
        raise SystemExit(f"{name} may take {LONGEST} s with JAXKV_SMOKE=1, a cell took longer; "
                         "run it alone on a quiet machine") from None  # fmt: skip
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    print(f"{name}: {took:.0f} s", flush=True)


def sources() -> list[Path]:
    return sorted(FOLDER.glob("[0-9][0-9]_*.py"))


def takes_model(name: str) -> bool:
    return any(FIELD in cell.source for cell in load(name).cells)


def keep(names: list[str]) -> None:
    """Run in full, write what was shown, and record the minutes beside those of the others."""
    import jax
    import nbformat

    from jaxkv.colab.runtime import device
    from jaxkv.evals.lib.record import RESULTS, Record, read

    known = record_name(jax.default_backend(), jax.devices()[0].device_kind)
    there = (RESULTS / f"{known}.json").exists()
    notebooks = read(known)["results"]["notebooks"] if there else {}
    record = Record(known)
    for name in names:
        done, took = run(name)
        nbformat.write(done, FOLDER / f"{name}.ipynb")
        (FOLDER / f"{name}.png").write_bytes(picture_of(done))
        notebooks[name] = {"minutes": took / 60, "commit": record.about["commit"],
                           "date": record.about["date"]}  # fmt: skip
        print(f"{name}: {took / 60:.1f} minutes", flush=True)
    results = {"platform": jax.default_backend(), "device": device(), "notebooks": notebooks}
    print("wrote", record.save(results))
    for name in names:
        tell_minutes(name)


def record_name(platform: str, kind: str) -> str:
    """Of the record of one kind of device; minutes of a T4 are none of an A100."""
    words = platform if platform == "cpu" else f"{platform} {kind}"
    return "notebooks_" + re.sub(r"[^a-z0-9]+", "_", words.lower())


def tell_minutes(name: str) -> None:
    """Run the third cell of a notebook again, which now knows how long the whole of it takes."""
    import nbformat

    kept = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    small = load(name)
    small.cells = small.cells[2:3]
    execute(small, smoke=False, install=False)
    kept.cells[2].outputs = small.cells[0].outputs
    nbformat.write(kept, FOLDER / f"{name}.ipynb")


def load(name: str) -> Any:
    """The cells of a source as a notebook without outputs; their ids follow from their order."""
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
    name: str, smoke: bool = False, install: bool = False, model: str = ""
) -> tuple[Any, float]:
    """A notebook with its outputs, and the seconds that it took.

    model: what stands in its field; nothing takes the model of our own. Raises nbclient's
    CellExecutionError or CellTimeoutError, and RuntimeError where a cell that installs changed what
    was there.
    """
    notebook = load(name)
    sources = [cell.source for cell in notebook.cells]
    for cell in notebook.cells:
        if "install" in tags(cell) and not install:
            cell.source = ""
        cell.source = cell.source.replace(FIELD, f"MODEL = {model!r}")
    before = packages() if install else {}
    took = execute(notebook, smoke, install)
    for cell, source in zip(notebook.cells, sources, strict=True):
        cell.source = source
    if smoke and took > LONGEST:
        raise RuntimeError(f"{name} may take {LONGEST} s with JAXKV_SMOKE=1, took {took:.0f}")
    after = packages() if install else {}
    changed = [each for each, was in before.items() if after.get(each) != was]
    if changed:
        raise RuntimeError(f"the first cell must leave what is there, changed {', '.join(changed)}")
    return notebook, took


def execute(notebook: Any, smoke: bool, install: bool) -> float:
    """Run all cells in a kernel and a folder of their own; the seconds that it took."""
    from nbclient import NotebookClient

    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook, timeout=LONGEST if smoke else ANY, kernel_name="python3",
            resources={"metadata": {"path": folder}}, record_timing=False,
        )  # fmt: skip
        begun = time.perf_counter()
        client.execute(env=environment(smoke, install))
        return time.perf_counter() - begun


def picture_of(notebook: Any) -> bytes:
    """What the cell tagged `picture` drew, which README shows."""
    (cell,) = [cell for cell in notebook.cells if "picture" in tags(cell)]
    (png,) = [one.data["image/png"] for one in cell.outputs if "image/png" in one.get("data", {})]
    return base64.b64decode(png)


def tags(cell: Any) -> list[str]:
    return cell.metadata.get("tags", [])


def environment(smoke: bool, install: bool) -> Mapping[str, str]:
    """That of the kernel: it finds jaxkv only where it is installed."""
    made = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if smoke:
        made["JAXKV_SMOKE"] = "1"
    if install:  # the cell says where users get it; here that leads to this folder
        made |= {
            "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.{ROOT.as_uri()}.insteadOf",
            "GIT_CONFIG_VALUE_0": REPOSITORY,
        }  # fmt: skip
    return made


def packages() -> dict[str, str]:
    """Name and version of whatever is installed here."""
    asked = [sys.executable, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"]
    reported = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    return dict(line.split("==", 1) for line in reported.splitlines() if "==" in line)


if __name__ == "__main__":
    main()
