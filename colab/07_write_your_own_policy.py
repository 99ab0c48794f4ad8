# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/07_write_your_own_policy.ipynb)
#
# # Write your own policy
#
# A cache policy is one small class. This notebook writes one that the library does not have, in about
# ten lines. It checks the policy by the laws that every policy keeps, compares it with others, and
# uses it in a model that is not ours. The third cell says where the notebook has run, and how long it
# took.

# %% tags=["install"]
# %pip install -q "jaxkv[colab] @ git+https://github.com/jaxkv/jaxkv"

# %%
from jaxkv.colab import runtime

runtime.begin("07_write_your_own_policy")

# %% [markdown]
# ## The idea
#
# Keep near tokens all and far tokens sparsely: of every four tokens, cache one for long and the others
# briefly, as the strided heads of [Sparse Transformers](https://arxiv.org/abs/1904.10509) do. Far
# tokens then cost a quarter, so as many slots reach further back. The state is two rings, and every
# token goes to one of them.
#
# A policy is a frozen dataclass that subclasses `jaxkv.Policy`, with `init`, `update` and `cached`. It
# describes its state in `leaves`, one letter per axis, and its memory in `bytes_per_sequence`
# ([contract.py](https://github.com/jaxkv/jaxkv/blob/main/jaxkv/contract.py)). All functions are pure:
# a state goes in, another comes out. A ring is a part of the library
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
        after = [ring.write(spec, *both, sinks=0) for both in zip(state, own, strict=True)]
        return jaxkv.merge(*seen), Rings(*after)

    def cached(self, spec, state):
        leaves = zip(*map(ring.cached, state), strict=True)
        return jaxkv.Cached(*(jnp.concatenate(both, axis=2) for both in leaves))

    def bytes_per_sequence(self, spec, tokens=0):
        return sum(ring.nbytes(spec, size) for size in self.slots)


# %% [markdown]
# One function is left: attention to one ring. A query sees the tokens that the ring had before this
# chunk, and the ring's own tokens of the chunk. Each part is a `Partial`, attention with its
# log-sum-exp, so `merge` gives exactly what attention to all these tokens at once would give.


# %%
def attend(spec, cache, share, chunk):
    """Attention to a ring and to its own tokens of the chunk, less than `reach` tokens back."""
    own, reach = share
    before = ring.attend_ring(spec, cache, chunk, sinks=0, window=reach)
    return jaxkv.merge(before, jaxkv.local_attention(spec, chunk, reach, hidden=~own))


# %% [markdown]
# ## Does it keep the laws?
#
# A cache that is slightly wrong still writes fluent text, so `jaxkv.testing` checks the laws of a
# policy. Law 15 needs the meaning of the policy in plain Python: which tokens are cached when the query
# number `n` attends.

# %%
from jaxkv.testing import judge_laws, table

small = Strided(near=2, far=5, stride=4)


def cached_tokens(n):
    return [t for t in range(n + 1) if n - t < small.stride * (small.near if t % 4 else small.far)]


capacity = small.near * small.stride  # it evicts none of the first tokens
verdicts = judge_laws(small, capacity, cached_tokens)
runtime.Text(table(verdicts))

# %% [markdown]
# In a test of your own, `check_policy(small)` raises where a law is broken. The other laws are about
# what this policy does not have: an estimate (12), protected slots (13), the end of prefill (14).
#
# And where something is wrong? This one forgets that a token belongs to one ring alone:


# %%
class Twice(Strided):
    def update(self, spec, state, chunk):
        partial, _ = super().update(spec, state, chunk)
        return partial, Rings(*(ring.write(spec, cache, chunk, sinks=0) for cache in state))


mistaken = judge_laws(Twice(near=2, far=5, stride=4), capacity, cached_tokens)
runtime.Text(table(mistaken))

# %% [markdown]
# ## Its place beside the others
#
# The comparison has a `window` and a `streaming` cache of as many slots, and a window of the near part
# alone. The caches are small, because then the choice of tokens matters most. The model has not seen
# the text.

# %%
from jaxkv import models
from jaxkv.models import compare

