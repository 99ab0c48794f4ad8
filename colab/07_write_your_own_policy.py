# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/07_write_your_own_policy.ipynb)
#
# # Write your own policy
#
# A cache policy is one small class. This notebook defines a new policy in about ten lines. It checks
# the laws that every policy must satisfy, compares the policy with others, and uses it in a separate
# model in plain JAX. The third cell lists the devices on which this notebook has run and its run
# time on each.

# %% tags=["install"]
# %pip install -q "jaxkv[colab] @ git+https://github.com/jaxkv/jaxkv"

# %%
from jaxkv.colab import runtime

runtime.begin("07_write_your_own_policy")

# %% [markdown]
# ## The idea
#
# The policy caches all near tokens, but only one of every four far tokens. One token of every four
# is cached for long and the other three briefly, as in the strided heads of [Sparse
# Transformers](https://arxiv.org/abs/1904.10509). Far tokens then need a quarter of the slots, so
# the same number of slots covers more text. The state consists of two ring buffers. Every token goes
# to one of them.
#
# A policy is a frozen dataclass that subclasses `jaxkv.Policy`, with `init`, `update` and `cached`.
# It describes its state in `leaves`, one letter per axis, and its memory in `bytes_per_sequence`
# ([contract.py](https://github.com/jaxkv/jaxkv/blob/main/jaxkv/contract.py)). All functions are
# pure: they take a state and return a new one. The library provides the ring buffer
# ([ring.py](https://github.com/jaxkv/jaxkv/blob/main/jaxkv/cache/ring.py)).

# %%
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv.cache import ring


class Rings(NamedTuple):
    near: ring.Ring
    far: ring.Ring


# %%
@dataclass(frozen=True)
class Strided(jaxkv.Policy):
    """Of every `stride` tokens, cache the first for `far` strides and the others for `near`."""

    near: int = 4
    far: int = 20
    stride: int = 4  # a power of two, because positions wrap

    leaves = Rings(ring.LEAVES, ring.LEAVES)

    @property
    def slots(self):
        return self.near * (self.stride - 1), self.far

    def init(self, spec, batch, rng):
        return Rings(*(ring.init(spec, batch, size) for size in self.slots))

    def update(self, spec, state, chunk):
        is_far = chunk.positions % self.stride == 0
        shares = (~is_far, self.near * self.stride), (is_far, self.far * self.stride)
        seen = [attend(spec, *each, chunk) for each in zip(state, shares, strict=True)]
        own = [chunk._replace(valid=chunk.valid & mine) for mine, _ in shares]
        after = [ring.write(spec, *both) for both in zip(state, own, strict=True)]
        return jaxkv.merge(*seen), Rings(*after)

    def cached(self, spec, state):
        leaves = zip(*map(ring.cached, state), strict=True)
        return jaxkv.Cached(*(jnp.concatenate(both, axis=2) for both in leaves))

    def bytes_per_sequence(self, spec, tokens=0):
        return sum(ring.nbytes(spec, size) for size in self.slots)


# %% [markdown]
# One function is missing: attention to one ring. A query sees the tokens that were in the ring before
# this chunk, and the tokens of the chunk that belong to this ring. Each part is a `Partial`: an
# attention output with its log-sum-exp. `merge` combines the parts into the exact attention over all
# these tokens.


# %%
def attend(spec, cache, share, chunk):
    """Attention to a ring and to its own tokens of the chunk, fewer than `window` tokens back."""
    own, window = share
    before = ring.attend_ring(spec, cache, chunk, ring.RingSettings(window=window))
    return jaxkv.merge(before, jaxkv.local_attention(spec, chunk, window, hidden=~own))


# %% [markdown]
# ## Does it satisfy the laws?
#
# A model generates fluent text even if its cache has a small bug, so `jaxkv.testing` checks the laws
# of a policy. Law 15 compares the policy with its meaning in plain Python: a function that returns
# the tokens that are cached when query number `n` attends.

# %%
from jaxkv.testing import check_laws, table

small = Strided(near=2, far=5, stride=4)


def cached_tokens(n):
    return [t for t in range(n + 1) if n - t < small.stride * (small.near if t % 4 else small.far)]


capacity = small.near * small.stride  # up to here, no token is evicted
laws = check_laws(small, capacity, cached_tokens)
runtime.TextBox(table(laws))

