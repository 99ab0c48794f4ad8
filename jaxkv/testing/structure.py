"""Laws 1, 10 and 11 on the structure of a policy: members, state, leaves and bytes."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax

from jaxkv.contract import Cached, Chunk, Leaf, Partial, Policy, Spec
from jaxkv.state import batch
from jaxkv.testing.subject import BATCH, Checks, Subject, named_leaves, update


def the_members_exist(subject: Subject) -> Checks:
    kind = type(subject.policy)
    for name in ("init", "update", "cached", "leaves", "bytes_per_sequence"):
        yield f"it lacks `{name}`", getattr(kind, name) is not getattr(Policy, name)
    frozen = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen
    yield "it is not a frozen dataclass", frozen


def update_keeps_the_state(subject: Subject) -> Checks:
    policy, spec = subject.policy, subject.spec
    # `after_prompt` runs `update`, so it comes second.
    for begin in (subject.init, subject.after_prompt):
        state = policy.reserve(spec, begin(), subject.count)
        for size in (1, 3):
            chunk = subject.next(size)
            attended, after = update.eval_shape(policy, spec, state, chunk)
            yield from _partial_has_the_shapes(attended, chunk)
            old, new = (jax.tree_util.tree_flatten_with_path(s)[0] for s in (state, after))
            names = [[jax.tree_util.keystr(path) for path, _ in s] for s in (old, new)]
            yield (
                f"update must return a state with the arrays {', '.join(names[0])}, got "
                f"{', '.join(names[1]) or 'none'}",
                names[0] == names[1],
            )
            for (path, old_array), (_, new_array) in zip(old, new, strict=True):
                expected, actual = ((x.shape, x.dtype.name) for x in (old_array, new_array))
                name = jax.tree_util.keystr(path)
                yield f"update must return {name} as {expected}, got {actual}", expected == actual
        yield from _cached_has_the_shapes(jax.eval_shape(partial(policy.cached, spec), state), spec)


def _partial_has_the_shapes(attended: Partial, chunk: Chunk) -> Checks:
    kind = type(attended).__name__
    yield f"update must return a Partial and a state, got a {kind}", isinstance(attended, Partial)
    for name, letters in (("out", "[B,T,N,H]"), ("lse", "[B,T,N]")):
        array = getattr(attended, name)
        expected = chunk.q.shape[: letters.count(",") + 1], "float32"
        actual = array.shape, array.dtype.name
        yield f"update must return {name} {letters} as {expected}, got {actual}", actual == expected


def _cached_has_the_shapes(cache: Cached, spec: Spec) -> Checks:
    kind = type(cache).__name__
    yield f"cached must return a Cached, got a {kind}", isinstance(cache, Cached)
    shape = (BATCH, spec.kv_heads, cache.positions.shape[-1] if cache.positions.ndim else 0)
    for name, dtype in (("positions", "uint32"), ("log_weight", "float32")):
        array = getattr(cache, name)
        got, expected = (array.shape, array.dtype.name), (shape, dtype)
        yield f"cached must return {name} [B,K,S] as {expected}, got {got}", got == expected


def leaves_describe_the_state(subject: Subject) -> Checks:
    policy, spec, count = subject.policy, subject.spec, 5  # unlike K, H and G
    state = jax.eval_shape(lambda: subject.init(count))
    yield (
        f"leaves must be a {type(state).__name__}, got a {type(policy.leaves).__name__}",
        type(policy.leaves) is type(state),
    )
    wrong = [leaf for leaf in jax.tree.leaves(policy.leaves) if not isinstance(leaf, Leaf)]
    yield f"leaves must have a Leaf per array, got {wrong[:1]}", not wrong
    num_arrays, leaves = len(jax.tree.leaves(state)), len(jax.tree.leaves(policy.leaves))
    yield f"leaves must describe {num_arrays} arrays, got {leaves}", num_arrays == leaves
    sizes = {"B": count, "K": spec.kv_heads, "G": spec.group, "H": spec.head_dim}
    for name, leaf, array in named_leaves(policy, state):
        letters = leaf.letters
        yield (
            f"leaf {name}: axes {leaf.axes!r} for an array of {array.shape}; write one letter per "
            "axis, separated by spaces, the first of them B",
            len(letters) == array.ndim,
        )
        yield f"leaf {name}: axes must begin with B, got {leaf.axes!r}", letters[:1] == ("B",)
        yield (
            f"leaf {name}: T and N are axes of queries, not of a state, got {leaf.axes!r}; write K "
            "for KV heads, and another letter for others",
            not {"T", "N"} & set(letters),
        )
        for letter, size in zip(letters, array.shape, strict=True):
            expected = sizes.get(letter, size)
            yield (
                f"leaf {name}: axis {letter} must be {expected}, got {size}",
                size in (expected, 0),
            )


def bytes_equal_the_arrays(subject: Subject) -> Checks:
    policy, spec, count = subject.policy, subject.spec, 5
    for tokens in (0, subject.capacity):
        state = jax.eval_shape(lambda n=tokens: policy.reserve(spec, subject.init(count), n))
        actual, said = batch.nbytes(state) // count, policy.bytes_per_sequence(spec, tokens)
        yield (
            f"bytes_per_sequence(spec, {tokens}) must be {actual}, as the arrays have; got {said}",
            batch.nbytes(state) == count * said,
        )
    if not subject.finishes:
        return
    held = batch.nbytes(subject.after_prompt()) // BATCH
    said = policy.bytes_after_prefill(spec, subject.prompt, subject.count)
    yield f"bytes_after_prefill must be {held}, as the arrays have; got {said}", said == held
