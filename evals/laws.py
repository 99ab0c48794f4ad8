"""The laws that can be asked of a cache policy without a clone that has tests/laws.

Each is asked on random tokens, past three times the policy's capacity, and answered by plain numpy
or by the policy itself in another way. Their numbers are those of jaxkv/contract.py. Left to
tests/laws are estimates (12), protected slots (13), `seal` (14) and pages (17), and all laws for
policies that grow, seal or score.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.state import batch
from jaxkv.contract import Chunk, Policy, Spec, State, is_letters
from jaxkv.rotary import rotary
from jaxkv.policy_spec import formula_bytes
from jaxkv.typing import Bool, Float

ROWS, GROUP, CLOSE = 2, 2, 1e-4
SPEC = Spec(kv_heads=3, head_dim=8, scale=8**-0.5, encoding=rotary(8, 100.0), group=GROUP)
Parts = Iterator[tuple[str, bool]]  # what would be wrong, and whether all is well
# Most of a law's time is compiling: less of it this way.
QUICK = {"xla_backend_optimization_level": 0}
View = Callable[[int], Sequence[int]]  # of a query's number: the numbers of the tokens it sees


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
    view: View | None

    def begin(self) -> State:
        return self.policy.init(SPEC, ROWS, jax.random.key(0))

    def read(self, tokens: Chunk, size: int) -> tuple[np.ndarray, State]:
        """The output of all tokens, read so many at a time, and the state behind them."""
        state, outs = self.begin(), []
        for at in range(0, tokens.q.shape[1], size):
            out, state = step(self.policy, state, cut(tokens, at, at + size))
            outs.append(np.asarray(out))
        return np.concatenate(outs, axis=1), state

    def halfway(self) -> State:
        """A state that is full."""
        return self.read(cut(self.tokens, 0, self.capacity + 3), 7)[1]

    def next(self, size: int) -> Chunk:
        """The tokens that come behind `halfway`."""
        return cut(self.tokens, self.capacity + 3, self.capacity + 3 + size)

    def held(self, state: State) -> list[list[list[int]]]:
        """The positions in a state, in order, by row and kv head."""
        kept = self.policy.kept(SPEC, state)
        return [
            [sorted(p[w > -np.inf].tolist()) for p, w in zip(*row, strict=True)]
            for row in zip(np.asarray(kept.positions), np.asarray(kept.log_weight), strict=True)
        ]


def check(policy: Policy, capacity: int, view: View | None = None) -> list[Verdict]:
    """What becomes of the laws under a policy; those that ask nothing of it are left out.

    capacity: the policy forgets nothing of its first so many tokens. view: what it means, in plain
    Python, where every token counts once and stands where it stood in the text; asked by law 15.
    """
    asked = Asked(policy, capacity, draw(3 * capacity + 5), view)
    verdicts = (judge(number, says, law, asked) for number, says, law in LAWS)
    return [verdict for verdict in verdicts if verdict is not None]


def judge(number: int, says: str, law: Law, asked: Asked) -> Verdict | None:
    """The law's first part that fails, None where it has none; an exception is a failure too."""
    try:
        parts = list(law(asked))
    except Exception as error:  # whatever a policy of somebody else's may raise
        why = f"{type(error).__name__}: {error}".splitlines()[0][:80]
        return Verdict(number, says, False, why)
    why = next((what for what, holds in parts if not holds), "")
    return Verdict(number, says, not why, why) if parts else None


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


@partial(jax.jit, static_argnames=("policy", "spec"), compiler_options=QUICK)
def step(policy: Policy, state: State, tokens: Chunk, spec: Spec = SPEC) -> tuple[jax.Array, State]:
    """jaxkv.step, compiled once for each width."""
    return jaxkv.step(policy, spec, state, *tokens)


def same(one: State, other: State) -> bool:
    """Bit for bit."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def close(one: State, other: State) -> bool:
    """But for the rounding of two compiled programs."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.allclose(np.asarray(a), np.asarray(b), atol=CLOSE) for a, b in pairs)


def dense(
    tokens: Chunk, seen: Bool[np.ndarray, "T T"] | None = None
) -> Float[np.ndarray, "B T N H"]:
    """Softmax attention in plain numpy; seen: by query and key, else all that came before."""
    q, k = (np.asarray(SPEC.encoding.rotate(x, tokens.positions)) for x in (tokens.q, tokens.k))
    k, v = (np.repeat(np.asarray(x), GROUP, axis=2) for x in (k, tokens.v))
    logits = np.einsum("btnh,bsnh->bnts", q, k) * SPEC.scale
    seen = np.tri(logits.shape[2], dtype=bool) if seen is None else seen
    logits[:, :, ~seen] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)


def shape_stays(asked: Asked) -> Parts:
    state, chunk = asked.begin(), cut(asked.tokens, 0, 3)
    after = jax.eval_shape(lambda: asked.policy.extend(SPEC, state, chunk))
    told = [[(x.shape, x.dtype) for x in jax.tree.leaves(s)] for s in (state, after)]
    yield "extend gives a state of other shapes or dtypes", told[0] == told[1]
    yield "extend gives a state of another kind", type(state) is type(after)


def padding_is_nothing(asked: Asked) -> Parts:
    state = asked.halfway()
    for width in (1, 4):
        pad = asked.next(width)._replace(valid=jnp.zeros((ROWS, width), bool))
        out, after = step(asked.policy, state, pad)
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


