# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxkv/jaxkv/blob/main/colab/07_write_your_own_policy.ipynb)
#
# # Write your own policy
#
# What a cache remembers is one small class. Here is one that the library does not have, checked by
# the laws that all others keep, compared with them, and then used in a model that is not ours. Runs
# on a CPU, a GPU or a TPU; the third cell says how many minutes.

# %% tags=["install"]
# %pip install -q "jaxkv[colab] @ git+https://github.com/jaxkv/jaxkv"

# %%
from evals import runtime

runtime.begin("07_write_your_own_policy")

# %% [markdown]
# ## The idea
#
# Some heads look far back and most look only near
# ([DuoAttention](https://arxiv.org/abs/2410.10819)). So give some kv heads a long memory and the
# others a short one. Each half is a cache that exists, `streaming`; what is new is who gets which.
#
# A policy is a frozen dataclass with `init`, `attend`, `extend` and `kept`, and says its `formula` of
# bytes and the `axes` of its state in letters
# ([contract.py](https://github.com/jaxkv/jaxkv/blob/main/jaxkv/contract.py)). All of it is pure: a
# state goes in, another comes out. What follows is five methods of one to four lines.

# %%
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv.slots import AXES, Slots


class Halves(NamedTuple):
    far: Slots
    near: Slots


# %%
@dataclass(frozen=True)
class Duo:
    """The first `heads` kv heads keep `far` tokens, the others `near`; all keep four sinks."""

    heads: int = 1
    far: int = 252
    near: int = 60

    formula = (
        "heads * (far + 4) * 2 * H * itemsize + (K - heads) * (near + 4) * 2 * H * itemsize"
        " + (far + near + 8) * 4 + 8"
    )
    axes = Halves(*[AXES._replace(k=("B", "J", "S", "H"), v=("B", "J", "S", "H"))] * 2)

    def halves(self, spec):  # the cache, the spec and the kv heads of each
        few, rest = self.heads, spec.kv_heads - self.heads
        far, near = jaxkv.Streaming(4, self.far), jaxkv.Streaming(4, self.near)
        return [(far, replace(spec, kv_heads=few), slice(0, few)),
                (near, replace(spec, kv_heads=rest), slice(few, None))]  # fmt: skip

    def init(self, spec, rows, key):
        return Halves(*[cache.init(own, rows, key) for cache, own, _ in self.halves(spec)])

    def attend(self, spec, state, chunk):
        found = [c.attend(own, half, part(chunk, heads))
                 for (c, own, heads), half in zip(self.halves(spec), state, strict=True)]  # fmt: skip
        return jaxkv.Partial(*[jnp.concatenate(both, axis=2) for both in zip(*found, strict=True)])

    def extend(self, spec, state, chunk):
        return Halves(*[c.extend(own, half, part(chunk, heads))
                        for (c, own, heads), half in zip(self.halves(spec), state, strict=True)])  # fmt: skip

    def kept(self, spec, state):
        found = [
            c.kept(own, half) for (c, own, _), half in zip(self.halves(spec), state, strict=True)
        ]
        size = max(one.positions.shape[2] for one in found)
        return jaxkv.Kept(*[jnp.concatenate([widen(x, size, fill) for x in both], axis=1)
                            for both, fill in zip(zip(*found, strict=True), (0, -jnp.inf), strict=True)])  # fmt: skip


# %% [markdown]
# Two small functions remain: query heads that share a kv head lie side by side, so a part of the kv
# heads takes a part of the query heads; and slots that a half does not have are empty.


# %%
def part(chunk, heads):
    group = chunk.q.shape[2] // chunk.k.shape[2]
    of_q = slice(group * heads.start, heads.stop and group * heads.stop)
    return chunk._replace(q=chunk.q[:, :, of_q], k=chunk.k[:, :, heads], v=chunk.v[:, :, heads])


def widen(x, size, fill):
    return jnp.pad(x, ((0, 0), (0, 0), (0, size - x.shape[2])), constant_values=fill)


# %% [markdown]
# ## Does it keep the laws?
#
# A cache that is slightly wrong still writes fluent text, so every policy answers to laws. Seven of
# them find most mistakes. Up to its capacity, here twelve tokens, a policy must be dense attention.

# %%
from evals import laws

small = Duo(heads=1, far=16, near=8)
verdicts = laws.check(small, capacity=12)
runtime.Text(laws.table(verdicts))


# %% [markdown]
# And where something is wrong? This one forgets that query heads lie side by side:


# %%
@dataclass(frozen=True)
class Wrong(Duo):
    def attend(self, spec, state, chunk):
        mixed = chunk.q.reshape(*chunk.q.shape[:2], spec.kv_heads, -1, spec.head_dim)
        mixed = mixed.swapaxes(2, 3).reshape(chunk.q.shape)
        return super().attend(spec, state, chunk._replace(q=mixed))


