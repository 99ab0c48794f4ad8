"""`Stream`: prefill of prompts in chunks, then decoding, in constant memory."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxkv import defaults
from jaxkv.contract import Policy, State
from jaxkv.errors import UserError, check_int, warn
from jaxkv.models.generation.decoding import (
    BLOCK,
    Decoding,
    Static,
    compiled_decode_block,
    finish_prefill_layer,
    init_layer,
    prefill_chunk,
    prefill_programs,
)
from jaxkv.models.loading.compilation import Ahead, clock
from jaxkv.models.loading.llm import Llm
from jaxkv.platform import gpu as xla_gpu
from jaxkv.policy_spec import bytes_by_memory, format_policy, host_bytes, max_lookback
from jaxkv.sampling import Sampling
from jaxkv.state import memory, sharding
from jaxkv.typing import Array, Bool, Int32

CHUNK = 1024  # largest prefill chunk, in tokens
ROOM = 1024  # tokens that growing caches reserve in advance, up to the final length of the text
PAUSE = 0.1  # target seconds between two blocks of tokens that a user sees


class Stream:
    """A batch of sequences with their cache states; `prefill` and `decode` extend them.

    llm, policy: the model and its cache policy. batch: the number of sequences, B. seed: one for
    all sequences or one per sequence; the draws of a sequence depend only on its own seed and
    positions. tokens: the final length of a sequence, if known; growing policies can then refuse
    it, and memory is checked, before anything is allocated. start: the position of the first
    token, up to 2^32 - 1.
    """

    def __init__(
        self,
        llm: Llm,
        policy: str | Policy | Sequence[Policy | str] = defaults.POLICY,
        batch: int = 1,
        seed: int | Sequence[int] = 0,
        tokens: int = 0,
        start: int = 0,
    ):
        self.llm = llm
        once = xla_gpu.carries_shared_once()
        self.static = Static(llm.config, llm.policies(policy), llm.mesh, once)
        self.lengths = np.full(batch, 0)  # tokens of each sequence, for policies that grow
        self.prefill_finished = False
        self.prompt_lengths = self.lengths
        self.limit = 1  # tokens of the next block of `decode_blocks`
        clock()
        if llm.mesh is not None:
            sharding.check(llm.mesh, batch, llm.config.kv_heads, self.policies)
        self._batch, self._final = batch, tokens
        self._checked = -1  # the longest length whose caches are known to fit
        self.ahead = Ahead()
        self._usable = True  # False if an interrupted prefill lost its donated states
        self._check_length(self._final, allocated=0)
        seeds = list(seed) if isinstance(seed, Sequence | np.ndarray) else [seed] * batch
        if not all(isinstance(s, Integral) for s in seeds):
            raise UserError(
                f"seed must be a whole number or one per sequence, got {seed!r}; give 0"
            )
        if len(seeds) != batch:
            raise UserError(
                f"give one seed, or one per sequence: got {len(seeds)} seeds for {batch} sequences"
            )
        if not all(0 <= s < 2**32 for s in seeds):
            raise UserError(f"a seed must be from 0 to {2**32 - 1}, got {seeds}; give 0")
        if not isinstance(start, Integral) or not 0 <= start < 2**32:
            raise UserError(f"start must be a whole number from 0 to {2**32 - 1}, got {start!r}")
        with self._memory_explained(()):
            self.decoding = self._begin(seeds, start)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policy of each layer."""
        return self.static.policies

    def _begin(self, seeds: Sequence[int], start: int) -> Decoding:
        llm, batch, vocab = self.llm, self._batch, self.llm.config.vocab
        # Policies and token sampling never share a random stream.
        rng = jnp.stack([jax.random.key(seed) for seed in seeds])
        token_rng, policy_rng = jnp.moveaxis(jax.vmap(jax.random.split)(rng), 1, 0)
        states = tuple(
            init_layer(policy, llm.specs[layer], llm.mesh, _rng_of_layer(policy_rng, layer))
            for layer, policy in enumerate(self.policies)
        )
        decoding = Decoding(
            states=(),
            logits=jnp.zeros((batch, vocab), jnp.float32),
            position=jnp.full((batch,), start, jnp.uint32),
            done=jnp.ones((batch,), bool),
            seen=jnp.zeros((batch, vocab), bool),
            rng=jax.random.key_data(token_rng),
        )
        if llm.mesh is not None:
            # The sharding that the compiled calls return; with another one they compile twice.
            by_sequence = PartitionSpec(*filter(None, sharding.axes_in(llm.mesh)[:1]))
            decoding = jax.device_put(decoding, NamedSharding(llm.mesh, by_sequence))
        return decoding._replace(states=states)

    @property
    def state_bytes(self) -> int:
        """Bytes of the cache states of all layers."""
        return _nbytes(self.decoding.states)

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        chunk: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Process prompts chunk by chunk and add their tokens to the caches.

        prompts: token ids, one list per sequence, of any lengths; an empty list leaves its
        sequence unchanged. chunk: tokens per chunk; None chooses by policy (`chunk_of`). It affects
        the speed, and results by rounding alone: of tokens whose scores are equal but for
        rounding, another may be evicted. progress: called with (tokens done, all tokens) of the
        longest prompt.
        Raises UserError for unknown token ids, or where the caches do not fit in memory.
        """
        batch, chunk = self._batch, self.chunk_of(chunk)
        if not isinstance(prompts, Sequence | np.ndarray | jax.Array):
            raise UserError(f"give a list of token ids per sequence, got {prompts!r:.60}")
        if len(prompts) != batch:
            raise UserError(
                f"give one list of tokens per sequence: got {len(prompts)} for {batch} sequences"
            )
        ids = list(map(self.llm.checked_ids, prompts))
        self.check_usable()
        before, done = self.lengths, np.zeros_like(self.lengths)
        counts = np.array(list(map(len, ids)))
        longest = int(counts.max())
        self.reserve(counts)
        self.ahead.wait("prefill")
        try:
            for start in range(0, longest, chunk):
                width = bucket(min(chunk, longest - start), chunk)
                tokens = np.zeros((batch, width), np.int32)
                valid = np.zeros((batch, width), bool)
                for entry, entry_ids in enumerate(ids):
                    part = entry_ids[start : start + chunk]
                    tokens[entry, : len(part)], valid[entry, : len(part)] = part, True
                decoding, self._usable = self.decoding, False  # its states are donated
                weights = self.llm.weights
                with self._memory_explained(decoding.states):
                    self.decoding = prefill_chunk(self.static, weights, decoding, tokens, valid)
                    self._usable, done = True, np.minimum(counts, start + chunk)
                    if progress is not None:  # report finished chunks, not dispatched ones
                        jax.block_until_ready(self.decoding.position)
                if progress is not None:
                    progress(min(start + chunk, longest), longest)
        finally:  # also after Ctrl-C
            self.lengths = before + done

    def check_usable(self) -> None:
        """Raise UserError where the caches are lost."""
        if not self._usable:
            raise UserError(
                "the caches of this stream are lost: a prefill was interrupted within a chunk, or "
                "the device had too little memory; make a new Stream"
            )

    def chunk_of(self, chosen: int | None) -> int:
        """Choose the prefill chunk, in tokens; raises UserError for a choice below 1.

        None chooses about the longest lookback of the policies: in a longer chunk most of the
        attention would be masked out.
        """
        if chosen is not None:
            check_int("chunk", chosen)
            return chosen
        farthest = min(max(map(max_lookback, self.policies)), CHUNK)
        return 1 << max(6, int(farthest).bit_length() - 1)

    def finish_prefill(self) -> None:
        """Let policies compress or index the prompt, which is complete; later calls do nothing."""
        compressing = [policy for policy in self.policies if policy.min_prompt is not None]
        if self.prefill_finished or not compressing:
            return
        warn_of_short_prompt(self.policies, int(self.lengths.min()))
        specs, mesh = self.llm.specs, self.llm.mesh
        self._replace_states(
            {
                layer: lambda state, policy=policy, spec=specs[layer]: finish_prefill_layer(
                    policy, spec=spec, mesh=mesh, state=state
                )
                for layer, policy in enumerate(self.static.programs)
                if policy.min_prompt is not None
            }
        )
        self.prefill_finished, self.prompt_lengths = True, self.lengths

    def compile_ahead(
        self, lengths: Sequence[int], sampling: Sampling, eos: tuple[int, ...]
    ) -> None:
        """Begin to compile prefill and `decode` in other threads; each waits for its programs.

        lengths: lengths of the prompts in tokens. The weights may still be shapes. Over a mesh
        nothing happens.
        """
        if self.llm.mesh is not None:
            return
        chunk = self.chunk_of(None)
        prompt, later = self.states_for(max(lengths))
        shapes = self.decoding._replace(states=later)
        arguments = self.decode_arguments(shapes, sampling, eos, BLOCK)
        self.ahead.compile("decode", compiled_decode_block(), *arguments)
        shapes = self.decoding._replace(states=prompt)
        for width in sorted({width for length in lengths for width in widths(length, chunk)}):
            for program, *of_program in prefill_programs(
                self.static, self.llm.weights, shapes, width
            ):
                self.ahead.compile("prefill", program, *of_program)

    def states_for(self, length: int) -> tuple[tuple[State, ...], tuple[State, ...]]:
        """The shapes of the caches during prefill of a first prompt, and when decoding begins."""

        def shapes(policy: Policy, state: State, tokens: int) -> State:
            if not policy.grows:
                return state
            return jax.eval_shape(partial(policy.reserve, self.llm.spec, tokens=tokens), state)

        prompt, later, final = [], [], self._room(length + 1)
        for policy, state in zip(self.policies, self.decoding.states, strict=True):
            prompt.append(shapes(policy, state, length))
            finished, after = policy.min_prompt is not None, prompt[-1]
            if finished:
                after = jax.eval_shape(partial(policy.finish_prefill, self.llm.spec), after)
            later.append(shapes(policy, after, final - length * finished))
        return tuple(prompt), tuple(later)

    def _room(self, tokens: int) -> int:
        """The length for which decoding reserves room: ROOM more, up to the final length."""
        return max(tokens, min(self._final, tokens + ROOM))

    def decode_arguments(
        self, decoding: Decoding, sampling: Sampling, eos: tuple[int, ...], limit: int
    ) -> tuple:
        """The arguments of `decode_block`."""
        weights, knobs = self.llm.weights, sampling.knobs
        return self.static, sampling.filters, eos, weights, decoding, knobs, np.int32(limit)

    def decode(
        self, sampling: Sampling, limit: int, eos: tuple[int, ...]
    ) -> tuple[Int32[np.ndarray, "B T"], Bool[np.ndarray, " B"]]:
        """Generate at most min(`limit`, BLOCK) tokens per sequence.

        Returns the new tokens, with -1 after the end of a sequence, and which sequences have ended.
        eos: token ids that end a sequence.
        Raises UserError where logits are not finite.
        """
        self.check_usable()
        limit, before = min(limit, BLOCK), self.lengths
        self.reserve(limit, self._room(int(before.max()) + limit))
        self.ahead.wait("decode")
        with self._memory_explained(self.decoding.states):
            self.decoding, out, count, finite = compiled_decode_block()(
                *self.decode_arguments(self.decoding, sampling, eos, limit)
            )
            finite = np.asarray(finite)
        if not finite.all():
            raise not_finite(self.llm)
        out = np.asarray(out)[:, : int(count)]
        self.lengths = before + (out >= 0).sum(axis=1)  # sequences that end early leave room
        return out, np.asarray(self.decoding.done)

    def decode_blocks(
        self, sampling: Sampling, tokens: int, eos: tuple[int, ...]
    ) -> Iterator[Int32[np.ndarray, "B T"]]:
        """Yield new tokens in blocks of about PAUSE seconds, until all sequences have ended."""
        while tokens > 0:
            start = time.perf_counter()
            compiled = clock().seconds
            block, done = self.decode(sampling, min(self.limit, tokens), eos)
            seconds = time.perf_counter() - start - (clock().seconds - compiled)
            tokens -= block.shape[1]
            yield block
            if done.all():
                return
            tokens_per_pause = max(1, int(block.shape[1] * PAUSE / max(seconds, 1e-6)))
            self.limit = min(BLOCK, tokens_per_pause, 4 * self.limit)

    def reserve(self, tokens: int | Int32[np.ndarray, " B"], room: int = 0) -> None:
        """Make room for `tokens` more in growing caches: one number, or one per sequence.

        room: reserve at least for sequences of this length, so that caches grow less often.
        """
        lengths = self.lengths + tokens
        grows = [layer for layer, policy in enumerate(self.policies) if policy.grows]
        if grows:
            # After `finish_prefill` a policy counts the tokens that follow the prompt.
            longest = max(int(lengths.max()), room)
            new_tokens = max(
                int((lengths - self.prompt_lengths).max()), room - int(self.prompt_lengths.max())
            )
            if not self.prefill_finished:
                self._check_length(int(lengths.max()), self.state_bytes)
            self._replace_states(
                {
                    layer: partial(
                        self.policies[layer].reserve,
                        self.llm.spec,
                        tokens=longest if self.policies[layer].min_prompt is None else new_tokens,
                    )
                    for layer in grows
                }
            )
        self.lengths = lengths  # only now: a refused request leaves the stream as it was

    def _replace_states(self, make: Mapping[int, Callable[[State], State]]) -> None:
        """Replace the states of some layers, one layer at a time.

        Only one layer has its old and its new state in memory at once.
        Raises UserError where they do not fit.
        """
        states, sizes, programs = list(self.decoding.states), {}, self.static.programs
        added_bytes = peak_bytes = added_host_bytes = 0
        for layer, make_state in make.items():
            policy = programs[layer]
            if policy not in sizes:  # layers of one program have one size
                later = jax.eval_shape(make_state, states[layer])
                host = host_bytes(policy, later)
                sizes[policy] = _nbytes([later]) - host, host
            size, host = sizes[policy]
            old_host = host_bytes(policy, states[layer]) if self.prefill_finished else 0
            peak_bytes = max(peak_bytes, added_bytes + size)
            added_host_bytes += host - old_host
            added_bytes += size - (_nbytes([states[layer]]) - old_host)
        if added_bytes > 0 or added_host_bytes > 0:
            self._check_memory(peak_bytes, added_host_bytes, "")
        self.decoding = self.decoding._replace(states=())
        try:
            with self._memory_explained(states):
                for layer, make_state in make.items():
                    states[layer] = make_state(states[layer])
        finally:  # also after Ctrl-C
            self.decoding = self.decoding._replace(states=tuple(states))

    @contextlib.contextmanager
    def _memory_explained(self, states: Sequence[State]) -> Iterator[None]:
        """Say what takes the memory, if the device has too little; the stream is then lost."""

        def uses() -> list[memory.MemoryUse]:
            self._usable = False  # a program may have taken its donated states
            caches, weights = map(sharding.bytes_per_device, (states, self.llm.weights))
            fewer = "--mesh model=N" if self.llm.weight_format else "--weights int8"
            return [
                memory.MemoryUse("weights", weights, f"{fewer}, or a smaller model"),
                memory.MemoryUse("caches", caches, f"fewer {memory.FEWER}"),
            ]

        with memory.explained(
            uses, "fewer sequences, a shorter prompt, or end other programs on the device"
        ):
            yield

    def _check_length(self, tokens: int, allocated: int) -> None:
        """Raise UserError where a policy refuses sequences of `tokens`, or memory is too small.

        allocated: bytes of the present caches.
        """
        if tokens > self._checked:
            caches, host = bytes_by_memory(self.policies, self.llm.spec, self._batch, tokens)
            if caches + host > allocated:
                self._check_memory(caches, host, f" of {tokens} tokens" if tokens else "")
                self._checked = tokens

    def _check_memory(self, caches: int, host: int, suffix: str) -> None:
        """Raise UserError where caches do not fit into device memory, or `host` into host memory.

        caches, host: bytes. suffix: completes the name of the caches in the message.
        """
        logits = 5 * self._batch * self.llm.config.vocab  # a float32 logit and a bool per token
        mesh = self.llm.mesh
        # The virtual devices of a CPU share one memory.
        split = {} if mesh is None or jax.default_backend() == "cpu" else mesh.shape
        device_bytes = (caches + self.llm.unloaded_bytes) // math.prod(split.values())
        device_bytes += logits // split.get("data", 1)
        name = f"the caches of {self._batch} sequence(s){suffix}"
        if jax.default_backend() == "cpu":
            memory.check(device_bytes + host, name)
        else:
            memory.check(device_bytes, name)
            memory.check(host, name, host=True)


def _rng_of_layer(rng: Array, layer: int) -> Array:
    return jax.vmap(jax.random.fold_in, (0, None))(rng, layer)


def _nbytes(states: Sequence[State]) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(states))


def not_finite(llm: Llm) -> UserError:
    """The error for logits that are not finite."""
    return UserError(
        "the model gives logits that are not finite numbers: some weights are not finite, or it "
        f"overflows {llm.dtype}; check the weights"
        + ("" if llm.dtype == "float32" else ", or load it with dtype float32")
    )


def bucket(tokens: int, chunk: int) -> int:
    """The padded length of a chunk: one of few, so that few programs are compiled."""
    sizes = (16, 64, 256, 1 << max(9, (tokens - 1).bit_length()))
    return min(chunk, next(size for size in sizes if tokens <= size))


def widths(tokens: int, chunk: int) -> list[int]:
    """The padded lengths of the chunks of so many tokens."""
    sizes = (bucket(min(chunk, tokens - at), chunk) for at in range(0, tokens, chunk))
    return list(dict.fromkeys(sizes))


def warn_of_short_prompt(policies: Sequence[Policy], tokens: int, noun: str = "prompt") -> None:
    """Warn where no layer compresses or indexes a prompt of so many tokens; layers may differ.

    noun: what has so many tokens.
    """
    sizes = [policy.min_prompt for policy in policies if policy.min_prompt is not None]
    if sizes and tokens < min(sizes):
        warn(
            f"{format_policy(policies)} needs a prompt of at least {min(sizes)} tokens, got a "
            f"{noun} of {tokens}: all its tokens stay in the cache; give a longer {noun}, or a "
            "policy with a smaller budget or window"
        )
