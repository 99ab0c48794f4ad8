"""Law 17: the rows of a cache in int8 are those of its tokens, rounded once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxkv.contract import Policy, State
from jaxkv.rows import Int8Rows
from jaxkv.testing.subject import Checks, Subject, rotate

ROUNDED = 3e-2  # outputs of a cache in int8 against those of floats, for normal keys and values
HALF = 0.5 + 1e-4  # of a scale, with the rounding of float32


def in_int8(policy: Policy) -> bool:
    """Whether the policy stores rows in int8."""
    return any(map(_is_int8, jax.tree.leaves(policy.leaves, is_leaf=_is_int8)))


def against_floats(subject: Subject) -> float:
    """The tolerance of outputs where they are compared with attention to floats."""
    return max(subject.tolerance, ROUNDED) if in_int8(subject.policy) else subject.tolerance


def rows_are_rounded_once(subject: Subject) -> Checks:
    """Each element is within half a scale of the token's, however often the row has moved."""
    if not in_int8(subject.policy):
        return
    tokens = subject.tokens
    k, v = (np.asarray(leaf, np.float64) for leaf in (tokens.k, tokens.v))
    k = rotate(subject.spec, k, tokens.positions)
    for size in (subject.sizes[0], subject.sizes[-1]):
        parts = list(parts_in_int8(subject.read(size).states[-1]))
        yield "no row is in int8", any(np.asarray(part.k.scale).any() for part in parts)
        for part in parts:
            for name, rows, of_tokens in (("k", part.k, k), ("v", part.v, v)):
                for sequence, valid in enumerate(tokens.valid):
                    stored = Int8Rows(*(np.asarray(leaf[sequence], np.float64) for leaf in rows))
                    valid_tokens = np.flatnonzero(valid).tolist()
                    token_at = {int(tokens.positions[sequence, n]): n for n in valid_tokens}
                    positions = np.asarray(part.positions[sequence])
                    heads = _heads(part)[sequence]
                    right = _near(stored, positions, heads, of_tokens[sequence], token_at)
                    yield f"in chunks of {size} a row of {name} is not its token's", right


def _heads(part: Any) -> np.ndarray:
    """The KV head of each row [B,K,S]: the `head` of PerLayerTokens, else the place on axis K."""
    shape = part.k.shape[:3]
    places = np.broadcast_to(np.arange(shape[1])[:, None], shape)
    return np.asarray(getattr(part, "head", places))


def _near(
    stored: Int8Rows,
    positions: np.ndarray,
    heads: np.ndarray,
    of_tokens: np.ndarray,
    token_at: dict[int, int],
) -> bool:
    """Whether the rows [K,S,H] at these positions [S] or [K,S] are those of the tokens [T,K,H].

    heads [K,S]: the KV head of each row.
    """
    row, slot, _ = np.nonzero(stored.scale)  # an empty slot has the scale 0
    positions = np.broadcast_to(positions, stored.shape[:2])[row, slot]
    expected = of_tokens[[token_at[int(at)] for at in positions], heads[row, slot]]
    scale = stored.scale[row, slot]
    return bool((np.abs(stored.values[row, slot] * scale - expected) <= HALF * scale).all())


def _is_int8(node: Any) -> bool:
    return isinstance(node, Int8Rows)


def parts_in_int8(state: State) -> Iterator[Any]:
    """The parts of a state that store keys and values in int8, each with their positions."""
    is_part = lambda node: _is_int8(getattr(node, "k", None))
    return filter(is_part, jax.tree.leaves(state, is_leaf=is_part))
