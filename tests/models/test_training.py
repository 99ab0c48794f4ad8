"""The training step: equal to torch, in parts and over devices, and its failures."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.errors import UserError
from jaxkv.models.training import data, training
from jaxkv.models.training.export import export
from jaxkv.models.training.pretrain import setting_of
from jaxkv.models.training.recipes import PRESETS, decoder_config, read_recipe
from jaxkv.state.sharding import mesh_of
from tests.models.training_data import small

pytestmark = pytest.mark.usefixtures("optax_promotes_dtypes")


def steps(setting, tokens, count):
    """The state after `count` steps, and the loss and gradient norm of each step."""
    recipe, trained, metrics = setting.recipe, training.init(setting), []
    for step in range(count):
        runs = data.batch(tokens, "train", recipe.seed, step, recipe.batch_size, recipe.context)
        trained, step_metrics = training.update(setting, trained, setting.split(runs))
        metrics.append([float(step_metrics.loss), float(step_metrics.grad_norm)])
    return trained, np.array(metrics)


def largest_difference(actual, expected):
    """The largest difference between the weights of two runs."""
    apart = jax.tree.map(
        lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()),
        actual.weights,
        expected.weights,
    )
    return max(apart.values())


@pytest.mark.parity
def test_torch_takes_the_same_steps(tmp_path, tokens):
    """Loss, gradient norm, clipping, schedule and AdamW, from the same weights and samples."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    recipe = small("steps=8", "warmup=0.3", "clip=0.5", "z_loss=1e-2")
    setting = setting_of(recipe, tokens)
    initial = training.init(setting)
    folder = export(
        tmp_path / "hf", setting.config, initial.weights, tokens.folder / data.TOKENIZER
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    rule = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.weight_decay},
         {"params": vectors, "weight_decay": 0.0}],
        betas=(recipe.beta1, recipe.beta2), eps=1e-8,
    )  # fmt: skip
    actual, expected = steps(setting, tokens, recipe.steps)[1], []
    for step in range(recipe.steps):
        runs = data.batch(tokens, "train", 0, step, recipe.batch_size, recipe.context)
        runs = torch.tensor(runs.astype(np.int64))
        logits = model(runs[:, :-1]).logits
        log_z = torch.logsumexp(logits, -1)
        picked = torch.gather(logits, 2, runs[:, 1:, None])[..., 0]
        loss = (log_z - picked).mean()
        rule.zero_grad()
        (loss + recipe.z_loss * (log_z**2).mean()).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        warm = round(0.3 * 8)
        if step < warm:
            rate = recipe.lr * (step + 1) / warm
        else:
            done = (step - warm) / (8 - warm)
            final = recipe.final_lr_ratio
            share = final + (1 - final) * (1 + np.cos(np.pi * done)) / 2
            rate = recipe.lr * share
        for group in rule.param_groups:
            group["lr"] = rate
        rule.step()
        expected.append([loss.item(), norm.item()])
    np.testing.assert_allclose(actual, expected, rtol=2e-4)


@pytest.mark.parametrize(
    "sinks, optimizer",
    [("none", "adamw"), ("zero", "muon"), ("token", "muon"), ("two_tokens", "adamw"),
     ("logit", "muon")],
)  # fmt: skip
def test_every_variant_learns(tokens, sinks, optimizer):
    setting = setting_of(small(f"sink_variant={sinks}", f"optimizer={optimizer}"), tokens)
    before = training.init(setting).weights
    trained, metrics = steps(setting, tokens, 12)
    assert metrics[-3:, 0].mean() < metrics[:2, 0].mean() - 0.5
    unchanged = [n for n, w in trained.weights.items() if np.array_equal(w, before[n])]
    assert not unchanged
    assert ("layers.0.sink_logits" in trained.weights) == (sinks == "logit")


def test_variants_share_initial_weights(tokens):
    """Weights that variants share are equal at one seed. Matrices change with the seed."""
    variants = [
        training.init(setting_of(small(f"sink_variant={sinks}"), tokens)).weights
        for sinks in ("none", "logit", "token")
    ]
    reseeded = training.init(setting_of(small("seed=1"), tokens)).weights
    for name, weight in variants[0].items():
        assert all(np.array_equal(weight, variant[name]) for variant in variants[1:])
        assert np.array_equal(weight, reseeded[name]) == (weight.ndim == 1)


def test_sink_tokens_replace_the_first_inputs_and_are_no_targets():
    runs = jnp.arange(10, 22).reshape(2, 6)
    inputs, targets, counts = training.samples(runs, ())
    assert inputs.tolist() == runs[:, :-1].tolist() and bool(counts.all())
    for front in ((1,), (1, 2)):
        changed, sample_targets, counts = training.samples(runs, front)
        assert changed[:, : len(front)].tolist() == [list(front)] * 2
        assert changed[:, len(front) :].tolist() == inputs[:, len(front) :].tolist()
        assert sample_targets.tolist() == targets.tolist()  # no target is a sink token
        # The second of two sink tokens would have to be predicted by the first.
        assert counts.tolist() == [[1] * 5 if len(front) == 1 else [0, 1, 1, 1, 1]] * 2


