"""Text from a model in a fixed memory: read a prompt in chunks, write tokens without end.

Two compiled functions do all the work. `_read` takes a chunk of prompt; `_write` is one
while_loop over tokens. A whole answer and a stream run the same `_write`, only with different
limits, so they share one compilation and give the same text.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from numbers import Integral
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv import memory, sharding
from jaxkv.carry import fold, share, unfold
from jaxkv.contract import Policy, Spec, State
from jaxkv.errors import UserError, whole
from jaxkv.stack import reach, state_bytes
from jaxkv.typing import Array, Bool, Float, Float32, Int32, UInt32
from models.compilation import clock, small_steps
from models.config import Config
from models.decoder import Decoder, Weights
from models.llm import Llm
from models.sampling import Filters, Knobs, Sampling, draw

DEFAULT_POLICY = "streaming:sinks=4,window=252"
CHUNK = 1024  # prompt tokens read at a time, at most
BLOCK = 256  # tokens one call of `_write` can return
PAUSE = 0.1  # seconds a stream may keep text back


class Decoding(NamedTuple):
    """A batch in progress. The states have absorbed every token emitted so far but an eos."""

    states: tuple[State, ...]
    logits: Float32[Array, "B V"]  # of the token that comes next
    position: UInt32[Array, " B"]
    done: Bool[Array, " B"]
    seen: Bool[Array, "B V"]  # tokens of the row, for the repetition penalty
    keys: UInt32[Array, "B 2"]


class Static(NamedTuple):
    """What a compilation depends on besides shapes."""

    config: Config
    policies: tuple[Policy, ...]
    mesh: Mesh | None


def _decode(
    static: Static, weights: Weights, tokens: Array, positions: Array, valid: Array, states: tuple
) -> tuple[Decoder, Array, tuple[State, ...]]:
    decoder = Decoder(static.config, weights, static.mesh)
    hidden, states = decoder(tokens, positions, valid, static.policies, states)
    return decoder, hidden, states


def _by_row(decoder: Decoder, hidden: Float[Array, "D B 1"]) -> Float32[Array, "B V"]:
    # Unbarred, XLA folds the transpose into the product, and on a CPU fails on it in bfloat16.
    return jax.lax.optimization_barrier(decoder.logits(hidden))[:, :, 0].T


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _read(
    static: Static,
    weights: Weights,
    decoding: Decoding,
    tokens: Int32[Array, "B T"],
    valid: Bool[Array, "B T"],
) -> Decoding:
    """Absorb a chunk of prompt; rows that are all padding keep everything as it was."""
    offset = jnp.cumsum(valid.astype(jnp.uint32), axis=1) - valid.astype(jnp.uint32)
    positions = decoding.position[:, None] + offset
    states = share(static.policies, decoding.states)
    decoder, hidden, states = _decode(static, weights, tokens, positions, valid, states)
    new = jnp.sum(valid.astype(jnp.int32), axis=1)
    # The last valid place of each row: the head is applied there and nowhere else.
    place = jnp.max(jnp.where(valid, jnp.arange(valid.shape[1])[None, :], 0), axis=1)
    last = jnp.take_along_axis(hidden, place[None, :, None], axis=2)
    logits = _by_row(decoder, last)
    return decoding._replace(
        states=states,
        logits=jnp.where((new > 0)[:, None], logits, decoding.logits),
        position=decoding.position + new.astype(jnp.uint32),
        done=decoding.done & (new == 0),
        seen=_mark(decoding.seen, tokens, valid),
    )


@functools.cache
def writer() -> Callable:
    """`_write`, compiled for where it runs."""
    return jax.jit(
        _write, static_argnums=(0, 1, 2), donate_argnums=4, compiler_options=small_steps()
    )


def _write(
    static: Static,
    filters: Filters,
    eos: tuple[int, ...],
    weights: Weights,
    decoding: Decoding,
    knobs: Knobs,
    limit: Int32[Array, ""],
) -> tuple[Decoding, Int32[Array, "B BLOCK"], Int32[Array, ""], Bool[Array, " B"]]:
    """Up to `limit` tokens a row, -1 after a row's end; how many steps; which rows had numbers."""
    rows = decoding.logits.shape[0]

    def folded(d: Decoding) -> Decoding:
        return d._replace(states=fold(static.policies, d.states, static.mesh is not None))

    def unfolded(d: Decoding) -> Decoding:
        return d._replace(states=unfold(static.policies, d.states, decoding.states))

    def go_on(carry: tuple) -> Array:
        done, count = carry[0].done, carry[1]
        return (count < limit) & ~jnp.all(done)

    def write_one(carry: tuple) -> tuple:
        d, (count, out, sound) = unfolded(carry[0]), carry[1:]
        token, drawn = draw(filters, knobs, d.logits, d.seen, d.keys, d.position)
        sound &= d.done | jnp.isfinite(drawn)
        ends = jnp.isin(token, jnp.asarray(eos, jnp.int32)) if eos else jnp.zeros_like(d.done)
        emitted = jnp.where(d.done, -1, token)
        out = jax.lax.dynamic_update_slice(out, emitted[:, None], (0, count))
        fed = ~d.done & ~ends
        decoder, hidden, states = _decode(
            static, weights, token[:, None], d.position[:, None], fed[:, None], d.states
        )
        seen = d.seen
        if filters.repetition:
            seen = _mark(seen, token[:, None], fed[:, None])
        d = Decoding(
            states=states,
            logits=_by_row(decoder, hidden),
            position=d.position + fed.astype(jnp.uint32),
            done=d.done | ends,
            seen=seen,
            keys=d.keys,
        )
        return folded(d), count + 1, out, sound

    out, sound = jnp.full((rows, BLOCK), -1, jnp.int32), jnp.ones((rows,), bool)
    start = (folded(decoding), jnp.int32(0), out, sound)
    end, count, out, sound = jax.lax.while_loop(go_on, write_one, start)
    if not filters.repetition:  # nobody asked on the way: mark the whole block at once
        fed = (out >= 0) & ~jnp.isin(out, jnp.asarray(eos, jnp.int32))
        end = end._replace(seen=_mark(end.seen, out, fed))
    return unfolded(end), out, count, sound


