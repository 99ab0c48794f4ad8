"""Hashes of prompt prefixes: a root hash for the setting, then a chain of block hashes.

Equal hashes mean equal caches up to that block, so the root covers every setting that a cache
depends on besides its tokens.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from jaxkv.errors import UserError, check_int, is_whole

Hash = Callable[[bytes], bytes]
TokenIds = Sequence[Any] | np.ndarray  # whole numbers; `encode` checks their type
TOKEN = 4  # bytes of an encoded token
LENGTH = struct.Struct("<Q")
MAX_BLOCK = 2**31 - 1  # tokens in a block


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def root_hash(**fields: Any) -> bytes:
    """The 32-byte hash of everything but the tokens: policy, model, dtype, salt and so on.

    fields: None, bool, int, float, str, bytes, or tuples and lists of those, in any order. The
    hash covers name, type and length of each, so an adapter "x" differs from a salt "x" and 1
    differs from "1" and True. A field that is None differs from a missing one.
    Raises UserError for other types, for text that is not Unicode, for numbers beyond 64 bits, and
    for an empty salt, which would isolate nobody.
    """
    if fields.get("salt") in ("", b""):
        raise UserError(f"salt must not be empty, got {fields['salt']!r}; leave it out for no salt")
    parts = []
    for name in sorted(fields):
        try:
            parts.append(_tagged(b"k", name.encode()) + _field(name, fields[name]))
        except (UnicodeEncodeError, OverflowError):
            raise UserError(
                f"{name!r:.60} must be Unicode text or a number within 64 bits, got another "
                f"{type(fields[name]).__name__}; give a shorter value"
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
        return _tagged(b"l", b"".join(_field(name, element) for element in value))
    raise UserError(
        f"{name} must consist of None, numbers, text and bytes, got {type(value).__name__}; "
        "convert it to text"
    )


def _tagged(tag: bytes, value: bytes) -> bytes:
    return tag + LENGTH.pack(len(value)) + value


def encode(tokens: TokenIds) -> bytes:
    """Encode tokens as unsigned 32-bit little endian, equal for ints and all integer arrays.

    Raises UserError for anything but whole numbers from 0 to 2^32 - 1.
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
        f"tokens must be whole numbers from 0 to {2**32 - 1}, got {_invalid(tokens)}; "
        "give token ids"
    )


def _invalid(tokens: TokenIds) -> str:
    """The first invalid token, or the type of the whole."""
    if isinstance(tokens, np.ndarray) and (tokens.ndim != 1 or tokens.dtype.kind not in "iu"):
        return f"an array of {tokens.dtype} with {tokens.ndim} axes"
    several = tokens if isinstance(tokens, Sequence | np.ndarray) else [tokens]
    odd = (t for t in several if not (is_whole(t) and 0 <= t < 2**32))
    return f"{next(odd, tokens)!r:.60}"


class HashedPrompt(NamedTuple):
    """A prompt split into blocks, with the hash of each, computed once for all lookups.

    root: the root hash. data: the encoded tokens. blocks: the encoded tokens of each block.
    hashes: one for each block. owner: who has the entries that are stored for it.
    """

    root: bytes
    data: bytes
    blocks: list[bytes]
    hashes: list[bytes]
    owner: str | None = None

    def __len__(self) -> int:
        return len(self.data) // TOKEN


@dataclass(frozen=True)
class BlockHasher:
    """The rule that turns tokens into block hashes: each covers the parent's hash and its tokens.

    block_size: tokens in a block. hash: a hash function of bytes. Raises UserError for a bad size.
    """

    block_size: int
    hash: Hash = sha256

    def __post_init__(self) -> None:
        check_int("block_size", self.block_size, maximum=MAX_BLOCK)

    def hash_prompt(self, tokens: TokenIds, root: bytes, owner: str | None = None) -> HashedPrompt:
        """Hash the full blocks of a prompt.

        Raises UserError for an empty prompt and for invalid tokens.
        """
        data, size = encode(tokens), self.block_size * TOKEN
        if not data:
            raise UserError("a prompt must have at least one token, got none; give some")
        blocks = [data[end - size : end] for end in range(size, len(data) + 1, size)]
        hashes, last, hash, length = [], root, self.hash, LENGTH.pack(size)
        for block in blocks:
            last = hash(last + length + block)
            hashes.append(last)
        return HashedPrompt(root, data, blocks, hashes, owner)
