"""Records: measurements with everything needed to repeat them, as evals/results/NAME.json.

A run opens its record before it measures, so that commit, date and load are those of the start. It
writes the record at the end, in one step. Records contain no paths of a machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv import files
from jaxkv.cli import Parser
from jaxkv.errors import UserError, suggestion
from jaxkv.models.tools.run_metadata import ROOT, load, portable, run_metadata, sha256

RESULTS = ROOT / "evals" / "results"
TRIALS = ROOT / "out" / "evals"  # quick runs; no claim reads them
NUMBERS = re.compile(r'\[\n([^\[\]{}"]+)\n\s*\]')  # a list without strings, lists and objects


class Record:
    """One run of one experiment; `save` writes it."""

    def __init__(
        self, name: str, data: Iterable[Path] = (), seeds: Sequence[int] = (), quick: bool = False
    ):
        self.file = (TRIALS if quick else RESULTS) / f"{name}.json"
        parent = next(folder for folder in self.file.parents if folder.exists())
        if not os.access(parent, os.W_OK):  # fail before the run
            raise UserError(
                f"records go to {self.file.parent}, and {parent} cannot be written; use another "
                "copy of the repository"
            )
        self.about = run_metadata(name, data, seeds)
        if not (self.about["commit"] or quick):
            raise UserError(
                "a record names the commit of its code: run this in a git checkout, or set "
                "JAXKV_COMMIT"
            )

    def add(self, files: Iterable[Path]) -> None:
        """Name more files that the run reads."""
        self.about["data"] |= {portable(file): sha256(file) for file in files}

    def save(self, results: dict[str, Any]) -> Path:
        """Write the record atomically: a reader sees the old file or the new one."""
        self.about["cpu"]["load_at_end"] = load()
        text = dumps(self.about | {"results": plain(results)})
        self.file.parent.mkdir(parents=True, exist_ok=True)
        files.write({self.file: (text + "\n").encode()})
        return self.file

    def finish(self, results: dict[str, Any]) -> None:
        """Write the record, print the bars, and draw its plots unless the run was quick."""
        print("wrote", self.save(results))
        for line in results.get("bars", ()):
            print_bar(line)
        if self.file.parent == RESULTS:
            from jaxkv.evals.lib.figures import draw

            draw(self.file.stem)


class ChoiceParser(Parser):
    """A parser that also names the nearest known choice where one is unknown."""

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            known = suggestion(str(value), map(str, action.choices))
            raise argparse.ArgumentError(action, f"got {value}{known}")


def make_parser(module: str, about: str | None) -> Parser:
    """The parser of a command. module: its full name. about: its help, which keeps its lines."""
    return ChoiceParser(
        prog=f"python -m {module}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def run_command(main: Callable[[], None]) -> None:
    """Run an experiment; an error that the user can correct is one line, with exit code 2.

    Such errors are UserError, and those of files that cannot be opened.
    """
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:  # of a connection or a pipe, so not of a file that is named
            raise
        print(f"error: {error.filename}: {error.strerror}; name another file", file=sys.stderr)
        sys.exit(2)


def print_bar(line: dict[str, Any]) -> None:
    """One line: whether a bar is met, its name, the measured median and what is asked."""
    value = line["value"]["median"] if isinstance(line["value"], dict) else line["value"]
    print(f"{'met    ' if line['met'] else 'NOT MET'} {line['bar']}: {value:.4g} {line['ask']}")


def dumps(record: dict[str, Any]) -> str:
    """JSON with one member per line, and lists of numbers on one line."""
    text = json.dumps(record, indent=1, allow_nan=False)
    return NUMBERS.sub(lambda list_: f"[{' '.join(list_[1].split())}]", text)


def read(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """The record of an experiment."""
    return json.loads((folder / f"{name}.json").read_text("utf-8"))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum of repeated measurements."""
    return {
        "median": float(np.median(values)),
        "min": float(np.min(values)),
        "max": float(np.max(values)),
        "n": len(values),
    }


def standard_error(values: Sequence[float] | np.ndarray) -> float | None:
    """The standard error of the mean of independent values; None for a single one."""
    count = len(values)
    return float(np.std(values, ddof=1) / count**0.5) if count > 1 else None


def plain(value: Any) -> Any:
    """The value in JSON types, floats rounded to 7 digits."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, float | np.floating):
        return float(f"{value:.7g}")
    return int(value) if isinstance(value, np.integer) else value