MODEL = ""  # @param {type: "string"}
llm = models.load(MODEL) if MODEL else models.load()
slots_of_each = max(16, min(llm.config.context, 512) // 16)
near = slots_of_each // 8
own = Strided(near, slots_of_each - 3 * near, stride=4)
ids = runtime.passage(llm, runtime.size(12_000, 1_500))
full, window, short = "full", f"window:window={slots_of_each}", f"window:window={4 * near}"
POLICIES = [full, window, short, f"streaming:sinks=4,window={slots_of_each - 4}"]
scores = compare.compare(llm, ids, POLICIES, chunk=None, seed=0, watch=runtime.quietly)
results = [compare.result(llm, name, scores[name], 500) for name in POLICIES]
results.append(compare.result(llm, "strided", models.score(llm, ids, own), 500, own))
print(f"{own} looks {own.stride * own.far} tokens back")
runtime.Text(compare.table(results))

# %% tags=["picture"]
caption = "The Hound of the Baskervilles, mean of 500 tokens a point; full: see the table"
runtime.shrink(compare.draw(results[1:], llm.config.context, caption, dpi=80))

# %% [markdown]
# With the model that comes with jaxkv, the far tokens lower the loss clearly below that of the near
# part alone. The same number of nearer tokens lowers it a little more: a plain window of equal size is
# ahead, and reads faster, because it has one ring and not two. Full attention caches everything and
# fails beyond the trained context.
#
# ## In a model that is not ours
#
# `jaxkv.step` goes between the projections of any model. This is a decoder in plain JAX, with
# embedding, attention, MLP and logits; its weights are random. It takes a function `attend` and the
# state of each layer.

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


def draw(key, shapes):
    keys = jax.random.split(key, len(shapes))
    return {n: jax.random.normal(k, s) / s[0] ** 0.5
            for k, (n, s) in zip(keys, shapes.items(), strict=True)}  # fmt: skip


layers = [draw(key, SHAPES) for key in jax.random.split(jax.random.key(1), LAYERS)]
embedding = jax.random.normal(jax.random.key(2), (VOCAB, WIDTH))


# %%
def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


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
# Two ways to attend: `jaxkv.step` with our policy, and JAX's own attention, which caches nothing and
# needs the whole text.

# %%
policy = Strided(near=8, far=40, stride=4)


def remember(state, q, k, v, positions):
    valid = jnp.ones(positions.shape, bool)
    return jaxkv.step(policy, spec, state, q, k, v, positions, valid)


def dense(state, q, k, v, positions):
    q, k = (spec.encoding.rotate(x, positions) for x in (q, k))
    out = jax.nn.dot_product_attention(q, k, v, scale=spec.scale, is_causal=True)
    return out, state


# %% [markdown]
# Every token is drawn from the logits of the one before; the states travel through `jax.lax.scan`
# like any other array.

# %%
from jaxkv.state import batch


def write(carry, position):
    states, token = carry
    logits, states = decode(remember, states, token[None, None], position[None, None])
    new = jax.random.categorical(jax.random.fold_in(jax.random.key(3), position), logits[0, 0])
    return (states, new), (token, logits[0, 0])


states = tuple(policy.init(spec, batch=1, rng=jax.random.key(0)) for _ in range(LAYERS))
before = batch.nbytes(states)
count = runtime.size(2_000, 500)
(states, _), (text, logits) = jax.jit(lambda first: jax.lax.scan(
    write, first, jnp.arange(count, dtype=jnp.uint32)))((states, jnp.int32(0)))  # fmt: skip
print(f"{count:,} tokens, {batch.nbytes(states):,} bytes of cache, as many as at the beginning")

# %% [markdown]
# While the near part caches every token, the logits must equal those of dense attention. After that
# they differ, because tokens are evicted.

# %%
most = policy.near * policy.stride
where = jnp.arange(2 * most, dtype=jnp.uint32)[None]
plain, _ = jax.jit(decode, static_argnums=0)(dense, (None,) * LAYERS, text[None, : 2 * most], where)
apart = jnp.abs(plain[0] - logits[: 2 * most]).max(axis=1)
print(f"largest difference of logits: {apart[:most].max():.1e} up to token {most}, "
      f"{apart[most:].max():.1e} in the next {most}")  # fmt: skip

# %% [markdown]
# ## To go on
#
# In a clone the class becomes `jaxkv/policies/strided.py`, with `summary` and `source` for `jaxkv
# policies`; one line in `jaxkv/policies/__init__.py`, so that `--policy strided:near=16` finds it; and
# one in `tests/laws/cases.py`. Those tests check all laws, also in other dtypes, with other position
# encodings and sharded over several devices. A policy that scores tokens by attention does so inside
# `update`. One that grows overrides `reserve`, and one that compresses a finished prompt overrides
# `finish_prefill`.
#
# The cell below says what held, and fails where something did not.

# %%
import numpy as np

broken = {verdict.number for verdict in mistaken if not verdict.holds}
loss = {row["policy"]: row["loss"] for row in results}
size = {row["policy"]: row["state_bytes"] for row in results}
rate = {row["policy"]: row["tokens_per_second"] for row in results}
runtime.verify(
    MODEL,
    always={
        "the policy keeps every law that applies to it":
            {v.number for v in verdicts if v.holds} == {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 15, 16}
            and all(v.holds for v in verdicts),
        "the wrong one is caught, by laws 4 and 15 among others": broken > {4, 15},
        "the window of equal size has as many bytes, to a hundredth":
            abs(size["strided"] / size[window] - 1) < 0.01,
        "the other model generated in constant memory": batch.nbytes(states) == before,
        "its logits are dense attention's while nothing is evicted, to a thousandth":
            bool(apart[:most].max() < 1e-3),
        "after that they are not": bool(apart[most:].max() > 0.01),
        "all of them are finite": bool(np.isfinite(logits).all()),
    },
    ours={
        "far tokens help: its loss is 0.02 below the near part's alone":
            loss["strided"] < loss[short] - 0.02,
        "nearer ones help a little more: a window of equal size is ahead by 0 to 0.06":
            loss[window] < loss["strided"] < loss[window] + 0.06,
        "full attention fails: its loss is 0.3 above the window's":
            loss[full] > loss[window] + 0.3,
    },
    times={"a window reads faster": rate[window] > rate["strided"]},
)  # fmt: skip
