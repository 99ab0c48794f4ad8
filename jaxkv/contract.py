"""The cache-policy contract: a pair of pure functions on a state, as in optax.

A policy decides which keys and values of a decoder layer stay in memory. It is a frozen dataclass:
equal settings hash alike and share one compilation. Its state is a NamedTuple of arrays that the
caller passes in and gets back; each array begins with the batch axis B.

    policy.init(spec, batch, rng)          -> state
    policy.update(spec, state, chunk)      -> Partial, state
    policy.cached(spec, state)             -> Cached
    policy.leaves                          -> the state's structure, a `Leaf` in place of each array
    policy.bytes_per_sequence(spec, n)     -> int

Methods that grow or that compress a finished prompt override the defaults of `Policy`:

    policy.reserve(spec, state, tokens)    -> state with room for `tokens` tokens in all
    policy.finish_prefill(spec, state)     -> state after compressing or indexing the prompt
    policy.for_layer(layer, num_layers)    -> the policy of one layer, where budgets differ
    policy.program                         -> the policy that layers with equal programs share

`update` attends to the cache and to the chunk, causally, and absorbs the chunk. It is the only way
in: a prompt chunk and a single token take the same call. Per-token semantics define the result:
after any chunking, a query sees what it would have seen token by token.

`reserve` and `finish_prefill` may change the sizes of a state but never its structure: an array
that exists only later starts with size 0. They run between compiled calls. `reserve` counts tokens
since `init`; for policies with `min_prompt`, after `finish_prefill`, since that call. All sequences
of a batch are reserved to one size before `finish_prefill`.

Randomness lives in the state. A draw is a function of the sequence's seed and of the token's
position or ordinal number, so it does not depend on chunking, on other sequences of the batch, or
on devices.

The laws. `jaxkv.testing` checks them on any policy. `check_policy` runs every law that applies.
Laws 12, 13 and 18 need more arguments: use `check_unbiased`, `check_protected` and `check_wrap`.
Law 15 needs the argument `cached_tokens`. tests/core/laws checks every policy of this package.

 1 `update` returns a state of the same structure, shapes and dtypes.
 2 Padding (valid=False) changes no bit of the state and gives output 0.
 3 The sequences of a batch are independent.
 4 Below capacity the output is full attention, also under ALiBi and a cap on logits.
 5 The state and the output do not depend on chunking.
 6 The KV heads are independent, so a step can be sharded over them, unless they share a budget or
   an array.
 7 Taking, putting, saving and moving sequences to the host is exact.
 8 Equal settings share compiled programs: another token of the same shapes compiles nothing. After
   `init`, `program` gives the same bits as the policy itself.
 9 An empty state gives output 0 and log-sum-exp -inf, and never NaN.
10 The bytes of the arrays equal `bytes_per_sequence`, and `bytes_after_prefill` later.
11 `leaves` describes every array: axis letters, shared leaves, append-only leaves, pages.
12 An estimate that is called unbiased is unbiased.
13 Sinks and window tokens stay cached whatever the keys are.
14 `finish_prefill` treats the sequences of a batch independently.
15 A plain-numpy oracle agrees at one to three times the capacity.
16 `update` has finite gradients in q, k and v. The choice of tokens has none, and int8 rows pass
   none on.
17 A key or value that is stored in int8 differs from the exact one by at most half of its row's
   scale, also after the row was moved to other slots.
18 The output does not depend on where positions begin, also where they wrap at 2^32. Policies whose
   draws depend on positions, or that round rotated keys, are exempt.
19 No two arrays of a state share a buffer, so every state can be donated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.errors import UserError, check_choice, check_int, check_positive
from jaxkv.rotary import Encoding
from jaxkv.typing import Array, Bool, Float, Float32, UInt32

DTYPES = ("float32", "bfloat16", "float16")  # of weights, and of stored keys and values
State = Any  # a NamedTuple of arrays, possibly nested; every array begins with B


@dataclass(frozen=True)
class Spec:
    """How one layer of a model attends.

    kv_heads: K. head_dim: H. scale: logits are q.k x scale. encoding: positions (jaxkv.rotary).
    softcap: logits become softcap x tanh(logits / softcap). dtype: of stored keys and values, by
    name. group: query heads per KV head, for policies that store queries.
    """

    kv_heads: int
    head_dim: int
    scale: float
    encoding: Encoding
    softcap: float | None = None
    dtype: str = "float32"
    group: int | None = None

    def __post_init__(self) -> None:
        check_int("kv_heads", self.kv_heads)
        check_int("head_dim", self.head_dim)
        if self.group is not None:
            check_int("group", self.group)
        check_positive("scale", self.scale, "try head_dim**-0.5")
        if self.softcap is not None:
            check_positive("softcap", self.softcap, "give None for none")
        if not isinstance(self.dtype, str):  # a dtype, such as jnp.float32
            object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
        check_choice("dtype", self.dtype, DTYPES)
        if not isinstance(self.encoding, Encoding):
            raise UserError(
                "encoding must be of jaxkv.rotary: rotary(head_dim, theta), Alibi.of(heads) or "
                f"NoPosition(), got {self.encoding!r}"
            )

    @property
    def kv_bytes(self) -> int:
        """Bytes of one key and one value of one KV head."""
        return 2 * self.head_dim * jnp.dtype(self.dtype).itemsize


class Chunk(NamedTuple):
    """T new tokens. q and k are projected and normalised, before rotation.

    positions: the index of each token in its sequence; they may wrap, so policies compare them by
    wrapping difference. valid: False on padding. Every number must be finite, on padding too:
    masked keys get weight 0, and 0 times NaN is NaN.
    """

    q: Float[Array, "B T N H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]
    positions: UInt32[Array, "B T"]
    valid: Bool[Array, "B T"]


class Partial(NamedTuple):
    """Attention over some of the keys, which merges exactly with attention over the others.

    out: the softmax-weighted values. lse: the log of the sum of exponentials; -inf, with out 0,
    where a query sees no key.
    """

    out: Float32[Array, "B T N H"]
    lse: Float32[Array, "B T N"]


class Cached(NamedTuple):
    """The stored tokens: positions and log importance weights, -inf for empty slots."""

    positions: UInt32[Array, "B K S"]
    log_weight: Float32[Array, "B K S"]


@dataclass(frozen=True)
class Pages:
    """Slots that are rewritten seldom, in pages of `size` slots from slot `first` on.

    last_write: maps a number of tokens seen to the number after which each page was last written.
    """

    first: int
    size: int
    last_write: Callable[[int], tuple[int, ...]]


@dataclass(frozen=True)
class Leaf:
    """Facts about one array of a state.

    axes: one letter per axis, as in "B K S H". shared: equal in all layers that have this policy,
    because it follows from positions and valid alone. append_only: until the end of prefill, token
    n stands in slot n and never changes. page: slots that are rewritten seldom. location: where the
    array is after `finish_prefill`.
    """

    axes: str
    shared: bool = False
    append_only: bool = False
    page: Pages | None = None
    location: Literal["device", "host"] = "device"

    @property
    def letters(self) -> tuple[str, ...]:
        return tuple(self.axes.split())


class Policy:
    """What every policy inherits: the defaults of a method that neither grows nor compresses.

    max_lookback: how many tokens back a query may look, its own included. min_prompt: the shortest
    prompt on which `finish_prefill` acts; None if it does nothing. grows: whether the cache grows
    with the tokens, so that the caller must `reserve`. heads_coupled: whether the KV heads of a
    layer share one budget or one array, so that they cannot be split over devices.

    `jaxkv policies` prints `summary`, which says what is cached, and `source`, the paper.
    """

    max_lookback: int | float = math.inf
    min_prompt: int | None = None
    grows: bool = False
    heads_coupled: bool = False
    summary: ClassVar[str] = ""
    source: ClassVar[str] = ""

    def init(self, spec: Spec, batch: int, rng: jax.Array) -> State:
        """An empty state for `batch` sequences.

        rng: a key of JAX. Policies with seeds in their state check it; the others ignore it.
        """
        raise missing(self, "init")

    def update(self, spec: Spec, state: State, chunk: Chunk) -> tuple[Partial, State]:
        """Attend to the cache and the chunk, causally; the output, and the state with the chunk."""
        raise missing(self, "update")

    def cached(self, spec: Spec, state: State) -> Cached:
        """The tokens that the state stores."""
        raise missing(self, "cached")

    @property
    def leaves(self) -> State:
        """The state's structure, with a `Leaf` in place of each array."""
        raise missing(self, "leaves")

    def bytes_per_sequence(self, spec: Spec, tokens: int = 0) -> int:
        """Bytes of one sequence in one layer, before `finish_prefill`, with room for `tokens`."""
        raise missing(self, "bytes_per_sequence")

    def bytes_after_prefill(self, spec: Spec, prompt: int, tokens: int = 0) -> int:
        """Bytes of one sequence in one layer after `finish_prefill`, on the device and the host.

        prompt, tokens: those that `reserve` made room for before and after `finish_prefill`.
        Computed from shapes; nothing is allocated.
        """
        if self.min_prompt is None:
            return self.bytes_per_sequence(spec, prompt + tokens)

        return nbytes(shapes_after_prefill(self, spec, prompt, tokens))

    def reserve(self, spec: Spec, state: State, tokens: int) -> State:
        """The state with room for `tokens` tokens in all; raises UserError beyond a maximum."""
        return state

    def finish_prefill(self, spec: Spec, state: State) -> State:
        """The state after the prompt is complete; called once."""
        return state

    def for_layer(self, layer: int, num_layers: int) -> Policy:
        """The policy of one of `num_layers` layers."""
        return self

    @property
    def program(self) -> Policy:
        """The policy to compile after `init`, with the same results: layers of one share programs.

        It lacks what `init` puts into a state, such as the budgets of the layer's KV heads. So its
        own `init` gives the shapes alone, and a cache that begins there ends in NaN.
        """
        return self


