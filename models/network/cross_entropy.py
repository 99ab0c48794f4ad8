"""The loss of a batch and its gradient, block by block, without the logits of the whole batch.

The forward pass computes the gradient of each block of logits and drops the block, as Liger Kernel
does (Hsu et al. 2024). It stores two arrays, of the sizes of the head and of the hidden states.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxkv.platform import cpu as xla_cpu
from jaxkv.typing import Array, Float, Float32, Int32


def target_losses(
    logits: Float32[Array, "B T V"], targets: Int32[Array, "B T"]
) -> Float32[Array, "B T"]:
    """The natural-log loss of every target; NaN for a sink token that no head predicts."""

    def loss(logits: Float32[Array, " V"], target: Int32[Array, ""]) -> Float32[Array, ""]:
        return jax.nn.logsumexp(logits) - logits.at[target].get(mode="fill", fill_value=jnp.nan)

    losses = xla_cpu.map_samples(loss, logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
    return losses.reshape(targets.shape)


def cross_entropy(
    head: Float[Array, "V D"],
    hidden: Float[Array, "B T D"],
    targets: Int32[Array, "B T"],
    share: Float32[Array, "B T"],
    z_loss: float,
    mesh: Mesh | None = None,
) -> tuple[Float32[Array, ""], Float32[Array, "B T"]]:
    """The training objective, the sum of share x (loss + z_loss x (log Z)^2), and every loss.

    share: the weight of each target. z_loss: PaLM, section 5. mesh: its axis `data` splits samples.
    Products are in the precision of `hidden`. Only the first result has a gradient, with respect to
    head and hidden.
    """
    if mesh is None:
        return _of_samples(head, hidden, targets, share, z_loss)

    def shard_cost(*arrays: Array) -> tuple[Array, Array]:
        cost, losses = _of_samples(*arrays, z_loss)
        return cost[None], losses

    samples, replicated = PartitionSpec("data"), PartitionSpec()
    split = jax.shard_map(
        shard_cost,
        mesh=mesh,
        in_specs=(replicated, samples, samples, samples),
        out_specs=samples,
        check_vma=False,
    )
    costs, losses = split(head, hidden, targets, share)
    return jnp.sum(costs), losses


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _of_samples(
    head: Array, hidden: Array, targets: Array, share: Array, z_loss: float
) -> tuple[Array, Array]:
    cost, losses, _ = _in_blocks(head, hidden, targets, share, z_loss, with_gradient=False)
    return cost, losses


def _forward(
    head: Array, hidden: Array, targets: Array, share: Array, z_loss: float
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    cost, losses, gradients = _in_blocks(head, hidden, targets, share, z_loss, with_gradient=True)
    return (cost, losses), gradients


def _backward(
    z_loss: float, gradients: tuple[Array, Array], cotangents: tuple[Array, Array]
) -> tuple[Array | None, ...]:
    # The losses have no gradient.
    return *((cotangents[0] * g.astype(jnp.float32)).astype(g.dtype) for g in gradients), None, None


_of_samples.defvjp(_forward, _backward)


def _in_blocks(
    head: Float[Array, "V D"],
    hidden: Float[Array, "B T D"],
    targets: Int32[Array, "B T"],
    share: Float32[Array, "B T"],
    z_loss: float,
    with_gradient: bool,
) -> tuple[Array, Array, tuple[Array, Array] | None]:
    vocab, (batch, tokens, _) = head.shape[0], hidden.shape
    count = min(tokens, -(-batch * tokens * vocab // xla_cpu.logits_at_once()))
    size = -(-tokens // count)
    padding = size * count - tokens  # of share 0, so that blocks have one size
    cast, ids = head.astype(hidden.dtype), np.arange(vocab)[:, None]

    def blocks(array: Array) -> Array:
        """Split [B, T, ...] into blocks [count, B x size, ...]."""
        padded = jnp.pad(array, [(0, 0), (0, padding)] + [(0, 0)] * (array.ndim - 2))
        cut = padded.reshape(batch, count, size, *array.shape[2:])
        return jnp.moveaxis(cut, 1, 0).reshape(count, batch * size, *array.shape[2:])

    def join_blocks(parts: Array) -> Array:
        """Undo `blocks`."""
        cut = parts.reshape(count, batch, size, *parts.shape[2:])
        return jnp.moveaxis(cut, 0, 1).reshape(batch, -1, *parts.shape[2:])[:, :tokens]

    def one_block(sums: tuple[Array, ...], block: tuple[Array, ...]) -> tuple[tuple, tuple]:
        x, target, of_loss = block
        target, of_loss = target[None], of_loss[None]
        # [V, B x size]: sums over V are then sums of rows, which XLA:CPU computes faster.
        logits = xla_cpu.dot(cast, x, (1, 1), jnp.float32)
        top = jnp.max(logits, axis=0, keepdims=True)
        powers = jnp.exp(logits - top)
        total = jnp.sum(powers, axis=0, keepdims=True)
        log_z = top + jnp.log(total)
        is_target = ids == target
        # A sum over a mask: a gather would fetch its elements one at a time.
        loss = log_z - jnp.sum(jnp.where(is_target, logits, 0), axis=0, keepdims=True)
        cost = sums[0] + jnp.sum(of_loss * (loss + np.float32(z_loss) * log_z**2))
        if not with_gradient:
            return (cost,), (loss[0],)
        of_powers = of_loss * (1 + np.float32(2 * z_loss) * log_z) / total
        d_logits = (powers * of_powers - jnp.where(is_target, of_loss, 0)).astype(x.dtype)
        d_head = sums[1] + xla_cpu.dot(d_logits, x, (1, 0), jnp.float32)
        return (cost, d_head), (loss[0], xla_cpu.dot(d_logits, cast, (0, 0)))

    zeros = (jnp.float32(0),)
    if with_gradient:
        zeros += (jnp.zeros(head.shape, jnp.float32),)
    totals, parts = jax.lax.scan(one_block, zeros, tuple(map(blocks, (hidden, targets, share))))
    gradients = (totals[1].astype(head.dtype), join_blocks(parts[1])) if with_gradient else None
    return totals[0], join_blocks(parts[0]), gradients
