"""The bytes of every token of a vocabulary, from which texts are decoded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxkv.errors import UserError

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# The steps of a decoder in tokenizer.json that a table of bytes can represent.
STEPS = {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
SPACE = "\u2581"  # SentencePiece's mark for a space
SENTENCEPIECE: dict[str, Any] = {"ByteFallback": {}, "Metaspace": {"replacement": SPACE}}


def steps_of(decoder: Any, path: Path) -> dict[str, dict[str, Any]]:
    """The steps of a decoder by type; raises UserError for steps that a table cannot represent."""
    state = json.loads(decoder.__getstate__()) if decoder is not None else {"type": None}
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    unknown = [str(step["type"]) for step in steps if step["type"] not in STEPS]
    if unknown:
        raise UserError(
            f"{path}: unsupported decoder {', '.join(unknown)}; supported: "
            f"{', '.join(sorted(STEPS))}"
        )
    return {step["type"]: step for step in steps}


def strip_of(steps: Mapping[str, Mapping[str, Any]]) -> int:
    """The number of leading spaces that the decoder removes from a text."""
    if "Metaspace" in steps:
        return int(steps["Metaspace"].get("prepend_scheme") != "never")
    return int(steps["Strip"]["start"]) if "Strip" in steps else 0


def table_of(tokens: Mapping[int, str], bytes_of: Callable[[str], bytes]) -> tuple[bytes, ...]:
    """The bytes of every id; ids without a token have none."""
    size = max(tokens, default=-1) + 1
    return tuple(bytes_of(tokens[i]) if i in tokens else b"" for i in range(size))


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: a printable character for each byte, the unprintable ones from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + n): byte for n, byte in enumerate(unprintable)}


LETTERS = _byte_letters()


def byte_level(token: str) -> bytes:
    """The bytes of a byte-level token; a token outside the alphabet was added as plain text."""
    if all(letter in LETTERS for letter in token):
        return bytes(LETTERS[letter] for letter in token)
    return token.encode()


def sentencepiece_bytes(steps: Mapping[str, Mapping[str, Any]]) -> Callable[[str], bytes]:
    """The bytes of SentencePiece-like tokens: a mark for spaces, <0xNN> for single bytes."""
    replace = steps.get("Replace", {})
    mark = replace.get("pattern", {}).get("String") or steps.get("Metaspace", {}).get("replacement")
    space = replace.get("content", " ")

    def bytes_of(token: str) -> bytes:
        byte = BYTE.fullmatch(token) if "ByteFallback" in steps else None
        if byte:
            return bytes([int(byte[1], 16)])
        return (token.replace(mark, space) if mark else token).encode()

    return bytes_of
