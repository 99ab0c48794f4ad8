"""One training step: the loss of a batch of samples, its gradient, and the new weights.

The state of a run is one pytree, `Training`: flat weights by our names in float32, the optimizer's
moments, and the step. Functions are pure; the mesh decides the sharding.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
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
from jaxkv.models.loading.weight_names import shapes
from jaxkv.models.network import device, uncached
from jaxkv.models.network.config import Config
from jaxkv.models.network.cross_entropy import cross_entropy
from jaxkv.models.network.decoder import SINK_TOKENS, Weights
from jaxkv.models.training.recipes import Recipe
from jaxkv.typing import Array, Float32, Int32

DEVIATION = 0.02  # standard deviation of initial weights
INNER = ("q", "k", "v", "o", "gate", "up", "down")  # the matrices that Muon updates
# What `Recipe.train` updates, by the last part of the name; `sink_logits` are those of the heads.
SINKS = (SINK_TOKENS, "sink_logits")
ATTENTION = ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias", "q_norm", "k_norm", *SINKS)


class Training(NamedTuple):
    """The state of a run between steps, which is also the content of a checkpoint.

    weights: those that are updated. Frozen weights are no part of it: they have no moments and are
    read from the model again.
    """

    weights: dict[str, Float32[Array, "..."]]
    moments: optax.OptState
    step: Int32[Array, ""]
    failed: Int32[Array, ""]  # the first step with a value that is not finite; -1: none


class StepMetrics(NamedTuple):
    """The loss of one step without the z-loss, and the norm of the unclipped gradient."""

    loss: Float32[Array, ""]
    grad_norm: Float32[Array, ""]


@dataclass(frozen=True)
class TrainingSetting:
    """The static arguments of a compiled step.

    front: the sink tokens before every sample; ids beyond the vocabulary are rows of SINK_TOKENS.
    dtype: the dtype of the computation and of frozen weights; trained weights and moments are
    float32. mesh: its axis `data` splits samples, weights and moments.
    """

    recipe: Recipe
    config: Config
    front: tuple[int, ...]
    dtype: str
    mesh: Mesh | None = None

    @property
    def attention_config(self) -> Config:
        """The config of the forward pass: layers attend within the recipe's window, if any."""
        if not self.recipe.window:
            return self.config
        every = tuple(min(self.recipe.window, w or self.recipe.window) for w in self.config.windows)
        return dataclasses.replace(self.config, windows=every)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight, frozen ones included."""
        weight_shapes = {name: shape for name, (_, shape) in shapes(self.config).items()}
        rows = sum(token >= self.config.vocab for token in self.front)
        return weight_shapes | ({SINK_TOKENS: (rows, self.config.width)} if rows else {})

    def trains(self, name: str) -> bool:
        """Whether the run updates a weight."""
        kind = name.rsplit(".", 1)[-1]
        return {"all": True, "attention": kind in ATTENTION, "sinks": kind in SINKS}[
            self.recipe.train
        ]

    def sharding(self, shape: Sequence[int]) -> NamedSharding | None:
        """The sharding of a weight or a moment: along its longest axis that the mesh divides."""
        if self.mesh is None:
            return None
        size = self.mesh.size
        axes = [axis for axis, length in enumerate(shape) if length % size == 0]
        if not axes or size == 1:
            return NamedSharding(self.mesh, PartitionSpec())
        longest = max(axes, key=lambda axis: shape[axis])
        return NamedSharding(self.mesh, PartitionSpec(*[None] * longest, "data"))

    def place_samples(self, runs: Int32[np.ndarray, "B X"]) -> Int32[Array, "B X"]:
        """Place samples on the devices that process them."""
        return self._place(runs, PartitionSpec("data"))

    def split(self, runs: Int32[np.ndarray, "B X"]) -> Int32[Array, "A R X"]:
        """Place a batch on its devices, in A parts for gradient accumulation.

        Every process has the whole batch and passes on the samples of its own devices.
        """
        parts = runs.reshape(self.recipe.grad_accum_steps, -1, runs.shape[1])
        return self._place(parts, PartitionSpec(None, "data"))

    def _place(self, samples: Int32[np.ndarray, "..."], by: PartitionSpec) -> Int32[Array, "..."]:
        if self.mesh is None:
            return jnp.asarray(samples)
        where = NamedSharding(self.mesh, by)
        return jax.make_array_from_callback(samples.shape, where, lambda at: samples[at])


def dtype_of(recipe: Recipe) -> str:
    """The dtype that a recipe computes in."""
    native = device.native_dtype(jax.local_devices()[0])
    return native if recipe.dtype == "auto" else recipe.dtype


def check_mesh(mesh: Mesh | None, recipe: Recipe) -> None:
    """Raise UserError where the mesh has another axis than `data`, or does not divide a batch."""
    if mesh is None:
        return
    if mesh.axis_names != ("data",):
        raise UserError(
            f"training splits samples and weights over one mesh axis, data, got "
            f"{', '.join(mesh.axis_names)}; write --mesh data={mesh.size}"
        )
    together = recipe.batch_size // recipe.grad_accum_steps
    if together % mesh.size:
        raise UserError(
            f"the mesh must divide the samples of one part: {together} "
            f"(batch_size={recipe.batch_size} in {recipe.grad_accum_steps} parts) over {mesh.size} "
            "devices; change batch_size or grad_accum_steps"
        )


def fresh_weights(setting: TrainingSetting) -> dict[str, Array]:
    """Random initial weights in float32: normal; gains 1, biases and sink logits 0.

    Weights that write to the residual stream are divided by sqrt(2 L), as in GPT-2.
    """
    weights, config, seed = {}, setting.config, setting.recipe.seed
    for name, shape in setting.shapes.items():
        kind = name.rsplit(".", 1)[-1]
        if kind.endswith("norm"):
            weights[name] = jnp.ones(shape, jnp.float32)
        elif len(shape) == 1:
            weights[name] = jnp.zeros(shape, jnp.float32)
        else:
            scale = DEVIATION / math.sqrt(2 * config.layers if kind in ("o", "down") else 1)
            # By name: equal parts of two models have equal initial weights.
            rng = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
            weights[name] = scale * jax.random.normal(rng, shape, jnp.float32)
    return weights


def init(setting: TrainingSetting, weights: Weights | None = None) -> Training:
    """The state of a run before its first step.

    weights: those that the run updates, in float32; None draws all of them.
    """
    if setting.mesh is None:
        return _fresh(setting, weights)
    fresh = partial(_fresh, setting)
    return jax.jit(fresh, out_shardings=shardings(setting, jax.eval_shape(fresh, weights)))(weights)


def abstract_training(setting: TrainingSetting) -> Training:
    """The state of a run as shapes, dtypes and shardings, without arrays."""
    training = jax.eval_shape(partial(_fresh, setting))
    local = SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=setting.sharding(leaf.shape) or local
        ),
        training,
    )


def _fresh(setting: TrainingSetting, weights: Weights | None = None) -> Training:
    if weights is None:
        drawn = fresh_weights(setting)
        weights = {name: weight for name, weight in drawn.items() if setting.trains(name)}
    moments = optimizer(setting.recipe).init(weights)
    return Training(weights, moments, jnp.int32(0), jnp.int32(-1))


def shardings(setting: TrainingSetting, training: Training) -> Training:
    """The sharding of every leaf over the mesh."""
    return jax.tree.map(lambda leaf: setting.sharding(leaf.shape), training)


def lr_schedule(recipe: Recipe) -> optax.Schedule:
    """The learning-rate schedule: a warm-up, then a cosine."""
    warm = max(1, round(recipe.warmup * recipe.steps))
    rest = max(1, recipe.steps - warm)
    up = optax.linear_schedule(recipe.lr / warm, recipe.lr, max(1, warm - 1))
    down = optax.cosine_decay_schedule(recipe.lr, rest, recipe.final_lr_ratio)
    return optax.join_schedules([up, down], [warm])


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Clipping, then AdamW; or Muon for the matrices inside the layers and AdamW for the rest."""
    betas = {"b1": recipe.beta1, "b2": recipe.beta2}
    rule = optax.adamw(lr_schedule(recipe), **betas, weight_decay=recipe.weight_decay, mask=_decays)
    if recipe.optimizer == "muon":
        inner = muon(
            lr_schedule(recipe),
            weight_decay=recipe.weight_decay,
            consistent_rms=0.2,  # updates as large as AdamW's, so that both use one lr
        )
        rule = optax.partition({"muon": inner, "adamw": rule}, _rule_of)
    return optax.chain(optax.clip_by_global_norm(recipe.clip), rule)