def test_gradient_accumulation_equals_the_whole_batch(tokens):
    one_batch, metrics = steps(setting_of(small(), tokens), tokens, 4)
    parts, metrics_in_parts = steps(setting_of(small("grad_accum_steps=4"), tokens), tokens, 4)
    np.testing.assert_allclose(metrics, metrics_in_parts, rtol=1e-5)
    assert largest_difference(one_batch, parts) < 1e-4


@pytest.mark.parametrize(
    "devices, sinks, optimizer",
    [(2, "logit", "adamw"), (8, "token", "muon")],
)
def test_the_same_losses_on_many_devices(tokens, devices, sinks, optimizer):
    recipe = small(f"sink_variant={sinks}", f"optimizer={optimizer}", "lr=2e-3")
    alone, metrics = steps(setting_of(recipe, tokens), tokens, 4)
    setting = setting_of(recipe, tokens, mesh_of(f"data={devices}"))
    spread, metrics_spread = steps(setting, tokens, 4)
    np.testing.assert_allclose(metrics, metrics_spread, rtol=2e-5)
    assert largest_difference(alone, spread) < 2e-4
    # Weights and moments are sharded: one device stores little more than its share.
    sizes = [leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(spread)]
    assert sum(sizes) < 1.1 * sum(leaf.size for leaf in jax.tree.leaves(spread)) / devices


@pytest.mark.parametrize("devices", [1, 2])
def test_remat_takes_the_same_steps_in_less_memory(tokens, devices):
    mesh = mesh_of(f"data={devices}") if devices > 1 else None
    runs = []
    for remat in ("none", "layers"):
        recipe = small("layers=4", "context=64", "sink_variant=logit", "lr=2e-3", f"remat={remat}")
        setting = setting_of(recipe, tokens, mesh)
        runs.append((*steps(setting, tokens, 3), training.plan_memory(setting).temporaries))
    (kept, metrics, plain_bytes), (again, metrics_again, remat_bytes) = runs
    np.testing.assert_allclose(metrics, metrics_again, rtol=1e-5)
    assert largest_difference(kept, again) < 1e-4
    # XLA:CPU of jax 0.7.2 joins both computations of a layer again.
    assert remat_bytes < (0.6 if jax.__version_info__ >= (0, 12) else 1) * plain_bytes


def test_a_step_with_a_nan_gradient_changes_nothing(tokens):
    setting = setting_of(small(), tokens)
    trained, _ = steps(setting, tokens, 2)
    broken = trained._replace(weights=trained.weights | {"norm": trained.weights["norm"] * 1e38})
    before = jax.tree.map(np.array, broken.weights)
    runs = setting.split(data.batch(tokens, "train", 0, 2, 8, 16))
    for step in (2, 3):
        broken, metrics = training.update(setting, broken, runs)
        assert not np.isfinite(float(metrics.grad_norm))
        assert (int(broken.failed), int(broken.step)) == (2, step + 1)
    assert all(np.array_equal(before[n], w) for n, w in broken.weights.items())
    # A later finite step changes nothing either: the last finite state stays.
    finite = broken._replace(weights=jax.tree.map(lambda w: w * 0 + 0.01, broken.weights))
    last_finite = jax.tree.map(np.array, finite.weights)
    finite, metrics = training.update(setting, finite, runs)
    assert np.isfinite(float(metrics.loss)) and int(finite.failed) == 2
    assert all(np.array_equal(last_finite[n], w) for n, w in finite.weights.items())


def test_the_learning_rate():
    recipe = read_recipe("tiny", ["steps=1000", "warmup=0.05", "lr=1e-3"])
    rate = np.array([float(training.lr_schedule(recipe)(step)) for step in range(1000)])
    assert np.all(np.diff(rate[:50]) > 0) and rate[0] == pytest.approx(1e-3 / 50, rel=1e-4)
    assert rate.max() == pytest.approx(1e-3) and 0.99e-4 < rate[-1] < 1.06e-4
    assert np.all(np.diff(rate[50:]) <= 1e-9)
    middle = 1e-3 * (0.1 + 0.9 * (1 + np.cos(np.pi * 550 / 950)) / 2)
    assert rate[600] == pytest.approx(middle, rel=1e-4)


def test_half_precision_keeps_float32_weights(tokens):
    """Computation is in bfloat16. The weights stay float32, so small updates are not lost."""
    recipe = small("dtype=bfloat16", "steps=30")
    trained, metrics = steps(setting_of(recipe, tokens), tokens, 6)
    _, exact = steps(setting_of(small("steps=30"), tokens), tokens, 6)
    assert {w.dtype.name for w in trained.weights.values()} == {"float32"}
    np.testing.assert_allclose(metrics[:, 0], exact[:, 0], rtol=0.02)


