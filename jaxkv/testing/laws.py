"""The laws of jaxkv/contract.py, each a function that yields its checks."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.contract import Chunk, Leaf
from jaxkv.errors import UserError
from jaxkv.rotary import Alibi
from jaxkv.state import batch
from jaxkv.testing.donation import states_can_be_donated
from jaxkv.testing.int8 import against_floats, in_int8, rows_are_rounded_once
from jaxkv.testing.structure import (
    bytes_equal_the_arrays,
    leaves_describe_the_state,
    the_members_exist,
    update_keeps_the_state,
)
from jaxkv.testing.subject import (
    BATCH,
    COMPILED,
    QUICK,
    SPEC,
    Checks,
    Subject,
    cached,
    close,
    compact,
    cut,
    dense,
    draw_tokens,
    finish_prefill,
    named_leaves,
    of_head,
    same_bits,
    same_shapes,
    take_sequences,
    update,
    widen,
)

ORDER = (2, 0, 1, 3)  # another order of the four sequences


def padding_changes_nothing(subject: Subject) -> Checks:
    policy, state = subject.policy, subject.after_prompt()
    for size in subject.sizes[:2]:
        new = subject.next(size)
        pad = widen(new._replace(valid=np.zeros_like(new.valid)), subject.width(size))
        (out, _), after = subject.step(state, pad)
        for (name, _, array), array_after in zip(
            named_leaves(policy, state), jax.tree.leaves(after), strict=True
        ):
            yield f"{size} tokens of padding change leaf {name}", same_bits(array, array_after)
        yield f"the output of {size} tokens of padding must be 0", not np.asarray(out).any()
    if subject.finishes:
        return  # the prompt of a padded sequence is shorter
    without = compact(subject.tokens)
    size = subject.sizes[1]
    padded, unpadded = subject.read(size), subject.read_tokens(without, size)
    yield "padding is cached", close(padded.states[-1], unpadded.states[-1])
    outs = padded.outs[subject.tokens.valid], unpadded.outs[without.valid]
    yield "padding changes outputs", close(*outs, subject.tolerance)
    yield "the output of padding must be 0", not padded.outs[~subject.tokens.valid].any()


def sequences_are_independent(subject: Subject) -> Checks:
    size, tokens = subject.sizes[-1], subject.tokens
    straight = subject.read(size)
    other_tokens = draw_tokens(subject.spec, subject.count, seed=1, dtype=tokens.q.dtype)
    for index in range(BATCH - 1):
        keep = np.arange(BATCH) == index
        mixed = tokens._replace(
            **{
                name: np.where(keep.reshape(-1, *[1] * (a.ndim - 1)), a, b)
                for name, a, b in zip(tokens._fields, tokens, other_tokens, strict=True)
            }
        )
        mixed_run = subject.read_tokens(mixed, size)
        equal = np.array_equal(mixed_run.outs[index], straight.outs[index])
        last_states = (batch.take(run.states[-1], [index]) for run in (mixed_run, straight))
        yield f"sequence {index} depends on the others", equal and same_bits(*last_states)
    permuted = take_sequences(tokens, ORDER), size, batch.take(subject.init(), ORDER)
    permuted_run = subject.read_tokens(*permuted)
    expected = batch.take(straight.states[-1], ORDER), straight.outs[[*ORDER]]
    yield (
        "another order of sequences gives other results",
        close((permuted_run.states[-1], permuted_run.outs), expected),
    )


def below_capacity_it_is_full_attention(subject: Subject) -> Checks:
    prompt = take_sequences(cut(subject.tokens, 0, subject.capacity), [0])
    expected = dense(subject.spec, prompt)[0]
    for size in (1, subject.sizes[-1]):
        actual = subject.read(size).outs[0, : subject.capacity].astype(np.float64)
        right = close(actual, expected, against_floats(subject))
        yield f"in chunks of {size} it is not full attention", right
    run, tokens = subject.read(1), subject.tokens
    for count, state in zip(run.counts, run.states, strict=True):
        if count > subject.capacity:
            break
        cache = cached(subject.policy, subject.spec, state)
        filled = np.asarray(cache.log_weight) > -np.inf
        for index in range(BATCH):
            written = tokens.positions[index, :count][tokens.valid[index, :count]]
            expected_positions = np.sort(written)
            for head in range(subject.spec.kv_heads):
                present = np.sort(np.asarray(cache.positions)[index, head][filled[index, head]])
                yield (
                    f"after {count} tokens `cached` must give positions {expected_positions}, got "
                    f"{present}",
                    np.array_equal(present, expected_positions),
                )


def logits_may_be_penalised_and_capped(subject: Subject) -> Checks:
    """Below capacity, with the default tokens. A policy may refuse such a spec in `init`."""
    if subject.spec != SPEC:
        return
    heads = SPEC.kv_heads * (SPEC.group or 1)
    spec = dataclasses.replace(SPEC, encoding=Alibi.of(heads), softcap=2.0)
    tokens = cut(subject.tokens, 0, subject.capacity)
    for size in (1, subject.capacity):
        try:
            state = subject.policy.init(spec, BATCH, jax.random.key(7))
        except UserError:
            return
        state, outs = subject.policy.reserve(spec, state, subject.capacity), []
        for at in range(0, subject.capacity, size):
            partial, state = update(subject.policy, spec, state, cut(tokens, at, at + size))
            outs.append(np.asarray(partial.out)[0])
        expected = dense(spec, take_sequences(tokens, [0]))[0]
        right = close(np.concatenate(outs).astype(np.float64), expected, against_floats(subject))
        hint = "under ALiBi and a softcap it is not full attention; use `masked_bias` and `softcap`"
        yield f"in chunks of {size}, {hint}", right


def chunking_changes_nothing(subject: Subject) -> Checks:
    by_token = subject.read(1)
    for size in subject.sizes[1:]:
        by_chunk = subject.read(size)
        for count in set(by_token.counts) & set(by_chunk.counts):
            first, second = (run.states[run.counts.index(count)] for run in (by_token, by_chunk))
            equal = subject.cached(first) == subject.cached(second)
            yield f"after {count} tokens, chunks of {size} and of 1 cache different tokens", equal
            if same_shapes(first, second):  # else one of them has reserved more
                failure = f"after {count} tokens, chunks of {size} and of 1 give different states"
                yield failure, close(first, second)
        right = close(by_chunk.outs, by_token.outs, subject.tolerance)
        yield f"chunks of {size} and of 1 give different outputs", right


def kv_heads_are_independent(subject: Subject) -> Checks:
    """What sharding over KV heads relies on: each head gives alone what it gives among others."""
    if subject.policy.heads_coupled:
        return
    policy, state, tokens = subject.policy, subject.after_prompt(), subject.next(1)
    (out, _), after = subject.step(state, tokens)
    alone, group = dataclasses.replace(subject.spec, kv_heads=1), tokens.q.shape[2]
    group //= subject.spec.kv_heads
    for head in range(subject.spec.kv_heads):
        q_slice, kv_slice = slice(group * head, group * (head + 1)), slice(head, head + 1)
        head_tokens = tokens._replace(
            q=tokens.q[:, :, q_slice], k=tokens.k[:, :, kv_slice], v=tokens.v[:, :, kv_slice]
        )
        actual, now = update(policy, alone, of_head(policy, state, head), head_tokens)
        expected = out[:, :, q_slice], of_head(policy, after, head)
        equal = close((actual.out, now), expected, subject.tolerance)
        yield f"KV head {head} depends on the others", equal


def sequences_can_be_moved(subject: Subject) -> Checks:
    state, order = subject.after_prompt(), [3, 1, 0, 2]
    mixed = batch.take(state, order)
    yield "taking and putting changes a state", same_bits(batch.put(mixed, order, mixed), state)
    with tempfile.TemporaryDirectory() as folder:
        batch.save(Path(folder) / "state", state)
        loaded = batch.load(Path(folder) / "state", jax.eval_shape(lambda: state))
    yield "saving and loading changes a state", same_bits(loaded, state)
    back = batch.to_device(batch.to_host(state))
    yield "the host changes a state", same_bits(back, state)
    new = subject.next(1)
    equal = same_bits(subject.step(state, new), subject.step(back, new))
    yield "a state from the host gives another output", equal


def equal_settings_compile_once(subject: Subject) -> Checks:
    spec, counts = subject.spec, []
    for policy in (subject.policy, dataclasses.replace(subject.policy)):
        yield "equal settings must hash alike", hash(policy) == hash(subject.policy)
        state = policy.reserve(spec, subject.init(), 3)
        for at in range(3):
            _, state = update(policy, spec, state, cut(subject.tokens, at, at + 1))
            counts.append(COMPILED[subject.policy, spec] + COMPILED[policy, spec])
    recompilations = counts[2] - counts[0]
    yield f"three tokens compile {recompilations + 1} times", not recompilations
    yield "equal settings compile twice", counts[5] == counts[2]
    if policy.program != policy:
        shared = dataclasses.replace(subject, policy=policy.program, runs={})
        size = subject.sizes[-1]
        run = shared.read_tokens(subject.tokens, size, subject.init())
        equal = same_bits(run[:2], subject.read(size)[:2])
        yield "`program` gives other bits than the policy itself", equal


def an_empty_state_gives_nothing(subject: Subject) -> Checks:
    new, empty = subject.next(1), subject.policy.reserve(subject.spec, subject.init(), 1)
    pad = new._replace(valid=np.zeros_like(new.valid))
    attended, after = subject.step(empty, pad)
    yield "an empty state gives an output", not np.asarray(attended.out).any()
    yield "its log-sum-exp must be -inf", bool((np.asarray(attended.lse) == -np.inf).all())
    yield "padding changes an empty state", same_bits(after, empty)
    yield "an empty state caches tokens", not any(map(any, subject.cached(empty)))
    attended, _ = subject.step(empty, new)
    group = new.q.shape[2] // subject.spec.kv_heads
    out, expected = attended.out[: BATCH - 1], np.repeat(new.v[: BATCH - 1], group, axis=2)
    equal = close(np.asarray(out), expected.astype(np.float32), against_floats(subject))
    yield "the output of the first token must be its value", equal


def shared_leaves_are_equal(subject: Subject) -> Checks:
    """Other keys and values at the same positions leave shared leaves as they are."""
    if not any_leaf(subject, lambda leaf: leaf.shared):
        return
    tokens, size = subject.tokens, subject.sizes[1]
    other_tokens = draw_tokens(subject.spec, subject.count, seed=1, dtype=tokens.q.dtype)
    other_tokens = other_tokens._replace(positions=tokens.positions, valid=tokens.valid)
    state = subject.read(size).states[-1]
    other_state = subject.read_tokens(other_tokens, size).states[-1]
    pairs = zip(named_leaves(subject.policy, state), jax.tree.leaves(other_state), strict=True)
    for (name, leaf, array), other_array in pairs:
        if leaf.shared:
            yield (
                f"leaf {name} is shared but depends on keys or values",
                same_bits(array, other_array),
            )


def append_only_leaves_stay(subject: Subject) -> Checks:
    """Until the end of prefill, token n stands in slot n, and empty slots are zero."""
    if not any_leaf(subject, lambda leaf: leaf.append_only):
        return
    run, tokens = subject.read(1), subject.tokens
    states = [s for s, count in zip(run.states, run.counts, strict=True) if count <= subject.prompt]
    last = named_leaves(subject.policy, states[-1])
    for seen, state in zip(run.counts, states, strict=False):
        for (name, leaf, array), (*_, latest) in zip(
            named_leaves(subject.policy, state), last, strict=True
        ):
            if not leaf.append_only:
                continue
            slots = leaf.letters.index("S")
            now, end = (np.moveaxis(np.asarray(a), slots, 1) for a in (array, latest))
            for sequence, valid in enumerate(tokens.valid[:, :seen]):
                count = valid.sum()
                equal = np.array_equal(now[sequence, :count], end[sequence, :count])
                yield f"leaf {name} is append-only but changes", equal
                yield f"leaf {name}: an empty slot is not zero", not now[sequence, count:].any()
                if leaf.axes == "B S":
                    positions = tokens.positions[sequence, :seen][valid]
                    right = np.array_equal(now[sequence, :count], positions)
                    yield f"leaf {name} must hold the positions", right


def pages_change_when_they_say(subject: Subject) -> Checks:
    """In the sequence without padding, at those tokens and at no other."""
    pages = next((x.page for x in jax.tree.leaves(subject.policy.leaves) if x.page), None)
    if pages is None:
        return
    run = subject.read(1)
    if run.counts != [*range(1, subject.count + 1)]:
        return  # too large to keep all states
    last = [0] * len(pages.last_write(0))
    states = zip(run.counts[1:], run.states, run.states[1:], strict=False)
    for seen, before, after in states:
        pairs = zip(named_leaves(subject.policy, before), jax.tree.leaves(after), strict=True)
        pairs = [(np.asarray(a)[0], np.asarray(b)[0]) for (_, leaf, a), b in pairs if leaf.page]
        for number in range(len(last)):
            first = pages.first + number * pages.size
            slots = slice(first, first + pages.size)
            if not all(np.array_equal(a[:, slots], b[:, slots]) for a, b in pairs):
                last[number] = seen
        said = tuple(pages.last_write(seen))
        yield (
            f"after {seen} tokens last_write must be {tuple(last)}, got {said}",
            said == tuple(last),
        )
    yield "a page is never written", all(last)


def finish_prefill_is_per_sequence(subject: Subject) -> Checks:
    policy, spec = subject.policy, subject.spec
    if not subject.finishes:
        return
    run = subject.read(1)
    state = run.states[run.counts.index(subject.prompt)]
    finished = finish_prefill(policy, spec, state)
    swapped = finish_prefill(policy, spec, batch.take(state, ORDER))
    same_structure = jax.tree.structure(finished) == jax.tree.structure(state)
    yield "finish_prefill changes the structure of the state", same_structure
    yield "a sequence depends on the others", same_bits(swapped, batch.take(finished, ORDER))
    reserved = policy.reserve(spec, finished, 1)
    attended, _ = subject.step(reserved, subject.next(1))
    yield "the next token has no finite output", bool(np.isfinite(np.asarray(attended.out)).all())


def it_caches_what_it_means(subject: Subject) -> Checks:
    if subject.cached_tokens is None:
        return
    count, run = subject.count, subject.read(1)
    seen = np.zeros((count, count), bool)
    means = [dict.fromkeys(sorted(subject.cached_tokens(at)), 0.0) for at in range(count)]
    for at, expected in enumerate(means):
        seen[at, list(expected)] = True
    for after, state in zip(run.counts, run.states, strict=True):
        at, actual = after - 1, subject.cached(state)[0]
        expected = means[at]
        failure = f"after token {at} the cache must have {[*expected]}, got {[*map(list, actual)]}"
        yield failure, actual == [expected] * subject.spec.kv_heads
    # A policy may attend before it evicts: then a query sees the tokens before it, and its own.
    before = np.eye(count, dtype=bool)
    before[1:] |= seen[:-1]
    text, outs = take_sequences(subject.tokens, [0]), run.outs[:1].astype(np.float64)
    right = any(close(outs, dense(subject.spec, text, mask), 1e-5) for mask in (seen, before))
    yield "the output is not attention to the cached tokens, by positions in the text", right


def gradients_exist(subject: Subject) -> Checks:
    size = subject.sizes[1]
    state, tokens = subject.after_prompt(), subject.next(size)
    weights = np.random.default_rng(9).normal(size=tokens.q.shape).astype(np.float32)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        rest = jnp.asarray(tokens.positions), jnp.asarray(tokens.valid)
        out, _ = jaxkv.step(subject.policy, subject.spec, state, q, k, v, *rest)
        return jnp.sum(out * weights)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), compiler_options=QUICK)
    gradients = gradient(*map(jnp.asarray, tokens[:3]))
    for name, leaf in zip("qkv", gradients, strict=True):
        leaf = np.asarray(leaf, np.float32)
        # One key has weight 1 whatever q and k are. A row in int8 passes no gradient to its token.
        needed = subject.capacity > 1 or name == "v"
        needed &= name == "q" or not in_int8(subject.policy)
        reached = (np.abs(leaf[: BATCH - 1]).sum(axis=(1, 2, 3)) > 0).all() or not needed
        yield f"{name} has no finite gradient", bool(np.isfinite(leaf).all() and reached)
        yield f"padding of {name} has a gradient", not leaf[BATCH - 1].any()


def gradients_pass_the_end_of_prefill(subject: Subject) -> Checks:
    if not subject.finishes:
        return
    policy, spec, count = subject.policy, subject.spec, subject.prompt
    arrays = Chunk(*map(jnp.asarray, subject.tokens))
    tokens, after = cut(arrays, 0, count), cut(arrays, count, count + 1)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        state = policy.reserve(spec, policy.init(spec, BATCH, jax.random.key(0)), count)
        _, state = policy.update(spec, state, tokens._replace(q=q, k=k, v=v))
        state = policy.reserve(spec, policy.finish_prefill(spec, state), 1)
        return jnp.sum(policy.update(spec, state, after)[0].out)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), compiler_options=QUICK)
    gradients = gradient(*tokens[:3])
    finite = all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in gradients)
    yield "the gradient through finish_prefill is not finite", finite


def any_leaf(subject: Subject, condition: Callable[[Leaf], bool]) -> bool:
    return any(map(condition, jax.tree.leaves(subject.policy.leaves)))


Law = Callable[[Subject], Checks]
LAWS: tuple[tuple[int, str, Law], ...] = (
    (1, "it has the members of the contract", the_members_exist),
    (11, "leaves describe every array", leaves_describe_the_state),
    (1, "update returns a state like the one before", update_keeps_the_state),
    (2, "padding changes no bit", padding_changes_nothing),
    (3, "the sequences of a batch are independent", sequences_are_independent),
    (4, "below capacity it is full attention", below_capacity_it_is_full_attention),
    (4, "logits may be penalised and capped", logits_may_be_penalised_and_capped),
    (5, "chunking changes nothing", chunking_changes_nothing),
    (6, "KV heads are independent", kv_heads_are_independent),
    (7, "sequences can be taken, put, saved and moved to the host", sequences_can_be_moved),
    (8, "equal settings compile once", equal_settings_compile_once),
    (9, "an empty state gives output 0", an_empty_state_gives_nothing),
    (10, "bytes equal bytes_per_sequence", bytes_equal_the_arrays),
    (11, "shared leaves are equal in all layers", shared_leaves_are_equal),
    (11, "append-only leaves stay", append_only_leaves_stay),
    (11, "pages change when they say", pages_change_when_they_say),
    (14, "finish_prefill treats sequences independently", finish_prefill_is_per_sequence),
    (15, "the cache has the tokens that it should", it_caches_what_it_means),
    (16, "gradients exist", gradients_exist),
    (16, "gradients pass the end of prefill", gradients_pass_the_end_of_prefill),
    (17, "rows in int8 are rounded once", rows_are_rounded_once),
    (19, "every state can be donated", states_can_be_donated),
)