def _decays(weights: Weights) -> dict[str, object]:
    """Whether weight decay applies: to matrices."""
    return {
        name: jax.tree.map(lambda leaf: leaf.ndim > 1 and name not in SINKS, weight)  # noqa: B023
        for name, weight in weights.items()
    }


def _rule_of(weights: Weights) -> dict[str, str]:
    return {n: "muon" if n.rsplit(".", 1)[-1] in INNER else "adamw" for n in weights}


def samples(runs: Int32[Array, "B X"], front: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Inputs and targets [B,T], and the weight of each target, from runs of T + 1 tokens.

    front: the sink tokens. They replace the first tokens of each sample, so that models with and
    without sinks have the same targets. Predictions of a sink token have no loss.
    """
    inputs, targets = runs[:, :-1], runs[:, 1:]
    at = jnp.arange(inputs.shape[1])[None]
    for place, token in enumerate(front):
        inputs = jnp.where(at == place, token, inputs)
    counts = (at >= len(front) - 1).astype(jnp.float32)
    return inputs, targets, jnp.broadcast_to(counts, inputs.shape)


def objective(
    setting: TrainingSetting, weights: Weights, runs: Int32[Array, "B X"], z_loss: float = 0.0
) -> tuple[Float32[Array, ""], Float32[Array, "B T"], Array]:
    """The objective of a step, the natural-log loss of every target, and its share of the mean.

    The objective is the mean over all targets with a loss, plus z_loss x (log Z)^2.
    """
    inputs, targets, counts = samples(runs, setting.front)
    attention_fn = uncached.attend if setting.mesh is None else uncached.attend_on(setting.mesh)
    remat = setting.recipe.remat == "layers"
    decoder, hidden, _ = uncached.forward(
        setting.attention_config, weights, inputs, attention_fn, remat
    )
    share = counts / jnp.sum(counts)
    head = decoder.unembedding()
    cost, of_targets = cross_entropy(head, hidden, targets, share, z_loss, setting.mesh)
    return cost, of_targets, share


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(setting: TrainingSetting, weights: Weights) -> Weights:
    """The weights in the computation's dtype, replicated on every device while they are used.

    Gradients get the sharding of the weights. The embedding stays in float32: its gradient is a sum
    over tokens, and half precision would lose the terms of frequent tokens.
    """
    cast = {
        n: w.astype(setting.dtype) if w.ndim > 1 and n not in ("embed", SINK_TOKENS) else w
        for n, w in weights.items()
    }
    if setting.mesh is None:
        return cast
    return jax.lax.with_sharding_constraint(cast, NamedSharding(setting.mesh, PartitionSpec()))


def _scatter(setting: TrainingSetting, _: None, gradients: Weights) -> tuple[Weights]:
    wide = {name: gradient.astype(jnp.float32) for name, gradient in gradients.items()}
    if setting.mesh is None:
        return (wide,)
    shardings = {name: setting.sharding(gradient.shape) for name, gradient in wide.items()}
    return (jax.lax.with_sharding_constraint(wide, shardings),)


_gather.defvjp(lambda setting, weights: (_gather(setting, weights), None), _scatter)


def _with_frozen(setting: TrainingSetting, weights: Weights, frozen: Weights | None) -> Weights:
    """All weights in the computation's dtype, on every device; only `weights` have gradients."""
    all_weights = dict(frozen or {})
    if setting.mesh is not None and all_weights:
        everywhere = NamedSharding(setting.mesh, PartitionSpec())
        all_weights = jax.lax.with_sharding_constraint(all_weights, everywhere)
    return all_weights | _gather(setting, weights)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def update(
    setting: TrainingSetting,
    training: Training,
    parts: Int32[Array, "A R X"],
    frozen: Weights | None = None,
) -> tuple[Training, StepMetrics]:
    """One step. The weights stay unchanged from the first step that is not finite on.

    The loss is the mean over all targets, with z_loss x (log Z)^2 added (PaLM, section 5). frozen:
    the weights that are not updated.
    """

    def cost_of(weights: Weights, runs: Array) -> tuple[Array, Array]:
        gathered = _with_frozen(setting, weights, frozen)
        cost, target_losses, share = objective(setting, gathered, runs, setting.recipe.z_loss)
        return cost, jnp.sum(share * target_losses)

    def gradient(runs: Array) -> tuple[Array, Weights]:
        (_, loss), gradients = jax.value_and_grad(cost_of, has_aux=True)(training.weights, runs)
        return loss, gradients

    if len(parts) == 1:
        loss, gradients = gradient(parts[0])
    else:
        zero = jnp.float32(0), jax.tree.map(jnp.zeros_like, training.weights)
        add = lambda total, runs: (jax.tree.map(jnp.add, total, gradient(runs)), None)
        total, _ = jax.lax.scan(add, zero, parts)
        loss, gradients = jax.tree.map(lambda leaf: leaf / len(parts), total)
    norm = optax.tree.norm(gradients)
    updates, moments = optimizer(setting.recipe).update(
        gradients, training.moments, training.weights
    )
    weights = optax.apply_updates(training.weights, updates)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm) & (training.failed < 0)
    for change in jax.tree.leaves(updates):
        finite &= jnp.all(jnp.isfinite(change))
    weights, moments = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (weights, moments),
        (training.weights, training.moments),
    )
    failed = jnp.where(finite | (training.failed >= 0), training.failed, training.step)
    after = Training(weights, moments, step=training.step + 1, failed=failed)
    if setting.mesh is not None:
        after = jax.lax.with_sharding_constraint(after, shardings(setting, after))
    return after, StepMetrics(loss, norm)