def test_a_frequent_token_keeps_its_gradient_in_half_precision(tokens):
    """The gradient of its embedding sums thousands of terms, which is too inexact in bfloat16."""
    gradients = {}
    for dtype in ("float32", "bfloat16"):
        setting = setting_of(small(f"dtype={dtype}", "context=512"), tokens)
        runs = np.full((8, 513), 7, np.int32)
        runs[:, 1::2] = np.arange(100, 356)[None] % 200 + 50  # a different token after each
        weights = training.init(setting).weights

        def of_inputs(weights, setting=setting, runs=runs):
            return training.objective(setting, training._gather(setting, weights), runs)[0]

        gradient = jax.jit(jax.grad(of_inputs))(weights)["embed"]
        assert gradient.dtype == jnp.float32
        gradients[dtype] = np.asarray(gradient, np.float64)
    off = np.linalg.norm(gradients["bfloat16"] - gradients["float32"], axis=1)
    assert off[7] < 0.02 * np.linalg.norm(gradients["float32"][7])


def test_a_nan_update_changes_nothing(tokens):
    setting = setting_of(small("warmup=0", "weight_decay=0"), tokens)
    setting = dataclasses.replace(
        setting, recipe=dataclasses.replace(setting.recipe, lr=float("inf"))
    )
    trained = training.init(setting)
    before = jax.tree.map(np.array, trained.weights)
    runs = setting.split(data.batch(tokens, "train", 0, 0, 8, 16))
    trained, metrics = training.update(setting, trained, runs)
    assert np.isfinite(float(metrics.grad_norm)) and int(trained.failed) == 0
    assert all(np.array_equal(before[name], w) for name, w in trained.weights.items())


def test_operations_per_token():
    """6 N + 12 L (N H) T, compared with an independent count."""
    config = partial(decoder_config, bos=None, eos=0)
    tiny = config(PRESETS["tiny"], 4096)
    assert training.flops_per_token(tiny, 512) == 26_409_600
    # An embedding that is not the head is a table look-up without operations.
    untied_head = dataclasses.replace(tiny, tied=False)
    assert training.flops_per_token(untied_head, 512) == 26_409_600


def test_the_first_token_mass(tokens):
    """The first token is the sink token, where there is one."""
    setting = setting_of(small("sink_variant=token"), tokens)
    weights = training.init(setting).weights
    runs = data.batch(tokens, "valid", 0, 0, 3, 16)
    mass = training.first_token_mass(setting, weights, runs, 8)
    assert mass.shape == (1, 4)
    # Initial weights attend almost uniformly: 1/(t+1) to each token.
    np.testing.assert_allclose(mass, np.mean(1 / np.arange(9, 17)), rtol=0.05)


def test_bad_meshes_and_recipes_are_refused(tokens):
    for mesh, message in (("data=2,model=2", "one mesh axis, data"), ("model=2", "--mesh data=2")):
        with pytest.raises(UserError, match=message):
            setting_of(small(), tokens, mesh_of(mesh))
    with pytest.raises(UserError, match=r"must divide .* 6 .* over 8 devices"):
        setting_of(small("batch_size=6"), tokens, mesh_of("data=8"))
    with pytest.raises(UserError, match=r"4 \(batch_size=8 in 2 parts\) over 8"):
        setting_of(small("grad_accum_steps=2"), tokens, mesh_of("data=8"))
    with pytest.raises(UserError, match="heads must divide width"):
        setting_of(small("heads=5"), tokens)


BAD = {
    "tinny": "unknown preset 'tinny'; did you mean 'tiny'. .there are backcopy, tiny, ",
    "tiny sinks=token": "got 'sinks'; did you mean 'sink_variant'. .there are layers, width, ",
    "tiny batchsize=8": "got 'batchsize'; did you mean 'batch_size'",
    "tiny sinks": "field=value, got 'sinks'",
    "tiny sink_variant=sink": "must be one of none, zero, token, two_tokens, logit, got 'sink'",
    "tiny layers=0": "layers must be a whole number of at least 1, got '0'",
    "tiny layers=1.5": "layers must be a whole number",
    "tiny lr=-1": "lr must be a number of at least",
    "tiny lr=1e300": "lr must be a number from 1e-12 to 1e.38, got '1e300'; set such a number",
    "tiny lr=nan": "lr must be a number",
    "tiny beta2=1.5": "beta2 must be a number from 0 to 0.999999, got '1.5'",
    "tiny seed=-1": "seed must be a whole number from 0 to",
    "tiny grad_accum_steps=3": "grad_accum_steps must divide batch_size, got 3 and 8",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_settings_are_refused(words):
    preset, *settings = words.split()
    with pytest.raises(UserError, match=BAD[words]):
        read_recipe(preset, settings)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weight_decay_shrinks_matrices_and_no_sink_or_gain(optimizer):
    recipe = small(f"optimizer={optimizer}", "weight_decay=0.1", "warmup=0")
    matrices = {"embed": (4, 4), "layers.0.q": (4, 4), "layers.0.down": (4, 4)}
    undecayed = {"norm": (4,), "layers.0.q_bias": (4,), "sink_tokens": (2, 4)}
    undecayed["sink_logits"] = (2, 4)
    weights = {name: jnp.ones(shape) for name, shape in (matrices | undecayed).items()}
    rule = training.optimizer(recipe)
    changes, _ = rule.update(jax.tree.map(jnp.zeros_like, weights), rule.init(weights), weights)
    assert {name for name, change in changes.items() if np.any(change)} == set(matrices)
