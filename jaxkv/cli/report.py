"""What the reports of `compare`, `advise` and `view` share: their first fields, and --out."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxkv.cli.files import check_folder, finite, write
from jaxkv.errors import UserError

if TYPE_CHECKING:
    from jaxkv.models import Llm


def names(args: argparse.Namespace, llm: Llm) -> dict[str, str]:
    """The names of the model and of the text, without their folders."""
    return {
        "model": (llm.path if args.model is None else Path(args.model)).name,
        "text": "standard input" if args.text == "-" else Path(args.text).name,
    }


def describe(name: str, args: argparse.Namespace, llm: Llm) -> dict[str, Any]:
    """What a result file begins with: how to repeat the run, the model and the text."""
    from jaxkv.models.tools.run_metadata import run_metadata

    texts = [] if args.text == "-" else [Path(args.text)]
    return run_metadata(name, texts, [args.seed]) | names(args, llm)


def check_plot(path: str, files: Sequence[str]) -> Path:
    """The --out folder; checked, together with matplotlib, before minutes of work."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "--out draws a plot and needs the package matplotlib; pip install 'jaxkv[models]', or "
            "do not give --out"
        )
    return check_folder(path, files)


def write_report(out: Path, files: Sequence[str], report: dict[str, Any], picture: bytes) -> None:
    """Write a report and its picture into a folder, under the two names in `files`."""
    text = json.dumps(finite(report), indent=1) + "\n"
    write(out, dict(zip(files, (text.encode(), picture), strict=True)))