def _mark(seen: Array, tokens: Array, valid: Array) -> Array:
    """seen [B,V] with the valid tokens [B,T] marked; row by row, so that shards need not talk."""
    return jax.vmap(lambda row, ids, real: row.at[ids].max(real))(seen, tokens, valid)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _init(policy: Policy, spec: Spec, mesh: Mesh | None, keys: Array) -> State:
    """Fresh rows, each from its own key: a row's randomness does not know its neighbours."""
    rows = jax.vmap(lambda key: policy.init(spec, 1, key))(keys)
    state = jax.tree.map(lambda leaf: leaf[:, 0], rows)
    if mesh is None:
        return state
    specs = sharding.specs(policy.axes, *sharding.axes_in(mesh))
    return jax.tree.map(
        lambda leaf, spec: jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec)),
        state,
        specs,
    )


def _of_layer(keys: Array, layer: int) -> Array:
    return jax.vmap(jax.random.fold_in, (0, None))(keys, layer)


@partial(jax.jit, static_argnums=(0, 1))
def _seal(policy: Policy, spec: Spec, state: State) -> State:
    return policy.seal(spec, state)


class Stream:
    """A batch of rows that reads and writes, for as long as one likes, in one set of states.

    llm, policy: what runs. rows: B. seed: one for all rows or one a row; a row's draws depend on
    its own seed and positions alone. tokens: how many a row will hold in the end, if known, so
    that a policy which grows can refuse, and memory can be counted, before anything is allocated.
    start: the position of the first token, up to 2^32 - 1.
    """

    def __init__(
        self,
        llm: Llm,
        policy: str | Policy | Sequence[Policy | str] = DEFAULT_POLICY,
        rows: int = 1,
        seed: int | Sequence[int] = 0,
        tokens: int = 0,
        start: int = 0,
    ):
        self.llm = llm
        self.policies = llm.policies(policy)
        self.lengths = np.full(rows, 0)  # tokens of each row, for policies that grow
        self.sealed = False
        self._sealed_at = self.lengths
        self.limit = 1
        self._static = Static(llm.config, self.policies, llm.mesh)
        clock()
        if llm.mesh is not None:
            sharding.check(llm.mesh, rows, llm.config.kv_heads)
        self._rows, self._checked = rows, -1
        self._check(tokens, held=0)
        seeds = list(seed) if isinstance(seed, Sequence | np.ndarray) else [seed] * rows
        if not all(isinstance(s, Integral) for s in seeds):
            raise UserError(f"a seed is a whole number, or one a row, got {seed!r}; give 0")
        if len(seeds) != rows:
            raise UserError(f"one seed, or one a row: got {len(seeds)} seeds for {rows} rows")
        if not all(0 <= s < 2**32 for s in seeds):
            raise UserError(f"a seed must be from 0 to {2**32 - 1}, got {seeds}")
        if not isinstance(start, Integral) or not 0 <= start < 2**32:
            raise UserError(f"start must be a whole number from 0 to {2**32 - 1}, got {start!r}")
        self.decoding = self._begin(rows, seeds, start)

    def _begin(self, rows: int, seeds: Sequence[int], start: int) -> Decoding:
        llm, vocab = self.llm, self.llm.config.vocab
        # What policies draw and what tokens are drawn by never share a key.
        keys = jnp.stack([jax.random.key(seed) for seed in seeds])
        of_tokens, of_policies = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
        states = tuple(
            _init(policy, llm.spec, llm.mesh, _of_layer(of_policies, layer))
            for layer, policy in enumerate(self.policies)
        )
        begun = Decoding(
            states=(),
            logits=jnp.zeros((rows, vocab), jnp.float32),
            position=jnp.full((rows,), start, jnp.uint32),
            done=jnp.ones((rows,), bool),
            seen=jnp.zeros((rows, vocab), bool),
            keys=jax.random.key_data(of_tokens),
        )
        if llm.mesh is not None:  # where the compiled calls leave them, or they compile twice
            by_row = PartitionSpec(*filter(None, sharding.axes_in(llm.mesh)[:1]))
            begun = jax.device_put(begun, NamedSharding(llm.mesh, by_row))
        return begun._replace(states=states)

    @property
    def state_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.decoding.states))

    def read(
        self,
        prompts: Sequence[Sequence[int]],
        chunk: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Absorb token ids, one list a row, of any lengths (an empty one is left alone).

        chunk: tokens read at a time, None as many as suit the policies; it changes nothing but
        the speed. progress: called with (tokens of the longest row that are read, all of them).
        """
        chunk = self.chunk_of(chunk)
        rows = self.decoding.position.shape[0]
        if len(prompts) != rows:
            raise UserError(f"one list of tokens a row: got {len(prompts)} for {rows} rows")
        longest, vocab = max(map(len, prompts)), self.llm.config.vocab
        if any(len(prompt) and not 0 <= min(prompt) <= max(prompt) < vocab for prompt in prompts):
            raise UserError(f"token ids must be from 0 to {vocab - 1}: give the model's own")
        self.reserve(np.array(list(map(len, prompts))))
        for start in range(0, longest, chunk):
            width = bucket(min(chunk, longest - start), chunk)
            tokens = np.zeros((rows, width), np.int32)
            valid = np.zeros((rows, width), bool)
            for row, prompt in enumerate(prompts):
                part = prompt[start : start + chunk]
                tokens[row, : len(part)], valid[row, : len(part)] = part, True
            self.decoding = _read(self._static, self.llm.weights, self.decoding, tokens, valid)
            if progress is not None:  # not of what is only asked for
                jax.block_until_ready(self.decoding.position)
                progress(min(start + chunk, longest), longest)

    def chunk_of(self, chosen: int | None) -> int:
        """How many tokens to read at a time; raises UserError for a choice below 1.

        Left open it is about what the policies let a query look back: in a longer chunk most of
        the attention would be masked out.
        """
        if chosen is not None:
            whole("chunk", chosen)
            return chosen
        farthest = min(max(map(reach, self.policies)), CHUNK)
        return 1 << max(6, int(farthest).bit_length() - 1)

    def seal(self) -> None:
        """Tell policies that compress or index a finished prompt that it is complete; once."""
        if self.sealed or not any(hasattr(policy, "seal") for policy in self.policies):
            return
        self.sealed, self._sealed_at = True, self.lengths
        states = tuple(
            _seal(policy, self.llm.spec, state) if hasattr(policy, "seal") else state
            for policy, state in zip(self.policies, self.decoding.states, strict=True)
        )
        self.decoding = self.decoding._replace(states=states)

    def write(
        self, sampling: Sampling, limit: int, eos: tuple[int, ...]
    ) -> tuple[Int32[np.ndarray, "B T"], Bool[np.ndarray, " B"]]:
        """At most `limit` (and BLOCK) new tokens a row, -1 behind a row's end; which rows ended.

        Raises UserError where the model gives logits that are no numbers.
        """
        limit, before = min(limit, BLOCK), self.lengths
        self.reserve(limit)
        self.decoding, out, count, sound = writer()(
            self._static,
            sampling.filters,
            eos,
            self.llm.weights,
            self.decoding,
            sampling.knobs,
            np.int32(limit),
        )
        if not np.asarray(sound).all():
            raise no_numbers(self.llm)
        out = np.asarray(out)[:, : int(count)]
        self.lengths = before + (out >= 0).sum(axis=1)  # rows that end early leave room
        return out, np.asarray(self.decoding.done)

    def pieces(
        self, sampling: Sampling, tokens: int, eos: tuple[int, ...], pause: float = PAUSE
    ) -> Iterator[Int32[np.ndarray, "B T"]]:
        """New tokens as they come, in blocks of about `pause` seconds; ends with every row."""
        while tokens > 0:
            begun = time.perf_counter()
            compiled = clock().seconds
            block, done = self.write(sampling, min(self.limit, tokens), eos)
            seconds = time.perf_counter() - begun - (clock().seconds - compiled)
            tokens -= block.shape[1]
            yield block
            if done.all():
                return
            wanted = max(1, int(block.shape[1] * pause / max(seconds, 1e-6)))
            self.limit = min(BLOCK, wanted, 4 * self.limit)

    def reserve(self, tokens: int | Int32[np.ndarray, " B"]) -> None:
        """Make room for that many more tokens, of every row or one number a row, where it grows."""
        lengths = self.lengths + tokens
        if any(hasattr(policy, "reserve") for policy in self.policies):
            self._check(int(lengths.max()), self.state_bytes)
            since_seal = lengths - self._sealed_at  # which is what a sealed policy counts
            states = list(self.decoding.states)
            for layer, policy in enumerate(self.policies):
                if hasattr(policy, "reserve"):
                    most = int((since_seal if hasattr(policy, "seal") else lengths).max())
                    states[layer] = policy.reserve(self.llm.spec, states[layer], most)
            self.decoding = self.decoding._replace(states=tuple(states))
        self.lengths = lengths  # only now: a refused request leaves the stream as it was

    def _check(self, tokens: int, held: int) -> None:
        """Raise UserError if a policy refuses so many tokens a row, or they do not fit.

        held: bytes of caches that are there already; what does not outgrow them asks for nothing.
        """
        if tokens > self._checked:
            caches = state_bytes(self.policies, self.llm.spec, self._rows, tokens)
            if caches <= held:
                return
            logits = 5 * self._rows * self.llm.config.vocab  # float32 logits and a bool a token
            mesh = self.llm.mesh
            # The devices of a CPU are one memory.
            apart = {} if mesh is None or jax.default_backend() == "cpu" else mesh.shape
            each = caches // math.prod(apart.values()) + logits // apart.get("data", 1)
            length = f" of {tokens} tokens" if tokens else ""
            memory.check(each, f"the caches of {self._rows} row(s){length}")
            self._checked = tokens


def no_numbers(llm: Llm) -> UserError:
    return UserError(
        "the model gives logits that are not finite numbers: its weights hold some, or it "
        f"overflows {llm.dtype}; check the weights"
        + ("" if llm.dtype == "float32" else ", or load it with dtype float32")
    )


def bucket(tokens: int, chunk: int) -> int:
    """The padded length of a chunk: few lengths, so that few are compiled."""
    sizes = (16, 64, 256, 1 << max(9, (tokens - 1).bit_length()))
    return min(chunk, next(size for size in sizes if tokens <= size))