@partial(jax.jit, static_argnums=0)
def mean_loss(
    setting: TrainingSetting,
    weights: Weights,
    runs: Int32[Array, "B X"],
    frozen: Weights | None = None,
) -> Array:
    """The mean loss of a batch, without the z-loss."""
    return objective(setting, _with_frozen(setting, weights, frozen), runs)[0]


def first_token_mass(
    setting: TrainingSetting, weights: Weights, runs: Int32[Array, "B X"], after: int = 0
) -> Float32[Array, "L N"]:
    """Attention of each head to the first token, averaged over the queries from `after` on.

    weights: all of them.
    """
    inputs, _, _ = samples(runs, setting.front)
    return uncached.mass_on_first(
        setting.attention_config, _gather(setting, weights), inputs, after
    )


def flops_per_token(
    config: Config, context: int, trains: Callable[[str], bool] = lambda name: True
) -> float:
    """Floating-point operations of training on one token: 6 N + 12 L (N H) T (PaLM, appendix B).

    N counts the weights that multiply a token; the embedding counts only if it is also the head.
    trains: whether a weight is updated; a frozen one has no gradient and counts 4 times.
    """
    sizes = {name: math.prod(shape) for name, (_, shape) in shapes(config).items()}
    if config.untied_head:
        sizes.pop("embed")
    weights = sum((6 if trains(name) else 4) * size for name, size in sizes.items())
    return weights + 12 * config.layers * config.heads * config.head_dim * context


