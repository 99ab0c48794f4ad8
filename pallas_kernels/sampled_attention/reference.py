"""What the kernels compute, in XLA, and the arithmetic that all implementations share.

Axis letters: B rows of a batch, N query heads, K kv heads, S slots, H head dim, M rows of a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.pallas_kernels import host

Array = jax.Array
BLOCK = 256  # rows that are gathered at a time: on a CPU 192 to 640 are as fast, 128 slower


class How(NamedTuple):
    """What is the same in every call. A logit is softcap(scale x q.k) + log weight.

    weigh: the log weight as a function of the cosine of q with the centred key, elementwise on
    float32, hashable, of operations that kernels have: a frozen dataclass with __call__. A TPU's
    have exp, log, log1p, sqrt and tanh, and no expm1, sign or inverse cosine.
    """

    scale: float
    softcap: float | None = None
    weigh: Callable[[Array], Array] | None = None


class Angles(NamedTuple):
    """What turns q.k into the cosine of q with k - m: (q.k - q.m) / (|q| |k - m|).

    norms [B,K,S]: |k - m|. shift [B,N]: q.m. length [B,N]: |q|. All float32.
    """

    norms: Array
    shift: Array
    length: Array


class Attended(NamedTuple):
    """out [B,N,H] float32, lse [B,N] float32. Over no rows at all: out 0, lse -inf."""

    out: Array
    lse: Array


Weight = Array | Angles | None  # log weights of the rows, or what gives them, or none


class Sums(NamedTuple):
    """An online softmax under way: the largest logit, and sums of exponentials less that."""

    top: Array
    total: Array
    out: Array


def attend(
    how: How, q: Array, k: Array, v: Array, rows: Array, count: Array, weight: Weight
) -> Attended:
    """A head at a time, in blocks of rows, as many of them as its count asks for.

    The arguments are those of `sampled_attention`, rows within 0 .. S-1 and counts within 0 .. M.
    A head's bits depend on nothing but its own numbers.
    """
    kv_heads, slots, head_dim = k.shape[1:]
    group = q.shape[1] // kv_heads
    block = min(BLOCK, rows.shape[-1])
    rows = by_head(pad(rows, block))
    keys, values = k.reshape(-1, head_dim), v.reshape(-1, head_dim)
    angles = isinstance(weight, Angles)
    norms = weight.norms.reshape(-1) if angles else None
    if weight is not None:
        weight = weight._replace(norms=None) if angles else pad(weight, block)
        weight = jax.tree.map(by_head, weight)

    def attend_head(given: tuple[Array, Array, Array, Array, Weight]) -> tuple[Array, Array]:
        head, q, rows, count, weight = given
        first = head // group * slots

        def attend_block(i: Array, so_far: Sums) -> Sums:
            cut = lambda a: jax.lax.dynamic_slice_in_dim(a, i * block, block)  # noqa: E731
            within = i * block + jnp.arange(block) < count
            at = first + jnp.where(within, cut(rows), 0)  # one row again and again is soon read
            take = partial(take_rows, at=at)
            product = dot(take(keys), q)
            here = weight
            if weight is not None:
                here = weight._replace(norms=take(norms)) if angles else cut(weight)
            found = logits(how, product, here)
            found = jnp.where(within, found, -jnp.inf)
            return absorb(so_far, found, lambda share: dot(share, take(values)))

        blocks = -(-count // block)
        sums = jax.lax.fori_loop(0, blocks, attend_block, nothing((head_dim,)))
        out, lse = finish(sums)
        return out, lse[0]

    # Heads side by side (vmap) would go on in step until the fullest is done, copying all sums.
    heads = q.shape[0] * q.shape[1]
    given = jnp.arange(heads), by_head(q.astype(jnp.float32)), rows, by_head(count), weight
    out, lse = jax.lax.map(attend_head, given)
    return Attended(out.reshape(q.shape), lse.reshape(q.shape[:2]))


def gathered(
    how: How, q: Array, k: Array, v: Array, rows: Array, count: Array, weight: Weight
) -> Attended:
    """The same with all rows gathered at once, M x H numbers a head: what gradients are taken of.

    A weight that `how.weigh` makes is the chance of a draw that was made; it has no gradient.
    """
    at = places(rows, k.shape[1])
    product = jnp.einsum(
        "bnh,bnmh->bnm", q.astype(jnp.float32), k[at].astype(jnp.float32), precision="highest"
    )
    if isinstance(weight, Angles):
        numbers = Angles(weight.norms[at], weight.shift[..., None], weight.length[..., None])
        weight = jax.lax.stop_gradient(how.weigh(cosine(product, numbers)))
    found = logits(how, product, weight)
    found = jnp.where(there(rows, count), found, -jnp.inf)
    values = v[at].astype(jnp.float32)
    apply = lambda share: jnp.einsum("bnm,bnmh->bnh", share, values, precision="highest")  # noqa: E731
    out, lse = finish(absorb(nothing(q.shape), found, apply))
    return Attended(out, lse[..., 0])


def logits(how: How, product: Array, weight: Weight) -> Array:
    """softcap(scale x product) + weight; Angles have the numbers of these products."""
    found = product * np.float32(how.scale)
    if how.softcap is not None:
        found = np.float32(how.softcap) * jnp.tanh(found / np.float32(how.softcap))
    if weight is None:
        return found
    if isinstance(weight, Angles):
        weight = how.weigh(cosine(product, weight))
    return found + weight


def cosine(product: Array, angles: Angles) -> Array:
    """Within -1 .. 1, and 0 where the query or the centred key has no direction."""
    size = angles.norms * angles.length
    none = size <= 0
    found = (product - angles.shift) / jnp.where(none, np.float32(1), size)
    return jnp.where(none, np.float32(0), jnp.clip(found, np.float32(-1), np.float32(1)))


def absorb(so_far: Sums, found: Array, apply: Callable[[Array], Array]) -> Sums:
    """More logits [...,rows]. apply: the product of their exponentials with the values."""
    # Any top gives the same result, so gradients need not pass through it.
    here = jax.lax.stop_gradient(jnp.max(found, axis=-1, keepdims=True))
    top = jnp.maximum(so_far.top, here)
    # With nothing in view top is -inf; a finite stand-in keeps the exponentials at 0, not NaN.
    safe = jnp.where(top == -jnp.inf, np.float32(0), top)
    old, share = jnp.exp(so_far.top - safe), jnp.exp(found - safe)
    total = so_far.total * old + jnp.sum(share, axis=-1, keepdims=True)
    return Sums(top, total, so_far.out * old + apply(share))


def nothing(shape: tuple[int, ...]) -> Sums:
    """Of no logits yet, for an out of this shape."""
    number = jnp.zeros((*shape[:-1], 1), jnp.float32)
    return Sums(jnp.full_like(number, -np.inf), number, jnp.zeros(shape, jnp.float32))


def finish(sums: Sums) -> tuple[Array, Array]:
    """out and lse, one number where the sums have one."""
    none = sums.total == 0
    safe = jnp.where(none, np.float32(1), sums.total)
    return sums.out / safe, jnp.where(none, np.float32(-np.inf), sums.top + jnp.log(safe))


def take_rows(array: Array, at: Array) -> Array:
    """array[at], all of which are there: to see to others would cost a tenth of the time."""
    if array.dtype != jnp.float32:
        # XLA:CPU gathers half precision as float32, and would convert the whole cache beforehand.
        array, at = jax.lax.optimization_barrier((array, at))
    return host.take(array, at)


def dot(x: Array, y: Array) -> Array:
    """Over the last axis of x and the first of y, in float32."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.dot(x, y, precision=jax.lax.Precision.HIGHEST)


def there(rows: Array, count: Array) -> Array:
    """[B,N,M]: which rows are of the sample."""
    return jax.lax.broadcasted_iota(jnp.int32, rows.shape, 2) < count[..., None]


def places(rows: Array, kv_heads: int) -> tuple[np.ndarray, np.ndarray, Array]:
    """The index by which the rows [B,N,M] of an array [B,K,S,...] are taken."""
    batch, heads = rows.shape[:2]
    row, head, _ = np.ogrid[:batch, :heads, :1]
    return row, head // (heads // kv_heads), rows


def by_head(array: Array) -> Array:
    """[B,N,...] as [B*N,...]."""
    return array.reshape(-1, *array.shape[2:])


def pad(array: Array, to: int) -> Array:
    """[B,N,M] with zeros behind, M a multiple of `to`."""
    return jnp.pad(array, ((0, 0), (0, 0), (0, -array.shape[-1] % to)))