def nbytes(state: State) -> int:
    """The bytes of the arrays of a state, or of their shapes."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(state))


def shapes_of_prompt(policy: Policy, spec: Spec, tokens: int) -> State:
    """The shapes of the state of one sequence with room for `tokens`, before `finish_prefill`."""
    return jax.eval_shape(
        lambda: policy.reserve(spec, policy.init(spec, 1, jax.random.key(0)), tokens)
    )


def shapes_after_prefill(policy: Policy, spec: Spec, prompt: int, tokens: int = 0) -> State:
    """The shapes of the state of one sequence after `finish_prefill`, as `bytes_after_prefill`."""

    def build() -> State:
        state = policy.reserve(spec, policy.init(spec, 1, jax.random.key(0)), prompt)
        return policy.reserve(spec, policy.finish_prefill(spec, state), tokens)

    return jax.eval_shape(build)


def missing(policy: Policy, member: str) -> NotImplementedError:
    """The error of a policy that does not define a member."""
    return NotImplementedError(
        f"{type(policy).__name__} must define {member}; docs/integration.md shows a whole policy"
    )


def prefill_finished(state: State) -> bool:
    """Whether `finish_prefill` made this state, which has `prompt_slots`.

    state.prompt_slots: 0 before it, then the slots of the prompt, compressed or not. It is the size
    of an array, because `reserve` sees only shapes.
    """
    return state.prompt_slots > 0


def check_prefill_unfinished(state: State) -> None:
    """Raise UserError if prefill is finished: finishing it twice would lose tokens."""
    if prefill_finished(state):
        raise UserError(
            "this state's prefill is finished already; call finish_prefill once per state"
        )