mistaken = laws.check(Wrong(heads=1, far=16, near=8), capacity=12)
runtime.Text(laws.table(mistaken))

# %% [markdown]
# ## Its place beside the others
#
# At as many bytes: one kv head of three keeps 256 tokens and two keep 64, `streaming` 128 in each.
# The text is one that the model has not seen.

# %%
import models
from evals import compare

MODEL = ""  # @param {type: "string"}
llm = models.load(MODEL) if MODEL else models.load()
ids = runtime.passage(llm, runtime.size(12_000, 1_500))
POLICIES = ["full", "window:window=128", "streaming:sinks=4,window=124"]
scores = compare.compare(llm, ids, POLICIES, chunk=None, seed=0, watch=runtime.quietly)
results = [compare.result(llm, name, scores[name], 500) for name in POLICIES]
results.append(compare.result(llm, "duo", models.score(llm, ids, Duo()), 500, Duo()))
runtime.Text(compare.table(results))

# %% tags=["picture"]
caption = "The Hound of the Baskervilles, mean of 500 tokens a point"
runtime.shrink(compare.draw(results, llm.config.context, caption, dpi=80))

# %% [markdown]
# Here it gains nothing over `streaming`. DuoAttention finds out which heads of a model look far; this
# policy takes the first ones, whichever they are.
#
# ## In a model that is not ours
#
# `jaxkv.step` goes between the projections of any model. This one is a layer of attention in plain JAX
# with random weights; its state travels through `jax.jit` like any other array.

# %%
from jaxkv.rotary import rotary

WIDTH, HEADS, KV_HEADS, DIM = 32, 6, 3, 16
keys = jax.random.split(jax.random.key(0), 4)
sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
weights = {
    name: jax.random.normal(key, (WIDTH, size)) / 6
    for key, (name, size) in zip(keys[:3], sizes.items(), strict=True)
}
spec = jaxkv.Spec(KV_HEADS, DIM, DIM**-0.5, rotary(DIM, 10_000.0))
duo = Duo(heads=1, far=60, near=28)


@jax.jit
def layer(state, x, positions):
    q, k, v = ((x @ weights[name]).reshape(*x.shape[:2], -1, DIM) for name in "qkv")
    return jaxkv.step(duo, spec, state, q, k, v, positions, jnp.ones(x.shape[:2], bool))


# %%
import numpy as np

from jaxkv import rows

text = jax.random.normal(keys[3], (1, 1_000, WIDTH))
state, outs = duo.init(spec, rows=1, key=jax.random.key(0)), []
for at in range(0, 1_000, 20):
    where = jnp.arange(at, at + 20, dtype=jnp.uint32)[None]
    out, state = layer(state, text[:, at : at + 20], where)
    outs.append(out)
print(f"{rows.nbytes(state):,} bytes after 1,000 tokens")

# %% [markdown]
# The first 32 tokens fit the smaller half, so there it must be what JAX itself calls attention:

# %%
first, where = text[:, :32], jnp.arange(32, dtype=jnp.uint32)[None]
q, k, v = ((first @ weights[name]).reshape(1, 32, -1, DIM) for name in "qkv")
q, k = (spec.encoding.rotate(x, where) for x in (q, k))
plain = jax.nn.dot_product_attention(q, k, v, scale=spec.scale, is_causal=True)
apart = float(np.abs(np.concatenate(outs[:2], axis=1)[:, :32] - np.asarray(plain)).max())
print(f"largest difference: {apart:.1e}")

# %% [markdown]
# ## To go on
#
# In a clone the class becomes `jaxkv/policies/duo.py`, with `summary` and `source` for `jaxkv
# policies`, one line in `jaxkv/policies/__init__.py` so that `--policy duo:heads=1` finds it, and one
# in `tests/laws/cases.py`, where all seventeen laws are asked of it. (Law 6, that a state may be split
# over kv heads, this policy cannot keep, for its halves are kv heads; it is for one device.) Attention
# has to be shown to a policy only if it chooses by it (`needs_scores`); one that makes room as it grows
# has `reserve`, one that thins a finished prompt `seal`, and a faster way for a single token is
# `decode`.
#
# The cell below fails if anything above was not as it says.

# %%
broken = [verdict.number for verdict in mistaken if not verdict.holds]
loss = {row["policy"]: row["loss"] for row in results}
assert all(verdict.holds for verdict in verdicts) and broken == [4]
assert loss["duo"] < loss["full"] and abs(loss["duo"] - loss[POLICIES[2]]) < 0.1
assert apart < 1e-3 and all(np.isfinite(out).all() for out in outs)
print("as it should be")
