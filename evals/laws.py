"""The laws that a new cache policy breaks first, for whoever has no clone with tests/laws.

Each is asked of a policy on random tokens, past three times its capacity, and answered by plain
numpy or by the policy itself in another way. Their numbers are those of jaxkv/contract.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.contract import Chunk, Policy, Spec, State
from jaxkv.rotary import rotary
from jaxkv.typing import Float

ROWS, GROUP, CLOSE = 2, 2, 1e-4
SPEC = Spec(kv_heads=3, head_dim=8, scale=8**-0.5, encoding=rotary(8, 100.0), group=GROUP)


class Verdict(NamedTuple):
    """One law. why: what was seen where it does not hold."""

    number: int
    says: str
    holds: bool
    why: str = ""


class Asked(NamedTuple):
    """A policy with the tokens that it is asked about; up to `capacity` it drops none."""

    policy: Policy
    capacity: int
    tokens: Chunk

    def begin(self, rows: int = ROWS) -> State:
        return self.policy.init(SPEC, rows, jax.random.key(0))

    def read(self, tokens: Chunk, size: int) -> tuple[np.ndarray, State]:
        """The output of all tokens, read so many at a time, and the state behind them."""
        state, outs = self.begin(tokens.q.shape[0]), []
        for at in range(0, tokens.q.shape[1], size):
            out, state = step(self.policy, state, cut(tokens, at, at + size))
            outs.append(np.asarray(out))
        return np.concatenate(outs, axis=1), state

    def held(self, state: State) -> list[list[list[int]]]:
        """The positions in a state, in order, by row and kv head."""
        kept = self.policy.kept(SPEC, state)
        return [
            [sorted(p[w > -np.inf].tolist()) for p, w in zip(*row, strict=True)]
            for row in zip(np.asarray(kept.positions), np.asarray(kept.log_weight), strict=True)
        ]


def check(policy: Policy, capacity: int) -> list[Verdict]:
    """What becomes of seven laws under a policy, which forgets nothing of its first `capacity`
    tokens."""
    asked = Asked(policy, capacity, draw(3 * capacity + 5))
    return [judge(number, says, law, asked) for number, says, law in LAWS]


def judge(
    number: int, says: str, law: Callable[[Asked], Iterator[tuple[str, bool]]], asked: Asked
) -> Verdict:
    """The law's first part that fails; an exception is a failure too."""
    try:
        why = next((what for what, holds in law(asked) if not holds), "")
    except Exception as error:  # whatever a policy of somebody else's may raise
        why = f"{type(error).__name__}: {error}".splitlines()[0][:80]
    return Verdict(number, says, not why, why)


def table(verdicts: list[Verdict]) -> str:
    """A line for each law."""
    lines = [f"{'holds' if v.holds else 'FAILS'}  {v.number:2}  {v.says}" for v in verdicts]
    pairs = zip(lines, verdicts, strict=True)
    return "\n".join(f"{line}\n           {v.why}" if v.why else line for line, v in pairs)


def draw(count: int, seed: int = 0) -> Chunk:
    """Random tokens in two rows."""
    rng, heads = np.random.default_rng(seed), SPEC.kv_heads
    shape = (ROWS, count, heads, SPEC.head_dim)
    q = rng.normal(size=(ROWS, count, GROUP * heads, SPEC.head_dim))
    k, v = rng.normal(size=shape), rng.normal(size=shape)
    positions = np.broadcast_to(np.arange(count, dtype=np.uint32), (ROWS, count))
    q, k, v = (jnp.asarray(array, jnp.float32) for array in (q, k, v))
    return Chunk(q, k, v, jnp.asarray(positions), jnp.ones((ROWS, count), bool))


def cut(tokens: Chunk, begin: int, end: int) -> Chunk:
    return Chunk(*(leaf[:, begin:end] for leaf in tokens))


def pad_between(tokens: Chunk) -> Chunk:
    """The same tokens with padding in front of them and behind every second one."""
    count = tokens.q.shape[1]
    places = np.repeat(np.arange(count), np.where(np.arange(count) % 2, 2, 1))
    there = np.append(True, places[1:] != places[:-1])
    places, there = np.append([0, 0, 0], places), np.append([False] * 3, there)
    chunk = Chunk(*(leaf[:, places] for leaf in tokens))
    return chunk._replace(valid=jnp.broadcast_to(jnp.asarray(there), chunk.valid.shape))


@partial(jax.jit, static_argnums=0)
def step(policy: Policy, state: State, tokens: Chunk) -> tuple[jax.Array, State]:
    """jaxkv.step, compiled once for each width."""
    return jaxkv.step(policy, SPEC, state, *tokens)