# %% [markdown]
# In your own tests, call `check_policy(small)`, which raises an error if a law is broken. The laws
# that the table does not show concern features that this policy does not have: an estimate (12),
# protected slots (13), the end of prefill (14).
#
# The next cell checks a broken policy, which writes every token to both rings:


# %%
class Twice(Strided):
    def update(self, spec, state, chunk):
        partial, _ = super().update(spec, state, chunk)
        return partial, Rings(*(ring.write(spec, cache, chunk) for cache in state))


broken = check_laws(Twice(near=2, far=5, stride=4), capacity, cached_tokens)
runtime.TextBox(table(broken))

# %% [markdown]
# ## Comparison with other policies
#
# The next cells compare the policy with a `window` and a `streaming` cache of equally many slots, and
# with a window of the near part alone. The caches are small, because the choice of tokens then
# matters most. The model has not seen the text.

# %%
from jaxkv import models
from jaxkv.models import compare

MODEL = ""  # @param {type: "string"}
llm = models.load(MODEL) if MODEL else models.load()
slots_of_each = max(16, min(llm.config.context, 512) // 16)
near = slots_of_each // 8
own = Strided(near, slots_of_each - 3 * near, stride=4)

# %%
ids = runtime.passage(llm, runtime.size(12_000, 1_500))
full, window, short = "full", f"window:window={slots_of_each}", f"window:window={4 * near}"
POLICIES = [full, window, short, f"streaming:sinks=4,window={slots_of_each - 4}"]
scores = compare.compare(llm, ids, POLICIES, chunk=None, seed=0, watch=runtime.no_progress)
results = [compare.result(llm, name, scores[name], 500) for name in POLICIES]
results.append(compare.result(llm, "strided", models.score(llm, ids, own), 500, own))
print(f"{own} caches tokens from up to {own.stride * own.far} positions back")
runtime.TextBox(compare.table(results))

# %% tags=["picture"]
caption = "The Hound of the Baskervilles, mean of 500 tokens per point; full: see the table"
runtime.shrink(compare.draw(results[1:], llm.config.context, caption, dpi=80))

# %% [markdown]
# **What to see.** With the default model, the far tokens clearly lower the loss, compared with the
# near part alone. A plain window with equally many slots caches nearer tokens instead. Its loss is a
# little lower still, and it is faster, because it has one ring instead of two. Full attention caches
# every token, and its loss rises beyond the trained context.
#
# ## In your own model
#
# Any model can call `jaxkv.step` between its projections. The next cells define a decoder in plain
# JAX, with embedding, attention, MLP and logits. Its weights are random. Its arguments include a
# function `attend` and one state per layer.

# %%
from jaxkv.rotary import rotary

LAYERS, WIDTH, HEADS, KV_HEADS, DIM, VOCAB = 3, 64, 6, 3, 16, 256
SHAPES = {
    "q": (WIDTH, HEADS * DIM), "k": (WIDTH, KV_HEADS * DIM), "v": (WIDTH, KV_HEADS * DIM),
    "o": (HEADS * DIM, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH),
}  # fmt: skip
jax.config.update(
    "jax_default_matmul_precision", "highest"
)  # both ways to attend are compared below
spec = jaxkv.Spec(KV_HEADS, DIM, DIM**-0.5, rotary(DIM, 10_000.0))


# %%
def draw(key, shapes):
    keys = jax.random.split(key, len(shapes))
    return {n: jax.random.normal(k, s) / s[0] ** 0.5
            for k, (n, s) in zip(keys, shapes.items(), strict=True)}  # fmt: skip


layers = [draw(key, SHAPES) for key in jax.random.split(jax.random.key(1), LAYERS)]
embedding = jax.random.normal(jax.random.key(2), (VOCAB, WIDTH))


# %%
def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


# %%
def decode(attend, states, tokens, positions):
    """Logits of tokens [B,T], and the states after them."""
    x, after = embedding[tokens], []
    for w, state in zip(layers, states, strict=True):
        q, k, v = ((norm(x) @ w[n]).reshape(*tokens.shape, -1, DIM) for n in "qkv")
        out, state = attend(state, q, k, v, positions)
        x = x + out.reshape(*tokens.shape, -1) @ w["o"]
        x, after = x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], [*after, state]
    return norm(x) @ embedding.T, tuple(after)


# %% [markdown]
# The next cell defines two functions `attend`: `jaxkv.step` with the new policy, and JAX's own
# attention, which caches nothing and needs the whole text.

