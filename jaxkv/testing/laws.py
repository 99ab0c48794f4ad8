"""The laws of jaxkv/contract.py, each a function that yields its checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.contract import Chunk, Policy, State
from jaxkv.state import batch
from jaxkv.testing.subject import (
    BATCH,
    GROUP,
    QUICK,
    SPEC,
    Subject,
    close,
    cut,
    dense,
    draw_tokens,
    named_leaves,
    of_head,
    pad_between,
    same_bits,
    step,
)

Checks = Iterator[tuple[str, bool]]  # what is wrong, and whether the check passes


def update_keeps_the_state(subject: Subject) -> Checks:
    policy, chunk = subject.policy, cut(subject.tokens, 0, 3)
    yield "it lacks `update`", type(policy).update is not Policy.update
    state = policy.reserve(SPEC, subject.init(), 3)
    _, after = jax.eval_shape(lambda: policy.update(SPEC, state, chunk))
    before, after = (jax.tree_util.tree_flatten_with_path(s)[0] for s in (state, after))
    names = [[jax.tree_util.keystr(path) for path, _ in s] for s in (before, after)]
    yield (
        f"update must return a state with the arrays {', '.join(names[0])}, got "
        f"{', '.join(names[1])}",
        names[0] == names[1],
    )
    for (path, old), (_, new) in zip(before, after, strict=True):
        expected, found = (old.shape, old.dtype.name), (new.shape, new.dtype.name)
        name = jax.tree_util.keystr(path)
        yield f"update must return {name} as {expected}, got {found}", expected == found


def leaves_describe_the_state(subject: Subject) -> Checks:
    policy, state = subject.policy, subject.init()
    yield (
        f"leaves must be a {type(state).__name__}, got a {type(policy.leaves).__name__}",
        type(policy.leaves) is type(state),
    )
    arrays, leaves = len(jax.tree.leaves(state)), len(jax.tree.leaves(policy.leaves))
    yield f"leaves must describe {arrays} arrays, got {leaves}", arrays == leaves
    sizes = {"B": BATCH, "K": SPEC.kv_heads, "H": SPEC.head_dim, "G": GROUP}
    for name, leaf, array in named_leaves(policy, state):
        count = len(leaf.letters)
        yield f"leaf {name}: axes {leaf.axes!r} for {array.ndim} axes", count == array.ndim
        yield f"leaf {name}: axes must begin with B, got {leaf.axes!r}", leaf.letters[0] == "B"
        for letter, size in zip(leaf.letters, array.shape, strict=True):
            wanted = sizes.get(letter, size)
            yield f"leaf {name}: axis {letter} must be {wanted}, got {size}", size in (wanted, 0)


def shared_leaves_are_equal(subject: Subject) -> Checks:
    """Other keys and values at the same positions leave shared leaves as they are."""
    tokens = subject.tokens
    other = draw_tokens(tokens.q.shape[1], seed=1)
    (_, one), (_, two) = subject.read(tokens, 7), subject.read(other, 7)
    pairs = zip(named_leaves(subject.policy, one), jax.tree.leaves(two), strict=True)
    for (name, leaf, array), same in pairs:
        if leaf.shared:
            yield f"leaf {name} is shared but depends on keys or values", same_bits(array, same)


def append_only_leaves_stay(subject: Subject) -> Checks:
    """Token n stays in slot n, and empty slots are zero."""
    count = subject.capacity
    _, early = subject.read(cut(subject.tokens, 0, count), 7)
    early = subject.policy.reserve(SPEC, early, count + 3)
    _, late = step(subject.policy, early, subject.next(3)._replace(
        positions=jnp.broadcast_to(jnp.arange(count, count + 3, dtype=jnp.uint32), (BATCH, 3))
    ))  # fmt: skip
    pairs = zip(named_leaves(subject.policy, early), jax.tree.leaves(late), strict=True)
    for (name, leaf, array), after in pairs:
        if leaf.append_only:
            slots = leaf.letters.index("S")
            before, now = (np.moveaxis(np.asarray(a), slots, 0) for a in (array, after))
            yield f"leaf {name} is append-only but changes", same_bits(before[:count], now[:count])
            yield f"leaf {name}: an empty slot is not zero", not before[count:].any()


def padding_changes_nothing(subject: Subject) -> Checks:
    state = subject.full()
    for width in (1, 4):
        pad = subject.next(width)._replace(valid=jnp.zeros((BATCH, width), bool))
        out, after = step(subject.policy, state, pad)
        for (name, _, array), same in zip(
            named_leaves(subject.policy, state), jax.tree.leaves(after), strict=True
        ):
            yield f"{width} tokens of padding change leaf {name}", same_bits(array, same)
        yield f"the output of {width} tokens of padding must be 0", not np.asarray(out).any()
    out, state = subject.read(subject.tokens, 7)
    mixed = pad_between(subject.tokens)
    other, after = subject.read(mixed, 7)
    if not subject.scores_chunks:  # padding shifts the chunks
        yield "padding between tokens is cached", subject.cached(state) == subject.cached(after)
        yield "padding changes outputs", close(out, other[:, np.asarray(mixed.valid[0])])


def sequences_are_independent(subject: Subject) -> Checks:
    together, _ = subject.read(subject.tokens, 7)
    others = draw_tokens(subject.tokens.q.shape[1], seed=1)
    for index in range(BATCH):
        mixed = Chunk(
            *(b.at[index].set(a[index]) for a, b in zip(subject.tokens, others, strict=True))
        )
        found, _ = subject.read(mixed, 7)
        yield f"sequence {index} depends on the other", close(together[index], found[index])


def below_capacity_it_is_full_attention(subject: Subject) -> Checks:
    few = cut(subject.tokens, 0, subject.capacity)
    for size in (1, subject.capacity):
        out, _ = subject.read(few, size)
        yield f"in chunks of {size} it is not full attention", close(out, dense(few))


def chunking_changes_nothing(subject: Subject) -> Checks:
    if subject.scores_chunks:
        return
    out, state = subject.read(subject.tokens, 1)
    for size in (5, subject.capacity + 1, subject.tokens.q.shape[1]):
        other, after = subject.read(subject.tokens, size)
        equal = subject.cached(state) == subject.cached(after)
        yield f"chunks of {size} and of 1 cache different tokens", equal
        yield f"chunks of {size} and of 1 give different outputs", close(out, other)


def kv_heads_are_independent(subject: Subject) -> Checks:
    """What sharding over KV heads relies on: each head gives alone what it gives among others."""
    state, tokens = subject.full(), subject.next(3)
    out, after = step(subject.policy, state, tokens)
    alone = dataclasses.replace(SPEC, kv_heads=1)
    for head in range(SPEC.kv_heads):
        its, own = slice(GROUP * head, GROUP * (head + 1)), slice(head, head + 1)
        few = tokens._replace(q=tokens.q[:, :, its], k=tokens.k[:, :, own], v=tokens.v[:, :, own])
        found = step(subject.policy, of_head(subject.policy, state, head), few, alone)
        wanted = out[:, :, its], of_head(subject.policy, after, head)
        yield f"KV head {head} depends on the others", close(wanted, found)


def sequences_can_be_moved(subject: Subject) -> Checks:
    state = subject.full()
    swapped = batch.take(state, [1, 0])
    yield (
        "taking and putting changes a state",
        same_bits(batch.put(swapped, [1, 0], swapped), state),
    )
    yield "the host changes a state", same_bits(batch.to_device(batch.to_host(state)), state)


def equal_settings_compile_once(subject: Subject) -> Checks:
    traced = []

    @partial(jax.jit, static_argnums=0, compiler_options=QUICK)
    def counted(policy: Policy, state: State, tokens: Chunk) -> tuple[jax.Array, State]:
        traced.append(policy)
        return jaxkv.step(policy, SPEC, state, *tokens)

    for policy in (subject.policy, dataclasses.replace(subject.policy)):
        state = policy.reserve(SPEC, subject.init(), 3)
        for at in range(3):
            _, state = counted(policy, state, cut(subject.tokens, at, at + 1))
    yield f"two equal policies and three tokens compile {len(traced)} times", len(traced) == 1


def an_empty_state_gives_nothing(subject: Subject) -> Checks:
    pad = cut(subject.tokens, 0, 2)._replace(valid=jnp.zeros((BATCH, 2), bool))
    found, _ = subject.policy.update(SPEC, subject.policy.reserve(SPEC, subject.init(), 2), pad)
    yield "an empty state gives an output", not np.asarray(found.out).any()
    yield "its log-sum-exp must be -inf", bool((np.asarray(found.lse) == -np.inf).all())
    yield "an empty state caches tokens", not any(map(any, subject.cached(subject.init())))


def bytes_equal_the_arrays(subject: Subject) -> Checks:
    policy = subject.policy
    for tokens in (0, subject.capacity):
        state = jax.eval_shape(lambda tokens=tokens: policy.reserve(SPEC, subject.init(), tokens))
        found, said = batch.nbytes(state) // BATCH, policy.bytes_per_sequence(SPEC, tokens)
        yield (
            f"bytes_per_sequence(spec, {tokens}) must be {found}, as the arrays have; got {said}",
            found == said,
        )


def finish_prefill_is_per_sequence(subject: Subject) -> Checks:
    policy = subject.policy
    if policy.min_prompt is None:
        return
    _, state = subject.read(subject.tokens, 7)
    finished = policy.finish_prefill(SPEC, state)
    swapped = policy.finish_prefill(SPEC, batch.take(state, [1, 0]))
    same_structure = jax.tree.structure(finished) == jax.tree.structure(state)
    yield "finish_prefill changes the structure of the state", same_structure
    yield "a sequence depends on the other", close(swapped, batch.take(finished, [1, 0]))
    more = policy.reserve(SPEC, finished, 1)
    out, _ = step(policy, more, cut(subject.tokens, 0, 1))
    yield "the next token has no finite output", bool(np.isfinite(np.asarray(out)).all())


def it_caches_what_it_means(subject: Subject) -> Checks:
    if subject.cached_tokens is None:
        return
    count = subject.tokens.q.shape[1]
    state, outs = subject.policy.reserve(SPEC, subject.init(), count), []
    seen = np.zeros((count, count), bool)
    for at in range(count):
        out, state = step(subject.policy, state, cut(subject.tokens, at, at + 1))
        outs.append(out)
        wanted = sorted(subject.cached_tokens(at))
        seen[at, wanted] = True
        equal = subject.cached(state) == [[wanted] * SPEC.kv_heads] * BATCH
        yield f"after token {at} the cache must have {wanted}, got {subject.cached(state)}", equal
    found = np.concatenate(outs, axis=1)
    yield "the output is not attention to those tokens", close(found, dense(subject.tokens, seen))


def gradients_exist(subject: Subject) -> Checks:
    state, tokens = subject.full(), subject.next(3)
    valid = tokens.valid.at[:, -1].set(False)
    weights = np.random.default_rng(2).normal(size=tokens.q.shape).astype(np.float32)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out, _ = jaxkv.step(subject.policy, SPEC, state, q, k, v, tokens.positions, valid)
        return jnp.sum(out * weights)

    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), compiler_options=QUICK)(
        tokens.q, tokens.k, tokens.v
    )
    for name, gradient in zip("qkv", map(np.asarray, found), strict=True):
        needed = name == "v" or subject.capacity > 1  # one key has weight 1 whatever q and k are
        finite = np.isfinite(gradient).all() and (gradient.any() or not needed)
        yield f"{name} has no finite gradient", bool(finite)
        yield f"padding of {name} has a gradient", not gradient[:, -1].any()


Law = Callable[[Subject], Checks]
LAWS: tuple[tuple[int, str, Law], ...] = (
    (1, "update returns a state like the one before", update_keeps_the_state),
    (11, "leaves describe every array", leaves_describe_the_state),
    (2, "padding changes no bit", padding_changes_nothing),
    (3, "the sequences of a batch are independent", sequences_are_independent),
    (4, "below capacity it is full attention", below_capacity_it_is_full_attention),
    (5, "chunking changes nothing", chunking_changes_nothing),
    (6, "KV heads are independent", kv_heads_are_independent),
    (7, "sequences can be taken, put and moved to the host", sequences_can_be_moved),
    (8, "equal settings compile once", equal_settings_compile_once),
    (9, "an empty state gives output 0", an_empty_state_gives_nothing),
    (10, "bytes equal bytes_per_sequence", bytes_equal_the_arrays),
    (11, "shared leaves are equal in all layers", shared_leaves_are_equal),
    (11, "append-only leaves stay", append_only_leaves_stay),
    (14, "finish_prefill changes each sequence by itself", finish_prefill_is_per_sequence),
    (15, "the cache has the tokens that it should", it_caches_what_it_means),
    (16, "gradients exist", gradients_exist),
)
