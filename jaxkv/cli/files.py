"""Read input texts, and write all result files of a command or none; errors name the remedy."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxkv import files
from jaxkv.errors import UserError
from jaxkv.files import decode

if TYPE_CHECKING:
    from jaxkv.models import Llm


def read_text(path: str, noun: str, may_be_pipe: bool = True) -> str:
    """Read a UTF-8 file, or standard input where path is `-`. noun: its name in errors.

    may_be_pipe: read pipes and devices too, which may block.
    Raises UserError if it cannot be read, is not UTF-8 or is empty.
    """
    name = f"{noun} " + ("on standard input" if path == "-" else path or "''")
    if path == "-" and sys.stdin is None:
        raise UserError(f"{name} cannot be read: it is closed; pipe text in, or name a file")
    try:
        if path == "-":
            raw = sys.stdin.buffer.read()
        else:
            with open(path, "rb") if may_be_pipe else files.open_regular(path) as file:
                raw = file.read()
    except FileNotFoundError:
        raise UserError(f"no such {name}; give the path of a text file") from None
    except IsADirectoryError:
        raise UserError(f"{name} is a folder; name a file in it") from None
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror}; check it") from None
    text = decode(raw, name)
    if not text:
        raise UserError(f"{name} is empty; it must contain some text")
    return text


def print_json(value: Mapping[str, object]) -> None:
    """Print one JSON object; NaN and infinities, which JSON lacks, become null."""
    print(json.dumps(finite(value)), flush=True)


def finite(value: object) -> object:
    """Replace NaN and infinities by None."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_folder(path: str, names: Iterable[str], flag: str = "--out") -> Path:
    """Check, before hours of work, that these files can be written; create nothing."""
    folder = Path(path)
    try:
        for name in names:
            if (folder / name).exists() and not (folder / name).is_file():
                kind = "a folder" if (folder / name).is_dir() else "no regular file"
                raise UserError(
                    f"{folder / name} is {kind}, but must become a file; choose another"
                )
        existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        with tempfile.TemporaryFile(dir=existing):
            return folder
    except OSError as error:
        raise unwritable(folder, error, flag) from None


def check_file(path: Path, flag: str = "--out") -> None:
    """Check that this file can be written, into a folder that exists; create nothing."""
    if not path.parent.is_dir():
        raise UserError(
            f"{flag} needs a folder that exists, got {path.parent}; create it, or choose another"
        )
    check_folder(str(path.parent), [path.name], flag)


def write(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write all files or none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.write({folder / name: content for name, content in contents.items()})
    except OSError as error:
        raise unwritable(folder, error) from None


def unwritable(folder: Path, error: OSError, flag: str = "--out") -> UserError:
    """The error for an output that cannot be written."""
    return UserError(
        f"{flag} needs a folder that can be written to: {folder}: {error.strerror}; choose another"
    )


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
