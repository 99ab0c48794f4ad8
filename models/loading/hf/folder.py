"""Finds a model, local or from the Hub, and reads the JSON files of its folder."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxkv.errors import UserError, nearest
from jaxkv.files import open_regular, reading

# Everything jaxkv reads from a published model, and nothing else (no .bin, .gguf, .onnx).
PATTERNS = ("*.json", "*.safetensors", "*.model", "*.jinja")
IGNORED = ("original/*", "consolidated*")  # the same weights again, in another format
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


def find(name: str | Path, names: Sequence[str] = ()) -> Path:
    """The folder or the GGUF file of a model.

    name: a path, or a Hub id `org/name` or `org/name@revision`, which is downloaded; an existing
    path wins over a Hub id of the same name. names: models that are found elsewhere, to suggest.
    Raises UserError if there is no such model.
    """
    if not isinstance(name, str | Path):
        raise UserError(f"a model is a folder, a GGUF file or a Hub id like org/name, got {name!r}")
    text = str(name)
    if not text:
        raise UserError("no model was named, got an empty name; name a folder or a Hub id")
    try:
        path = Path(name).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # no such user, a name too long, no permission
        raise UserError(f"no such folder: {text}: {error}; name a model folder") from None
    if is_folder or (exists and _is_gguf(path)):
        return path
    if exists:
        raise UserError(
            f"a model is a folder or a GGUF file, {text} is another file; name the folder"
        )
    if path.suffix.lower() == ".gguf":
        raise UserError(f"no such file: {text}; name a GGUF file that exists")
    if isinstance(name, Path) or not HUB_ID.fullmatch(text) or text[0] in ".~":
        near = nearest(text, names)
        remedy = (
            f"did you mean {near}?" if near else "name a model folder or a Hub id like org/name"
        )
        raise UserError(f"no such folder: {text}; {remedy}")
    return _download(text)


@reading()
def _is_gguf(path: Path) -> bool:
    """Whether a file claims to be GGUF, by its name or by its first bytes."""
    with open_regular(path) as file:
        return path.suffix.lower() == ".gguf" or file.read(4) == b"GGUF"


def _download(hub_id: str) -> Path:
    name, _, revision = hub_id.partition("@")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"no such folder: {hub_id}; as a Hub id it needs the package huggingface_hub "
            "(pip install huggingface_hub)"
        ) from None
    try:
        snapshot = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=list(PATTERNS),
            ignore_patterns=list(IGNORED),
        )
    # The Hub client raises its own, OS and HTTP errors alike, and their types move between
    # versions; for the user all of them mean the same thing.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].strip()
        reason = reason.removeprefix("Got: ")
        raise UserError(
            f"no such folder, and the Hub does not give {hub_id}: {reason}; check the name and "
            "the network, or name a local folder"
        ) from None
    return Path(snapshot)


@reading()
def read_json(path: Path, remedy: str = "download it again") -> dict[str, Any]:
    """The object in a JSON file; {} if the file is missing. remedy: for a broken file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # also for other bytes than UTF-8
        raise UserError(f"{path} is not valid JSON: {error}; {remedy}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must have a JSON object, got a {type(value).__name__}")
    return value
