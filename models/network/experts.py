"""A mixture of experts: a router sends each token to a few of many MLPs.

    logits = router @ x (+ bias); the k largest are chosen; out = sum of share x expert(x)

Shares are the softmax of the chosen logits, or, with `normalised_experts` off, their terms of the
softmax over all. A token and one of its experts are a pair; pairs are computed in one of three
forms. Each adds the experts of a token in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.models.network.config import Config
from jaxkv.models.network.mlp import linear, mlp
from jaxkv.models.network.quantised import Quantised
from jaxkv.typing import Array, Float, Float32, Int32

Matrices = Mapping[str, Array | Quantised]

LARGEST_BLOCK = 64  # tokens of an expert that are computed at a time by `by_block`
PREFIX = "expert_"  # of the names of matrices [E,O,I] and biases [E,O] of all experts of a layer


def mix(config: Config, weights: Matrices, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The sum of each token's experts; weights: those of a layer."""
    tokens = x.reshape(-1, x.shape[-1])
    chosen, share = route(config, weights, tokens)
    experts = {n.removeprefix(PREFIX): w for n, w in weights.items() if n.startswith(PREFIX)}
    on_gpu = partial(by_pair if chosen.size <= config.experts else by_expert, config)
    forms = {"cuda": on_gpu, "rocm": on_gpu, "default": partial(by_block, config)}
    out = jax.lax.platform_dependent(experts, tokens, chosen, share, **forms)
    return out.astype(x.dtype).reshape(x.shape)


def route(
    config: Config, weights: Matrices, x: Float[Array, "N D"]
) -> tuple[Int32[Array, "N X"], Float32[Array, "N X"]]:
    """The X experts of each token, in the order of their numbers, and their shares."""
    logits = linear(x[None], weights["router"], weights.get("router_bias"), jnp.float32)[0]
    top, chosen = jax.lax.top_k(logits, config.experts_per_token)
    total = jax.nn.logsumexp(top if config.normalised_experts else logits, axis=1, keepdims=True)
    order = jnp.argsort(chosen, axis=1)
    in_order = lambda a: jnp.take_along_axis(a, order, axis=1)
    return in_order(chosen), in_order(jnp.exp(top - total))


def by_block(
    config: Config,
    experts: Matrices,
    x: Float[Array, "N D"],
    chosen: Int32[Array, "N X"],
    share: Float32[Array, "N X"],
) -> Float32[Array, "N D"]:
    """Blocks of an expert's tokens, one after another: the matrices of other experts are not read.

    The form of a CPU and of a TPU, where the steps of a loop cost nothing.
    """
    size = min(LARGEST_BLOCK, 1 << (chosen.size // config.experts).bit_length())
    numbers = chosen.reshape(-1)
    order = jnp.argsort(numbers, stable=True).astype(jnp.int32)  # pairs by expert
    counts = jnp.bincount(numbers, length=config.experts).astype(jnp.int32)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    blocks = (counts + np.int32(size - 1)) // np.int32(size)
    block_ends = jnp.cumsum(blocks, dtype=jnp.int32)

    def add_block(block: Array, out: Array) -> Array:
        number = jnp.searchsorted(block_ends, block, side="right").astype(jnp.int32)
        pick = lambda a: jax.lax.dynamic_index_in_dim(a, number, keepdims=False)
        before = block - (pick(block_ends) - pick(blocks))  # blocks of this expert before this one
        first = pick(ends) - pick(counts) + before * np.int32(size)
        places = first + jnp.arange(size, dtype=jnp.int32)
        pair = order[jnp.minimum(places, numbers.size - 1)]
        token = jnp.where(places < pick(ends), pair // np.int32(chosen.shape[1]), len(x))
        rows = x.at[token].get(mode="clip")
        matrices = jax.tree.map(pick, dict(experts))
        change = expert(config, matrices, rows).astype(jnp.float32)
        return out.at[token].add(change * share.reshape(-1)[pair][:, None], mode="drop")

    return jax.lax.fori_loop(0, block_ends[-1], add_block, jnp.zeros(x.shape, jnp.float32))


def by_pair(
    config: Config,
    experts: Matrices,
    x: Float[Array, "N D"],
    chosen: Int32[Array, "N X"],
    share: Float32[Array, "N X"],
) -> Float32[Array, "N D"]:
    """The matrices of each pair's expert: the form of a GPU for few tokens.

    There the choice of the matrices is part of the kernel that reads them. On a TPU it is a copy.
    """
    matrices = jax.tree.map(lambda leaf: leaf[chosen.reshape(-1)], dict(experts))
    rows = jnp.repeat(x, chosen.shape[1], axis=0)[:, None]
    changes = jax.vmap(partial(expert, config))(matrices, rows)[:, 0].astype(jnp.float32)
    return jnp.sum(changes.reshape(*chosen.shape, -1) * share[:, :, None], axis=1)


def by_expert(
    config: Config,
    experts: Matrices,
    x: Float[Array, "N D"],
    chosen: Int32[Array, "N X"],
    share: Float32[Array, "N X"],
) -> Float32[Array, "N D"]:
    """All experts of all tokens, one expert after another: the form of a GPU for many tokens.

    A loop over blocks would wait for the host in each step. XLA makes of `jax.lax.ragged_dot` one
    product of every pair with the matrices of all experts, X times the work of this form.
    """
    of_token = jnp.zeros((len(x), config.experts), jnp.float32)
    of_token = of_token.at[jnp.arange(len(x))[:, None], chosen].set(share, unique_indices=True)

    def add_expert(out: Array, of_expert: tuple[Matrices, Array]) -> tuple[Array, None]:
        matrices, shares = of_expert
        change = expert(config, matrices, x).astype(jnp.float32)
        return out + jnp.where(shares[:, None] > 0, change * shares[:, None], 0.0), None

    start = jnp.zeros(x.shape, jnp.float32)
    return jax.lax.scan(add_expert, start, (dict(experts), of_token.T))[0]


def expert(config: Config, matrices: Matrices, x: Float[Array, "R D"]) -> Float[Array, "R D"]:
    """One expert, whose matrices are given, of some tokens."""
    project = lambda rows, name: linear(rows, matrices[name], matrices.get(f"{name}_bias"))
    return mlp(config, project, x[None])[0]
