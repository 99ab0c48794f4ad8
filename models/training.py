"""One training step: the loss of a batch of samples, its gradient, and the new weights.

Everything a run carries is one pytree, `Training`: flat weights by our names in float32, the
optimizer's moments, and the step. Functions are pure; the mesh decides where things lie.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from optax.contrib import muon

from jaxkv.errors import UserError
from jaxkv.models import uncached
from jaxkv.models.config import Config
from jaxkv.models.cross_entropy import cross_entropy
from jaxkv.models.decoder import Weights
from jaxkv.models.hf.names import shapes
from jaxkv.models.recipes import Recipe
from jaxkv.typing import Array, Float32, Int32

DEVIATION = 0.02  # of fresh weights
INNER = ("q", "k", "v", "o", "gate", "up", "down")  # the matrices that Muon takes


class Training(NamedTuple):
    """All that a run carries from step to step, and all that a checkpoint holds."""

    weights: dict[str, Float32[Array, "..."]]
    moments: optax.OptState
    step: Int32[Array, ""]
    failed: Int32[Array, ""]  # the first step with something that is no number; -1: none


class Told(NamedTuple):
    """What one step says: its loss without the z-loss, and the size of the unclipped gradient."""

    loss: Float32[Array, ""]
    grad_norm: Float32[Array, ""]


@dataclass(frozen=True)
class Setting:
    """What a compilation of a step depends on besides shapes.

    front: the sink tokens before every sample. dtype: of the computation; weights and moments are
    float32. mesh: its axis `data` splits samples, weights and moments.
    """

    recipe: Recipe
    config: Config
    front: tuple[int, ...]
    dtype: str
    mesh: Mesh | None = None

    def place(self, shape: Sequence[int]) -> NamedSharding | None:
        """Where a weight or a moment lies: split along its longest axis that can be split."""
        if self.mesh is None:
            return None
        size = self.mesh.size
        axes = [axis for axis, length in enumerate(shape) if length % size == 0]
        if not axes or size == 1:
            return NamedSharding(self.mesh, PartitionSpec())
        longest = max(axes, key=lambda axis: shape[axis])
        return NamedSharding(self.mesh, PartitionSpec(*[None] * longest, "data"))

    def place_samples(self, runs: Int32[np.ndarray, "B X"]) -> Int32[Array, "B X"]:
        """Samples on the devices that will take them."""
        return self._hand_over(runs, PartitionSpec("data"))

    def split(self, runs: Int32[np.ndarray, "B X"]) -> Int32[Array, "A R X"]:
        """A batch on its devices, in A parts that are taken one after another.

        Every process has the whole batch and hands over what its own devices hold.
        """
        parts = runs.reshape(self.recipe.accumulate, -1, runs.shape[1])
        return self._hand_over(parts, PartitionSpec(None, "data"))

    def _hand_over(self, held: Int32[np.ndarray, "..."], by: PartitionSpec) -> Int32[Array, "..."]:
        if self.mesh is None:
            return jnp.asarray(held)
        where = NamedSharding(self.mesh, by)
        return jax.make_array_from_callback(held.shape, where, lambda at: held[at])


def check_mesh(mesh: Mesh | None, recipe: Recipe) -> None:
    """Raise UserError where the mesh has another axis than `data`, or does not divide a batch."""
    if mesh is None:
        return
    if mesh.axis_names != ("data",):
        raise UserError(
            f"training splits samples and weights over one mesh axis, data, got "
            f"{', '.join(mesh.axis_names)}; write --mesh data={mesh.size}"
        )
    rows = recipe.rows // recipe.accumulate
    if rows % mesh.size:
        raise UserError(
            f"the mesh must divide the samples taken at once: {rows} (rows={recipe.rows} in "
            f"{recipe.accumulate} parts) over {mesh.size} devices; set rows or accumulate anew"
        )


def fresh_weights(config: Config, seed: int) -> dict[str, Array]:
    """Random weights in float32: normal, those that write to the residual stream divided by
    sqrt(2 L) (GPT-2); gains 1, biases and sink logits 0."""
    weights = {}
    for name, (_, shape) in shapes(config).items():
        kind = name.rsplit(".", 1)[-1]
        if kind.endswith("norm"):
            weights[name] = jnp.ones(shape, jnp.float32)
        elif len(shape) == 1:
            weights[name] = jnp.zeros(shape, jnp.float32)
        else:
            scale = DEVIATION / math.sqrt(2 * config.layers if kind in ("o", "down") else 1)
            # By name: what two models have in common begins alike.
            key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
            weights[name] = scale * jax.random.normal(key, shape, jnp.float32)
    return weights


def begin(setting: Setting) -> Training:
    """A run before its first step."""
    if setting.mesh is None:
        return _fresh(setting)
    fresh = partial(_fresh, setting)
    return jax.jit(fresh, out_shardings=places(setting, jax.eval_shape(fresh)))()


def shape(setting: Setting) -> Training:
    """The shapes of a run's leaves, and where each lies."""
    training = jax.eval_shape(partial(_fresh, setting))
    here = SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=setting.place(leaf.shape) or here
        ),
        training,
    )