def same(one: State, other: State) -> bool:
    """Bit for bit."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def close(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.allclose(one, other, atol=CLOSE))


def dense(tokens: Chunk) -> Float[np.ndarray, "B T N H"]:
    """Causal softmax attention in plain numpy, from turned queries and keys."""
    q, k = (np.asarray(SPEC.encoding.rotate(x, tokens.positions)) for x in (tokens.q, tokens.k))
    k, v = (np.repeat(np.asarray(x), GROUP, axis=2) for x in (k, tokens.v))
    logits = np.einsum("btnh,bsnh->bnts", q, k) * SPEC.scale
    logits[:, :, np.triu(np.ones(logits.shape[2:], bool), 1)] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)


Parts = Iterator[tuple[str, bool]]


def shape_stays(asked: Asked) -> Parts:
    state, chunk = asked.begin(), cut(asked.tokens, 0, 3)
    after = jax.eval_shape(lambda: asked.policy.extend(SPEC, state, chunk))
    told = [[(x.shape, x.dtype) for x in jax.tree.leaves(s)] for s in (state, after)]
    yield "extend gives a state of other shapes or dtypes", told[0] == told[1]
    yield "extend gives a state of another kind", type(state) is type(after)


def padding_is_nothing(asked: Asked) -> Parts:
    _, state = asked.read(cut(asked.tokens, 0, asked.capacity + 3), 7)
    for width in (1, 4):
        pad = cut(asked.tokens, asked.capacity + 3, asked.capacity + 3 + width)
        out, after = step(asked.policy, state, pad._replace(valid=jnp.zeros((ROWS, width), bool)))
        yield f"{width} tokens of padding change a state", same(state, after)
        yield f"the output of {width} tokens of padding is not 0", not np.asarray(out).any()
    out, state = asked.read(asked.tokens, 7)
    mixed = pad_between(asked.tokens)
    other, after = asked.read(mixed, 7)
    yield "padding between tokens is kept", asked.held(state) == asked.held(after)
    yield "padding between tokens is seen", close(out, other[:, np.asarray(mixed.valid[0])])


def rows_are_alone(asked: Asked) -> Parts:
    together, _ = asked.read(asked.tokens, 7)
    others = draw(asked.tokens.q.shape[1], seed=1)
    for row in range(ROWS):
        mixed = Chunk(*(b.at[row].set(a[row]) for a, b in zip(asked.tokens, others, strict=True)))
        found, _ = asked.read(mixed, 7)
        yield f"row {row} depends on the other", close(together[row], found[row])


def below_capacity_it_is_dense(asked: Asked) -> Parts:
    few = cut(asked.tokens, 0, asked.capacity)
    for size in (1, asked.capacity):
        out, _ = asked.read(few, size)
        yield f"read by {size} it is not dense attention", close(out, dense(few))


def chunks_do_not_matter(asked: Asked) -> Parts:
    out, state = asked.read(asked.tokens, 1)
    for size in (5, asked.capacity + 1, asked.tokens.q.shape[1]):
        other, after = asked.read(asked.tokens, size)
        yield f"chunks of {size} and of 1 keep other tokens", asked.held(state) == asked.held(after)
        yield f"chunks of {size} and of 1 see other tokens", close(out, other)


def nothing_seen_is_nothing(asked: Asked) -> Parts:
    pad = cut(asked.tokens, 0, 2)._replace(valid=jnp.zeros((ROWS, 2), bool))
    found = asked.policy.attend(SPEC, asked.begin(), pad)
    yield "an empty state gives an output", not np.asarray(found.out).any()
    yield "an empty state has a weight", bool((np.asarray(found.lse) == -np.inf).all())
    yield "an empty state holds something", not any(map(any, asked.held(asked.begin())))


def bytes_are_the_formula(asked: Asked) -> Parts:
    known = {"K": SPEC.kv_heads, "G": GROUP, "H": SPEC.head_dim, "itemsize": 4, "min": min}
    about = {f.name: getattr(asked.policy, f.name) for f in dataclasses.fields(asked.policy)}
    a_row = eval(asked.policy.formula, {"__builtins__": {}}, about | known)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(asked.begin()))
    yield f"a row has {nbytes // ROWS} bytes, the formula says {a_row}", nbytes == ROWS * a_row


LAWS = (
    (1, "extend gives a state like the one before", shape_stays),
    (2, "padding changes no bit", padding_is_nothing),
    (3, "rows know nothing of each other", rows_are_alone),
    (4, "below capacity it is dense attention", below_capacity_it_is_dense),
    (5, "nothing depends on chunks", chunks_do_not_matter),
    (9, "where nothing was seen there is nothing", nothing_seen_is_nothing),
    (11, "bytes are what the formula says", bytes_are_the_formula),
)
