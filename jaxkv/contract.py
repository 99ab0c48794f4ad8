"""What a cache policy is, and the laws it keeps.

A policy says what to remember of the keys and values a decoder has seen. It is a frozen
dataclass, so equal settings hash alike and share one compilation; its state is a NamedTuple of
arrays, passed in and returned, never kept anywhere else. Every function is pure.

    policy.init(spec, rows, key)        -> state
    policy.attend(spec, state, chunk)   -> Partial   everything in view: what is kept, and the
                                                     chunk itself, causally
    policy.extend(spec, state, chunk)   -> state     absorb the chunk
    policy.kept(spec, state)            -> Kept      which positions are held, with what weight
    policy.axes                         -> the state's shape in axis letters, leaf by leaf
    policy.formula                      -> bytes of one row of one layer, as an expression
and, where a method has them:
    policy.decode(spec, state, chunk)   -> Partial, state   one token, fused; the same result
    policy.take(spec, state, chunk)     -> Partial, state   the same of more tokens, where `attend`
                                                     must make what `extend` leaves
    policy.reserve(spec, state, tokens) -> state     make room for `tokens` in all, or refuse
    policy.seal(spec, state)            -> state     the prompt is complete
    policy.reach                        -> the most tokens back a query may look, counting its
                                           own; absent: no limit
    policy.least                        -> the fewest tokens of a prompt of which `seal` drops or
                                           indexes any
    policy.on_host                      -> names of leaves that lie in the memory of the host once
                                           the prompt is sealed, of a state in the state `far.k`
    policy.of_layer(layer, layers)      -> the policy of one layer, where layers differ
    policy.appends                      -> names of leaves in which, until the prompt is sealed, the
                                           token counted n stands in slot n and is never changed
    policy.settling                     -> Settling: slots that are rewritten seldom, in pages
    policy.settled(tokens)              -> after how many tokens each of those pages was last
                                           written, in a row of so many: it follows from that alone
    policy.shared                       -> names of leaves that follow from positions and valid
                                           alone, so equal in every layer of an equal policy; of a
                                           state in the state `recent.count`

`reserve` and `seal` may change the sizes of a state, never its structure (what exists only later
starts with size 0, so one `axes` serves); they are called between compiled calls, never inside a
loop. `reserve` counts tokens since `init` or, once sealed, since `seal`. Methods that compress or
index a finished prompt do it in `seal` and attend exactly before; methods that forget as they go
have none. Rows of one batch are brought to one size before they are sealed.

A policy that scores tokens by attention sets `needs_scores = True`; its `attend` then returns
(Partial, scores) and its `extend` receives `scores=`, in whatever shape the two agree on: the
driver only hands them over, and nobody else pays for it. What it keeps depends on the scores of
earlier queries, so law 5 is asked of it token by token only.

Per-token semantics are the definition: after any chunking a query sees what it would have seen
had the tokens come one at a time, the newest token among the kept. Only those that score may show
a larger chunk more keys, never fewer.

Randomness lives in the state: one uint32 key a row and kv head; a draw is a function of
(key, position), so it does not depend on chunking, neighbours in the batch, or devices.

The laws, run on every policy by tests/laws:
 1 eval_shape(extend) is the state.           2 valid=False changes no bit.
 3 rows are independent and permutable.       4 below capacity it equals full attention.
 5 the state does not depend on chunking.     6 sharded over K equals unsharded.
 7 take, put, host round trips are exact.     8 equal configs compile once, however many tokens.
 9 nothing seen: out 0, lse -inf, no NaN.    10 `decode` and `take` equal attend and extend.
11 bytes equal `formula`.                    12 an estimate called unbiased is unbiased.
13 protected slots survive adversarial keys. 14 `seal` touches nothing outside its row.
15 a plain-numpy oracle agrees at lengths 1 to 3 x capacity.
16 gradients exist where documented.         17 what is appended or settled stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from jaxkv.rotary import Encoding
from jaxkv.typing import Array, Bool, Float, Float32, UInt32

State = Any  # a NamedTuple of arrays; every leaf begins with B, none is a scalar


@dataclass(frozen=True)
class Spec:
    """How one layer of a model attends.

    scale: logits are q.k x scale. softcap: logits become softcap x tanh(logits / softcap).
    encoding: where tokens stand (jaxkv.rotary). dtype: of stored keys and values, by name.
    group: query heads that share a kv head, for policies that keep queries.
    """

    kv_heads: int
    head_dim: int
    scale: float
    encoding: Encoding
    softcap: float | None = None
    dtype: str = "float32"
    group: int | None = None


class Chunk(NamedTuple):
    """T new tokens: q, k after q/k norms and before rotation.

    positions count a row's tokens and may wrap, so they are compared by wrapping difference;
    valid is False on padding. Every number must be finite, padding's too: what is not in view has
    the weight 0, and 0 times NaN is NaN.
    """

    q: Float[Array, "B T N H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]
    positions: UInt32[Array, "B T"]
    valid: Bool[Array, "B T"]


class Partial(NamedTuple):
    """Attention over some of the keys: enough to be merged exactly with the rest.

    out: the softmax-weighted values. lse: the log of the sum of exponentials, -inf with out 0
    where no key was in view.
    """

    out: Float32[Array, "B T N H"]
    lse: Float32[Array, "B T N"]


class Kept(NamedTuple):
    """What a state holds: positions, and log importance weight (-inf: the slot is empty).

    Where numerator and denominator use different samples, the denominator's.
    """

    positions: UInt32[Array, "B K S"]
    log_weight: Float32[Array, "B K S"]


class Settling(NamedTuple):
    """Which slots of a state are rewritten seldom: those from `first` on of these leaves, a page of
    so many slots at a time. leaves: names, of a state in the state `sample.k`."""

    leaves: tuple[str, ...]
    first: int
    page: int


@runtime_checkable
class Policy(Protocol):
    """The members every policy has; see the module docstring for the optional ones."""

    @property
    def axes(self) -> State: ...

    @property
    def formula(self) -> str: ...

    def init(self, spec: Spec, rows: int, key: jax.Array) -> State: ...

    def attend(self, spec: Spec, state: State, chunk: Chunk) -> Partial: ...

    def extend(self, spec: Spec, state: State, chunk: Chunk) -> State: ...

    def kept(self, spec: Spec, state: State) -> Kept: ...


def is_letters(node: object) -> bool:
    """Whether this is the axis letters of one leaf, and not a state that holds such leaves."""
    return type(node) is tuple and all(isinstance(letter, str) for letter in node)
