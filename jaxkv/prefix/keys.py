"""What a prefix is known by: a root for all but the tokens, and a chain of keys from it on.

Equal keys mean equal caches up to there, so whatever a cache depends on goes into its root.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256 as openssl
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from jaxkv.errors import UserError, is_whole, one_of, whole

Hash = Callable[[bytes], bytes]
Tokens = Sequence[Any] | np.ndarray  # of whole numbers, whose type `encode` checks
HASHINGS = ("chained", "direct")
TOKEN = 4  # bytes of an encoded token
LENGTH = struct.Struct("<Q")
LONGEST = 2**31 - 1  # tokens of a piece


def sha256(data: bytes) -> bytes:
    return openssl(data).digest()


def root(**fields: Any) -> bytes:
    """The 32 bytes that stand for everything but the tokens: policy, model, dtype, salt, ...

    Fields are None, bool, int, float, str, bytes, or tuples and lists of those; their order does
    not matter. Name, type and length of each are hashed with it, so an adapter "x" is no salt "x"
    and 1 is neither "1" nor True. A field that is None differs from one that is left out.
    Raises UserError for other types, for texts and numbers that cannot be written, and for an empty
    salt, which would isolate nobody.
    """
    if fields.get("salt") in ("", b""):
        raise UserError(f"a salt must not be empty, got {fields['salt']!r}; leave it out for none")
    parts = []
    for name in sorted(fields):
        try:
            parts.append(_tagged(b"k", name.encode()) + _field(name, fields[name]))
        except (UnicodeEncodeError, OverflowError):
            raise UserError(
                f"{name!r:.60} must be of Unicode and of numbers in 64 bits, got "
                f"{type(fields[name]).__name__} beyond those; give something shorter"
            ) from None
    return sha256(b"jaxkv prefix 1" + b"".join(parts))


def _field(name: str, value: Any) -> bytes:
    if value is None:
        return _tagged(b"n", b"")
    if isinstance(value, bool | np.bool_):
        return _tagged(b"t", b"1" if value else b"0")
    if isinstance(value, Integral):
        if abs(value) >= 2**64:
            raise OverflowError
        return _tagged(b"i", str(int(value)).encode())
    if isinstance(value, Real):
        return _tagged(b"f", struct.pack("<d", value))
    if isinstance(value, str):
        return _tagged(b"s", value.encode())
    if isinstance(value, bytes):
        return _tagged(b"b", value)
    if isinstance(value, tuple | list):
        return _tagged(b"l", b"".join(_field(name, one) for one in value))
    raise UserError(
        f"{name} must be made of None, numbers, text and bytes, got {type(value).__name__}; "
        "give its text"
    )


def _tagged(tag: bytes, value: bytes) -> bytes:
    return tag + LENGTH.pack(len(value)) + value


def encode(tokens: Tokens) -> bytes:
    """Tokens as unsigned 32-bit little endian, the same from ints and from any array of them.

    Raises UserError for what is no whole number from 0 to 2^32 - 1.
    """
    if isinstance(tokens, np.ndarray):
        fits = tokens.ndim == 1 and tokens.dtype.kind in "iu"
        if fits and (not tokens.size or 0 <= int(tokens.min()) <= int(tokens.max()) < 2**32):
            return tokens.astype("<u4").tobytes()
    else:
        try:
            return struct.pack(f"<{len(tokens)}I", *tokens)
        except (struct.error, TypeError):
            pass
    raise UserError(
        f"tokens must be whole numbers from 0 to {2**32 - 1}, got {_odd(tokens)}; "
        "give the ids of a tokenizer"
    )


def _odd(tokens: Tokens) -> str:
    """The first that is no token, or what they are."""
    if isinstance(tokens, np.ndarray) and (tokens.ndim != 1 or tokens.dtype.kind not in "iu"):
        return f"an array of {tokens.dtype} with {tokens.ndim} axes"
    several = tokens if isinstance(tokens, Sequence | np.ndarray) else [tokens]
    odd = (t for t in several if not (is_whole(t) and 0 <= t < 2**32))
    return f"{next(odd, tokens)!r:.60}"


class Prompt(NamedTuple):
    """Tokens in pieces with their keys, made once however often they are looked up.

    data: the tokens as encoded. pieces: those of each piece. keys: of each piece, in turn.
    """

    root: bytes
    data: bytes
    pieces: list[bytes]
    keys: list[bytes]

    def __len__(self) -> int:
        return len(self.data) // TOKEN


@dataclass(frozen=True)
class Chain:
    """How keys follow from tokens.

    piece: tokens in a piece. hashing: `chained` hashes the parent's key and the piece's own
    tokens, `direct` the root and every token up to there, as the report does. hash: of bytes.
    """

    piece: int
    hashing: str = "chained"
    hash: Hash = sha256

    def __post_init__(self) -> None:
        whole("the tokens of a block or chunk", self.piece, most=LONGEST)
        one_of("hashing", self.hashing, HASHINGS)

    def read(self, tokens: Tokens, root: bytes, partial: bool = False) -> Prompt:
        """The keys of a prompt's pieces. partial: of the last one too where it is not full.

        Raises UserError for an empty prompt, and where `encode` does.
        """
        data, size = encode(tokens), self.piece * TOKEN
        if not data:
            raise UserError("a prompt must hold at least one token, got none; give some")
        end = len(data) if partial else len(data) - len(data) % size
        pieces = [data[begin : begin + size] for begin in range(0, end, size)]
        if self.hashing == "direct":
            keys = [self.hash(root + data[: begin + size]) for begin in range(0, end, size)]
            return Prompt(root, data, pieces, keys)
        keys, key, hash, full = [], root, self.hash, LENGTH.pack(size)
        for own in pieces:
            key = hash(key + (full if len(own) == size else LENGTH.pack(len(own))) + own)
            keys.append(key)
        return Prompt(root, data, pieces, keys)

    def key(
        self, root: bytes, parent: bytes, data: bytes | bytearray, begin: int, end: int
    ) -> bytes:
        """The key of the piece from byte `begin` to `end` of a prompt; parent: of that before."""
        if self.hashing == "direct":
            return self.hash(root + data[:end])
        return self.hash(parent + LENGTH.pack(end - begin) + data[begin:end])