# %%
policy = Strided(near=8, far=40, stride=4)


def attend_cached(state, q, k, v, positions):
    valid = jnp.ones(positions.shape, bool)
    return jaxkv.step(policy, spec, state, q, k, v, positions, valid)


def dense(state, q, k, v, positions):
    q, k = (spec.encoding.rotate(x, positions) for x in (q, k))
    out = jax.nn.dot_product_attention(q, k, v, scale=spec.scale, is_causal=True)
    return out, state


# %% [markdown]
# Each token is sampled from the logits of the token before it. The states are ordinary arrays in the
# carry of `jax.lax.scan`.

# %%
from jaxkv.state import batch


def write(carry, position):
    states, token = carry
    logits, states = decode(attend_cached, states, token[None, None], position[None, None])
    new = jax.random.categorical(jax.random.fold_in(jax.random.key(3), position), logits[0, 0])
    return (states, new), (token, logits[0, 0])


# %%
states = tuple(policy.init(spec, batch=1, rng=jax.random.key(0)) for _ in range(LAYERS))
before = batch.nbytes(states)
count = runtime.size(2_000, 500)
(states, _), (text, logits) = jax.jit(lambda first: jax.lax.scan(
    write, first, jnp.arange(count, dtype=jnp.uint32)))((states, jnp.int32(0)))  # fmt: skip
print(f"{count:,} tokens; the cache has {batch.nbytes(states):,} bytes, {before:,} at the start")

# %% [markdown]
# As long as no token is evicted, the logits must equal those of dense attention. After that they
# differ.

# %%
most = policy.near * policy.stride
where = jnp.arange(2 * most, dtype=jnp.uint32)[None]
plain, _ = jax.jit(decode, static_argnums=0)(dense, (None,) * LAYERS, text[None, : 2 * most], where)
difference = jnp.abs(plain[0] - logits[: 2 * most]).max(axis=1)
print(f"largest difference of logits: {difference[:most].max():.1e} up to token {most}, "
      f"{difference[most:].max():.1e} in the next {most}")  # fmt: skip

# %% [markdown]
# ## Next steps
#
# To add the policy to the library, put the class into `jaxkv/policies/strided.py`, with `summary`,
# `source`, `use_for`, `avoid_for` and `bytes_formula` for `jaxkv policies` and docs/policies.md. Add
# one line to `jaxkv/policies/__init__.py`, so that `--policy strided:near=16` finds the policy, and
# one line to `tests/laws/cases.py`. The tests then check all laws, also in other dtypes, with other
# position encodings and sharded over several devices. A policy that scores tokens by attention does
# so inside `update`. A growing policy overrides `reserve`. A policy that compresses a finished prompt
# overrides `finish_prefill`.
#
# The next cell checks these results and fails if one of them does not hold.

# %% cellView="form" jupyter={"source_hidden": true}
# @title Checks
import numpy as np

failed = {result.number for result in broken if not result.holds}
loss = {row["policy"]: row["loss"] for row in results}
size = {row["policy"]: row["state_bytes"] for row in results}
rate = {row["policy"]: row["tokens_per_second"] for row in results}
runtime.verify(
    MODEL,
    always={
        "the policy satisfies every law that applies to it":
            {law.number for law in laws if law.holds} == {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 15, 16}
            and all(law.holds for law in laws),
        "the broken policy fails laws 4, 15 and others": failed > {4, 15},
        "the window of equal size has as many bytes, within 1 %":
            abs(size["strided"] / size[window] - 1) < 0.01,
        "the model in plain JAX generates in constant memory": batch.nbytes(states) == before,
        "its logits equal those of dense attention until tokens are evicted, within 0.001":
            bool(difference[:most].max() < 1e-3),
        "after that they differ": bool(difference[most:].max() > 0.01),
        "all logits are finite": bool(np.isfinite(logits).all()),
    },
    ours={
        "far tokens help: the loss is more than 0.02 below that of the near part alone":
            loss["strided"] < loss[short] - 0.02,
        "nearer tokens help a little more: a window of equal size is better by 0 to 0.06":
            loss[window] < loss["strided"] < loss[window] + 0.06,
        "full attention fails: its loss is more than 0.3 above that of the window":
            loss[full] > loss[window] + 0.3,
    },
    times={"a window is faster": rate[window] > rate["strided"]},
)  # fmt: skip