def _fresh(setting: Setting) -> Training:
    weights = fresh_weights(setting.config, setting.recipe.seed)
    moments = optimizer(setting.recipe).init(weights)
    return Training(weights, moments, jnp.int32(0), jnp.int32(-1))


def places(setting: Setting, training: Training) -> Training:
    """Where each leaf lies over the mesh."""
    return jax.tree.map(lambda leaf: setting.place(leaf.shape), training)


def rate(recipe: Recipe) -> optax.Schedule:
    """The learning rate of a step: a warm-up, then a cosine, or level and down at the end (WSD)."""
    last = recipe.lr * recipe.last_lr
    warm = max(1, round(recipe.warmup * recipe.steps))
    rest = max(1, recipe.steps - warm)
    up = optax.linear_schedule(recipe.lr / warm, recipe.lr, max(1, warm - 1))
    if recipe.decay == "cosine":
        down = optax.cosine_decay_schedule(recipe.lr, rest, recipe.last_lr)
    else:
        cooling = min(rest, max(1, round(recipe.cooldown * recipe.steps)))
        down = optax.linear_schedule(recipe.lr, last, cooling, max(0, rest - cooling))
    return optax.join_schedules([up, down], [warm])


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Clipping, then AdamW; or Muon for the matrices inside the layers and AdamW for the rest."""
    matrices = partial(jax.tree.map, lambda leaf: leaf.ndim > 1)
    betas = {"b1": recipe.beta1, "b2": recipe.beta2}
    rule = optax.adamw(rate(recipe), **betas, weight_decay=recipe.weight_decay, mask=matrices)
    if recipe.optimizer == "muon":
        inner = muon(
            rate(recipe),
            weight_decay=recipe.weight_decay,
            consistent_rms=0.2,  # updates as large as AdamW's, so that one lr serves both
        )
        rule = optax.partition({"muon": inner, "adamw": rule}, _rule_of)
    return optax.chain(optax.clip_by_global_norm(recipe.clip), rule)


def _rule_of(weights: Weights) -> dict[str, str]:
    return {n: "muon" if n.rsplit(".", 1)[-1] in INNER else "adamw" for n in weights}


def samples(runs: Int32[Array, "B X"], front: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Inputs and targets [B,T], and which targets count, from runs of T + 1 tokens.

    front: the sink tokens. They take the place of the first tokens of each sample, so that models
    with and without see the same targets; no loss is taken on predicting one.
    """
    inputs, targets = runs[:, :-1], runs[:, 1:]
    at = jnp.arange(inputs.shape[1])[None]
    for place, token in enumerate(front):
        inputs = jnp.where(at == place, token, inputs)
    counts = (at >= len(front) - 1).astype(jnp.float32)
    return inputs, targets, jnp.broadcast_to(counts, inputs.shape)


def losses(
    setting: Setting, weights: Weights, runs: Int32[Array, "B X"], z_loss: float = 0.0
) -> tuple[Float32[Array, ""], Float32[Array, "B T"], Array]:
    """What a step makes small, natural-log losses of every target, and its share of their mean.

    The first is the mean over all targets that count, z_loss x (log Z)^2 added.
    """
    inputs, targets, counts = samples(runs, setting.front)
    run = uncached.attend if setting.mesh is None else uncached.attend_on(setting.mesh)
    decoder, hidden, _ = uncached.forward(setting.config, weights, inputs, run)
    share = counts / jnp.sum(counts)
    cost, found = cross_entropy(decoder.unembedding(), hidden, targets, share, z_loss, setting.mesh)
    return cost, found, share


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(setting: Setting, weights: Weights) -> Weights:
    """The weights as the computation takes them, whole on every device while they are used.

    Gradients go back to where the weights lie. The embedding stays in float32: its gradient is a
    sum over tokens, of which the frequent ones would be lost in half precision.
    """
    cast = {
        n: w.astype(setting.dtype) if w.ndim > 1 and n != "embed" else w for n, w in weights.items()
    }
    if setting.mesh is None:
        return cast
    return jax.lax.with_sharding_constraint(cast, NamedSharding(setting.mesh, PartitionSpec()))


