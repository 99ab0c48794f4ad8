"""Random tokens, what a policy computes of them, and what it caches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.contract import Chunk


def chunk(spec, tokens, first=0, *, rng=0, batch=1, valid=None):
    """Tokens from position `first` on. rng: or a seed. valid [B,T]: False on padding."""
    rng = np.random.default_rng(rng)
    valid = np.ones((batch, tokens), bool) if valid is None else valid
    heads = spec.kv_heads * (spec.group or 1), spec.kv_heads, spec.kv_heads
    q, k, v = (rng.normal(size=(*valid.shape, n, spec.head_dim)).astype("f4") for n in heads)
    positions = (first + np.cumsum(valid, axis=1) - 1).astype(np.uint32)
    return Chunk(*map(jnp.asarray, (q, k, v, positions, valid)))


def cut(tokens, start, end=None):
    """Those from `start` to `end`."""
    return Chunk(*(leaf[:, start:end] for leaf in tokens))


def run(policy, spec, tokens, size=None):
    """The outputs [B,T,N,H] of a prompt in chunks of `size` tokens, and the state after each."""
    batch, count = tokens.valid.shape
    update = jax.jit(lambda state, tokens: policy.update(spec, state, tokens))
    state = policy.reserve(spec, policy.init(spec, batch, jax.random.key(0)), count)
    outs, states = [], []
    for at in range(0, count, size or count):
        partial, state = update(state, cut(tokens, at, at + (size or count)))
        outs.append(partial.out)
        states.append(state)
    return np.concatenate(outs, axis=1), states


def state_after(*arguments):
    """The last state of `run`."""
    return run(*arguments)[1][-1]


def cached(policy, spec, state):
    """The positions that each sequence and KV head caches, once prefill has finished."""
    positions, weight = map(np.asarray, policy.cached(spec, policy.finish_prefill(spec, state)))
    return [
        [set(p[w > -np.inf].tolist()) for p, w in zip(*heads, strict=True)]
        for heads in zip(positions, weight, strict=True)
    ]