class TrainingMemory(NamedTuple):
    """Bytes on one device.

    trained, moments, frozen: weights that are updated, their moments, and the others. temporaries:
    activations, gradients and logits of a step, as the compiler places them. total: with the batch.
    """

    trained: int
    moments: int
    frozen: int
    temporaries: int
    total: int


def plan_memory(setting: TrainingSetting) -> TrainingMemory:
    """Compile the step of a run for its devices; nothing of the run is in memory."""
    run = abstract_training(setting)
    frozen = {
        name: jax.ShapeDtypeStruct(of_weight, setting.dtype, sharding=setting.sharding(of_weight))
        for name, of_weight in setting.shapes.items()
        if not setting.trains(name)
    }
    recipe, mesh = setting.recipe, setting.mesh
    steps = recipe.grad_accum_steps
    parts = (steps, recipe.batch_size // steps, recipe.context + 1)
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec(None, "data"))
    batch = jax.ShapeDtypeStruct(parts, jnp.int32, sharding=sharding)
    memory = update.lower(setting, run, batch, frozen).compile().memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return TrainingMemory(
        _bytes(run.weights),
        _bytes(run.moments),
        _bytes(frozen),
        memory.temp_size_in_bytes,
        held + memory.temp_size_in_bytes,
    )


def _bytes(tree: object) -> int:
    """The bytes of arrays on one device, from their shapes and shardings."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        of_shard = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape
        total += math.prod(of_shard) * np.dtype(leaf.dtype).itemsize
    return total
