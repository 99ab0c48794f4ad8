"""Laws 1 and 11 on the structure of a policy: its members, its state and its leaves."""

from __future__ import annotations

import dataclasses

import jax

from jaxkv.contract import Policy
from jaxkv.testing.subject import Checks, Subject, named_leaves, update


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
            _, after = update.eval_shape(policy, spec, state, subject.next(size))
            old, new = (jax.tree_util.tree_flatten_with_path(s)[0] for s in (state, after))
            names = [[jax.tree_util.keystr(path) for path, _ in s] for s in (old, new)]
            yield (
                f"update must return a state with the arrays {', '.join(names[0])}, got "
                f"{', '.join(names[1]) or 'none'}",
                names[0] == names[1],
            )
            for (path, one), (_, other) in zip(old, new, strict=True):
                expected, found = ((x.shape, x.dtype.name) for x in (one, other))
                name = jax.tree_util.keystr(path)
                yield f"update must return {name} as {expected}, got {found}", expected == found


def leaves_describe_the_state(subject: Subject) -> Checks:
    policy, spec, count = subject.policy, subject.spec, 5  # unlike K, H and G
    state = jax.eval_shape(lambda: subject.init(count))
    yield (
        f"leaves must be a {type(state).__name__}, got a {type(policy.leaves).__name__}",
        type(policy.leaves) is type(state),
    )
    made, leaves = len(jax.tree.leaves(state)), len(jax.tree.leaves(policy.leaves))
    yield f"leaves must describe {made} arrays, got {leaves}", made == leaves
    sizes = {"B": count, "K": spec.kv_heads, "G": spec.group, "H": spec.head_dim}
    for name, leaf, array in named_leaves(policy, state):
        letters = leaf.letters
        yield (
            f"leaf {name}: axes {leaf.axes!r} for {array.ndim} axes; separate letters by spaces",
            len(letters) == array.ndim,
        )
        yield f"leaf {name}: axes must begin with B, got {leaf.axes!r}", letters[0] == "B"
        yield (
            f"leaf {name}: T and N are axes of queries, not of a state, got {leaf.axes!r}; write K "
            "for KV heads, and another letter for others",
            not {"T", "N"} & set(letters),
        )
        for letter, size in zip(letters, array.shape, strict=True):
            wanted = sizes.get(letter, size)
            yield f"leaf {name}: axis {letter} must be {wanted}, got {size}", size in (wanted, 0)