def heads_are_alone(asked: Asked) -> Parts:
    """What sharding over kv heads relies on: each of them gives alone what it gives with others."""
    state, tokens = asked.halfway(), asked.next(3)
    out, after = step(asked.policy, state, tokens)
    alone = dataclasses.replace(SPEC, kv_heads=1)
    for head in range(SPEC.kv_heads):
        its, own = slice(GROUP * head, GROUP * (head + 1)), slice(head, head + 1)
        few = tokens._replace(q=tokens.q[:, :, its], k=tokens.k[:, :, own], v=tokens.v[:, :, own])
        found = step(asked.policy, of_head(asked.policy, state, head), few, alone)
        wanted = out[:, :, its], of_head(asked.policy, after, head)
        yield f"kv head {head} depends on the others", close(wanted, found)


def of_head(policy: Policy, state: State, head: int) -> State:
    """The part of a state that is one kv head's."""

    def pick(letters: tuple[str, ...], leaf: jax.Array) -> jax.Array:
        return jnp.take(leaf, jnp.array([head]), letters.index("K")) if "K" in letters else leaf

    return jax.tree.map(pick, policy.axes, state, is_leaf=is_letters)


def rows_can_be_moved(asked: Asked) -> Parts:
    state = asked.halfway()
    turned = batch.take(state, [1, 0])
    yield "rows taken and put back are others", same(batch.put(turned, [1, 0], turned), state)
    yield "a state changes on the host", same(batch.to_device(batch.to_host(state)), state)


def equal_settings_compile_once(asked: Asked) -> Parts:
    traced = []

    @partial(jax.jit, static_argnums=0, compiler_options=QUICK)
    def counted(policy: Policy, state: State, tokens: Chunk) -> tuple[jax.Array, State]:
        traced.append(policy)
        return jaxkv.step(policy, SPEC, state, *tokens)

    for policy in (asked.policy, dataclasses.replace(asked.policy)):
        state = asked.begin()
        for at in range(3):
            _, state = counted(policy, state, cut(asked.tokens, at, at + 1))
    yield f"two equal policies and three tokens are compiled {len(traced)} times", len(traced) == 1


def nothing_seen_is_nothing(asked: Asked) -> Parts:
    pad = cut(asked.tokens, 0, 2)._replace(valid=jnp.zeros((ROWS, 2), bool))
    found = asked.policy.attend(SPEC, asked.begin(), pad)
    yield "an empty state gives an output", not np.asarray(found.out).any()
    yield "an empty state has a weight", bool((np.asarray(found.lse) == -np.inf).all())
    yield "an empty state holds something", not any(map(any, asked.held(asked.begin())))


def what_is_fused_is_the_same(asked: Asked) -> Parts:
    state = asked.halfway()
    for name, width in (("decode", 1), ("take", 5)):
        if hasattr(asked.policy, name):
            tokens = asked.next(width)
            found = getattr(asked.policy, name)(SPEC, state, tokens)
            apart = (
                asked.policy.attend(SPEC, state, tokens),
                asked.policy.extend(SPEC, state, tokens),
            )
            yield f"{name} is not attend and extend", close(found, apart)


def bytes_are_the_formula(asked: Asked) -> Parts:
    a_row, found = formula_bytes(asked.policy, SPEC), batch.nbytes(asked.begin()) // ROWS
    yield f"a row has {found} bytes, the formula says {a_row}", found == a_row


def it_is_what_it_means(asked: Asked) -> Parts:
    if asked.view is None:
        return
    count, state = asked.tokens.q.shape[1], asked.begin()
    seen, outs = np.zeros((count, count), bool), []
    for at in range(count):
        out, state = step(asked.policy, state, cut(asked.tokens, at, at + 1))
        outs.append(out)
        wanted = sorted(asked.view(at))
        seen[at, wanted] = True
        held = asked.held(state)
        yield f"behind token {at} others are held", held == [[wanted] * SPEC.kv_heads] * ROWS
    found = np.concatenate(outs, axis=1)
    yield "it is not attention to what is meant", close(found, dense(asked.tokens, seen))


def gradients_exist(asked: Asked) -> Parts:
    state, tokens = asked.halfway(), asked.next(3)
    valid = tokens.valid.at[:, -1].set(False)
    weights = np.random.default_rng(2).normal(size=tokens.q.shape).astype(np.float32)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out, _ = jaxkv.step(asked.policy, SPEC, state, q, k, v, tokens.positions, valid)
        return jnp.sum(out * weights)

    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), compiler_options=QUICK)(
        tokens.q, tokens.k, tokens.v
    )
    for name, gradient in zip("qkv", map(np.asarray, found), strict=True):
        yield f"{name} has no finite gradient", bool(np.isfinite(gradient).all() and gradient.any())
        yield f"padding of {name} has a gradient", not gradient[:, -1].any()


Law = Callable[[Asked], Parts]
LAWS: tuple[tuple[int, str, Law], ...] = (
    (1, "extend gives a state like the one before", shape_stays),
    (2, "padding changes no bit", padding_is_nothing),
    (3, "rows know nothing of each other", rows_are_alone),
    (4, "below capacity it is dense attention", below_capacity_it_is_dense),
    (5, "nothing depends on chunks", chunks_do_not_matter),
    (6, "kv heads know nothing of each other", heads_are_alone),
    (7, "rows can be moved and brought to the host", rows_can_be_moved),
    (8, "equal settings compile once", equal_settings_compile_once),
    (9, "where nothing was seen there is nothing", nothing_seen_is_nothing),
    (10, "decode and take are attend and extend", what_is_fused_is_the_same),
    (11, "bytes are what the formula says", bytes_are_the_formula),
    (15, "it holds and sees what is meant", it_is_what_it_means),
    (16, "gradients exist", gradients_exist),
)
