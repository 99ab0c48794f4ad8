"""Text from a model in a fixed memory: read a prompt in chunks, write tokens without end."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxkv.contract import Policy, State
from jaxkv.errors import UserError, whole
from jaxkv.models.compilation import clock
from jaxkv.models.decoding import (
    BLOCK,
    Decoding,
    Static,
    init_layer,
    read_chunk,
    seal_layer,
    writer,
)
from jaxkv.models.llm import Llm
from jaxkv.policy_spec import bytes_by_memory, format_policy, host_bytes, max_lookback
from jaxkv.sampling import Sampling
from jaxkv.state import memory, sharding
from jaxkv.typing import Array, Bool, Int32

DEFAULT_POLICY = "streaming:sinks=4,window=252"
CHUNK = 1024  # prompt tokens read at a time, at most
PAUSE = 0.1  # seconds a stream may keep text back


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
            init_layer(policy, llm.spec, llm.mesh, _of_layer(of_policies, layer))
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
        return _nbytes(self.decoding.states)

    def read(
        self,
        prompts: Sequence[Sequence[int]],
        chunk: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Absorb token ids, one list a row, of any lengths (an empty one is left alone).

        chunk: tokens read at a time, None as many as suit the policies. It changes nothing but the
        speed, save for h2o and other policies with `needs_scores`, which count attention chunk by
        chunk. progress: called with (tokens of the longest row that are read, all of them).
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
            self.decoding = read_chunk(self._static, self.llm.weights, self.decoding, tokens, valid)
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
        farthest = min(max(map(max_lookback, self.policies)), CHUNK)
        return 1 << max(6, int(farthest).bit_length() - 1)

    def seal(self) -> None:
        """Tell policies that compress or index a finished prompt that it is complete; once."""
        sealing = [policy for policy in self.policies if policy.min_prompt is not None]
        if self.sealed or not sealing:
            return
        # Layers may differ in it: a prompt is kept whole where not one of them wants it.
        least = min(policy.min_prompt for policy in sealing)
        if self.lengths.min() < least:
            warnings.warn(
                f"{format_policy(self.policies)} wants prompts of {least} tokens or more, and one "
                f"has {self.lengths.min()}: it is kept whole",
                stacklevel=2,
            )
        how = {"spec": self.llm.spec, "mesh": self.llm.mesh}
        self._remake({
            layer: lambda state, policy=policy: seal_layer(policy, **how, state=state)
            for layer, policy in enumerate(self.policies) if policy.min_prompt is not None
        })  # fmt: skip
        self.sealed, self._sealed_at = True, self.lengths

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
        grows = [layer for layer, policy in enumerate(self.policies) if policy.grows]
        if grows:
            since_seal = lengths - self._sealed_at  # which is what a sealed policy counts
            if not self.sealed:
                self._check(int(lengths.max()), self.state_bytes)
            self._remake({
                layer: partial(
                    self.policies[layer].reserve, self.llm.spec,
                    tokens=int((lengths if self.policies[layer].min_prompt is None else since_seal)
                               .max()),
                ) for layer in grows
            })  # fmt: skip
        self.lengths = lengths  # only now: a refused request leaves the stream as it was

    def _remake(self, make: Mapping[int, Callable[[State], State]]) -> None:
        """Other states in some layers, one after another; raises UserError where they do not fit.

        Nothing is held twice but the layer that is made.
        """
        states, sizes = list(self.decoding.states), {}
        more = most = far = 0
        for layer, one in make.items():
            policy = self.policies[layer]
            if policy not in sizes:  # layers of one policy are of one size
                later = jax.eval_shape(one, states[layer])
                host = host_bytes(policy, later)
                sizes[policy] = _nbytes([later]) - host, host
            size, host = sizes[policy]
            held = host_bytes(policy, states[layer]) if self.sealed else 0
            most, far = max(most, more + size), far + host - held
            more += size - (_nbytes([states[layer]]) - held)
        if more > 0 or far > 0:
            self._fits(most, far, "")
        self.decoding = self.decoding._replace(states=())
        try:
            for layer, one in make.items():
                states[layer] = one(states[layer])
        finally:  # also where someone stops it
            self.decoding = self.decoding._replace(states=tuple(states))

    def _check(self, tokens: int, held: int) -> None:
        """Raise UserError if a policy refuses so many tokens a row, or they do not fit."""
        if tokens > self._checked:
            caches, host = bytes_by_memory(self.policies, self.llm.spec, self._rows, tokens)
            if caches + host > held:
                self._fits(caches, host, f" of {tokens} tokens" if tokens else "")
                self._checked = tokens

    def _fits(self, caches: int, host: int, of: str) -> None:
        """Raise UserError where so many bytes of caches do not fit, or those in the memory of the
        host."""
        logits = 5 * self._rows * self.llm.config.vocab  # float32 logits and a bool a token
        mesh = self.llm.mesh
        # The devices of a CPU are one memory.
        apart = {} if mesh is None or jax.default_backend() == "cpu" else mesh.shape
        each = caches // math.prod(apart.values()) + logits // apart.get("data", 1)
        what = f"the caches of {self._rows} row(s){of}"
        if jax.default_backend() == "cpu":
            memory.check(each + host, what)
        else:
            memory.check(each, what)
            memory.check(host, what, host=True)


def _of_layer(keys: Array, layer: int) -> Array:
    return jax.vmap(jax.random.fold_in, (0, None))(keys, layer)


def _nbytes(states: Sequence[State]) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(states))


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