def _scatter(setting: Setting, _: None, gradients: Weights) -> tuple[Weights]:
    wide = {name: gradient.astype(jnp.float32) for name, gradient in gradients.items()}
    if setting.mesh is None:
        return (wide,)
    lying = {name: setting.place(gradient.shape) for name, gradient in wide.items()}
    return (jax.lax.with_sharding_constraint(wide, lying),)


_gather.defvjp(lambda setting, weights: (_gather(setting, weights), None), _scatter)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def update(
    setting: Setting, training: Training, parts: Int32[Array, "A R X"]
) -> tuple[Training, Told]:
    """One step. Nothing changes once a loss, a gradient or an update is no number.

    The loss is the mean over all targets, with z_loss x (log Z)^2 added (PaLM, section 5).
    """

    def cost_of(weights: Weights, runs: Array) -> tuple[Array, Array]:
        gathered = _gather(setting, weights)
        cost, found, share = losses(setting, gathered, runs, setting.recipe.z_loss)
        return cost, jnp.sum(share * found)

    def gradient(runs: Array) -> tuple[Array, Weights]:
        (_, loss), found = jax.value_and_grad(cost_of, has_aux=True)(training.weights, runs)
        return loss, found

    if len(parts) == 1:
        loss, gradients = gradient(parts[0])
    else:
        zero = jnp.float32(0), jax.tree.map(jnp.zeros_like, training.weights)
        add = lambda total, runs: (jax.tree.map(jnp.add, total, gradient(runs)), None)  # noqa: E731
        total, _ = jax.lax.scan(add, zero, parts)
        loss, gradients = jax.tree.map(lambda leaf: leaf / len(parts), total)
    norm = optax.tree.norm(gradients)
    updates, moments = optimizer(setting.recipe).update(
        gradients, training.moments, training.weights
    )
    weights = optax.apply_updates(training.weights, updates)
    sound = jnp.isfinite(loss) & jnp.isfinite(norm) & (training.failed < 0)
    for change in jax.tree.leaves(updates):
        sound &= jnp.all(jnp.isfinite(change))
    kept = jax.tree.map(
        lambda new, old: jnp.where(sound, new, old),
        (weights, moments),
        (training.weights, training.moments),
    )
    failed = jnp.where(sound | (training.failed >= 0), training.failed, training.step)
    after = Training(*kept, step=training.step + 1, failed=failed)
    if setting.mesh is not None:
        after = jax.lax.with_sharding_constraint(after, places(setting, after))
    return after, Told(loss, norm)


@partial(jax.jit, static_argnums=0)
def mean_loss(setting: Setting, weights: Weights, runs: Int32[Array, "B X"]) -> Array:
    """The mean loss of a batch, without the z-loss."""
    return losses(setting, _gather(setting, weights), runs)[0]


def first_token_mass(
    setting: Setting, weights: Weights, runs: Int32[Array, "B X"], after: int = 0
) -> Float32[Array, "L N"]:
    """How much attention each head gives to the first token: the mean of queries from `after`."""
    inputs, _, _ = samples(runs, setting.front)
    return uncached.mass_on_first(setting.config, _gather(setting, weights), inputs, after)


def flops_per_token(config: Config, context: int) -> float:
    """Floating-point operations of training on one token: 6 N + 12 L (N H) T (PaLM, appendix B).

    N is every weight that a token is multiplied with: the embedding counts where it is the head.
    """
    held = {name: math.prod(shape) for name, (_, shape) in shapes(config).items()}
    weights = sum(held.values()) - (held["embed"] if config.own_head else 0)
    return 6 * weights + 12 * config.layers * config.heads * config.head_dim * context
