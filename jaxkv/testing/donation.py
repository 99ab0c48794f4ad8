"""Law 19: no two arrays of a state share a buffer, so every state can be donated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from jaxkv.contract import Chunk, Partial, Policy, Spec, State
from jaxkv.state import batch
from jaxkv.testing.subject import BATCH, QUICK, Checks, Subject, close


def states_can_be_donated(subject: Subject) -> Checks:
    """A step that donates its state gives the same output and state as one that does not."""
    states, new = list(_states(subject)), subject.next(1)
    for state_name, state in states:
        shared = shared_buffers(state)
        yield f"{state_name}: leaves {' and '.join(shared)} share a buffer", not shared
    for state_name, state in states[:1] + states[-1:]:
        expected = subject.step(state, new)
        actual = donating_update(subject.policy, subject.spec, state, new)
        yield (
            f"donating {state_name} gives another result",
            close(actual, expected, subject.tolerance),
        )
        kept = [name for name, leaf in _named(state) if leaf.size and not leaf.is_deleted()]
        yield f"{state_name}: a step copies leaves {', '.join(kept)} that it could reuse", not kept
        shared = shared_buffers(actual[1])
        yield f"a step makes leaves {' and '.join(shared)} share a buffer", not shared
        # A later state, which a donating step made.
        donating_update(subject.policy, subject.spec, actual[1], new)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2, compiler_options=QUICK)
def donating_update(
    policy: Policy, spec: Spec, state: State, chunk: Chunk
) -> tuple[Partial, State]:
    """`policy.update` in the memory of the state."""
    return policy.update(spec, state, chunk)


def shared_buffers(state: State) -> list[str]:
    """The names of the first leaves of a state that share a buffer."""
    names = defaultdict(list)
    for name, leaf in _named(state):
        # An array without elements has no address of its own, but must not be donated twice either.
        names[leaf.unsafe_buffer_pointer() if leaf.size else id(leaf)].append(name)
    return next((leaves for leaves in names.values() if len(leaves) > 1), [])


def _states(subject: Subject) -> Iterator[tuple[str, State]]:
    """The states of a sequence from `init` on, outside compiled code, as a caller makes them."""
    policy, spec = subject.policy, subject.spec
    yield "an initial state", policy.reserve(spec, subject.init(), 1)
    run = subject.read(1)
    state = run.states[run.counts.index(min(subject.prompt, subject.count))]
    yield "a state after update", state
    yield "a state from the host", batch.to_device(batch.to_host(state))
    state = jax.tree.map(jnp.copy, state)  # other laws read the states of the run after this one
    yield "a state of other sequences", batch.take(state, [*range(BATCH)])
    if subject.finishes:
        state = policy.finish_prefill(spec, state)
        yield "a state after finish_prefill", state
    yield "a state after the prompt", policy.reserve(spec, state, subject.count)


def _named(state: State) -> Iterator[tuple[str, jax.Array]]:
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    return ((jax.tree_util.keystr(path), leaf) for path, leaf in paths)
