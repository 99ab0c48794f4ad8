"""Pretraining, with and without learnable sinks (StreamingLLM, section 3.3).

    jaxkv data --text BOOKS --vocab-size 4096 --out data
    jaxkv pretrain --preset tiny --data data --out run --set sink_variant=token

The same command again resumes the run. On a CPU the final weights are bit-identical to those of an
uninterrupted run. This file contains the training loop; the step is in training.py, recipes are in
recipes.py.

    OUT/log.jsonl    an object for every logged step
    OUT/curves.png   the same as a picture; OUT/tensorboard with --tensorboard
    OUT/last, best   checkpoints; OUT/run.json describes the run
    OUT/hf           the trained model, as a Hugging Face folder
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.errors import UserError
from jaxkv.models.generation.text import generate
from jaxkv.models.loading.chat import Chat
from jaxkv.models.loading.compilation import enable_compilation_cache
from jaxkv.models.loading.llm import Llm
from jaxkv.models.loading.tokenizer import read_tokenizer
from jaxkv.models.network import device
from jaxkv.models.network.decoder import Weights
from jaxkv.models.network.uncached import SINK_HEAD
from jaxkv.models.training import data, training
from jaxkv.models.training.checkpoint import Checkpoints
from jaxkv.models.training.continued import BaseModel
from jaxkv.models.training.data import DataFolder
from jaxkv.models.training.export import export
from jaxkv.models.training.recipes import CONTINUED_FIELDS, MAY_CHANGE, Recipe, decoder_config
from jaxkv.models.training.run_folder import lock_folder, writing
from jaxkv.models.training.run_log import Log, Pace, tensorboard_writer
from jaxkv.models.training.training import Training, TrainingSetting
from jaxkv.sampling import Sampling
from jaxkv.state import memory
from jaxkv.state.sharding import bytes_per_device
from jaxkv.typing import Array

PROMPT, SAMPLE = "The", 60  # the prompt of a text sample, and its new tokens
FEWER_TEMPORARIES = "--set grad_accum_steps=N with a larger N, or --set remat=layers"
ATTENTION_SAMPLES, ATTENTION_LENGTH = 2, 2048  # samples whose attention is analysed, and tokens


def pretrain(
    recipe: Recipe,
    tokens: DataFolder,
    out: Path,
    mesh: Mesh | None = None,
    tell: Callable[[str], None] = print,
    stopped: Callable[[], bool] = lambda: False,
    tensorboard: bool = False,
    base: BaseModel | None = None,
) -> Path | None:
    """Train a model, or resume training. Returns the exported folder, or file of sinks.

    tokens: a data folder (data.read). out: a folder for this run alone. mesh: its axis `data`
    splits samples, weights and moments; every process makes the same call, and the first one
    writes. tell: called with lines to show. stopped: called after every step; if it returns True, a
    checkpoint is saved and None is returned. base: a model to start from; where its weights are
    frozen and only sinks are trained, the result is a file of sinks.
    Raises UserError for data, a mesh or a folder that does not fit, a full disk, and a loss that is
    not finite.
    """
    enable_compilation_cache()
    if jax.process_count() > 1 and (mesh is None or mesh.size != jax.device_count()):
        raise UserError(
            "several processes need a mesh over all their devices; give --mesh "
            f"data={jax.device_count()}"
        )
    setting = (
        setting_of(recipe, tokens, mesh) if base is None else base.setting(recipe, tokens, mesh)
    )
    board = tensorboard_writer() if tensorboard else None
    # Raises UserError now if the data have too few tokens for a batch.
    data.batch(tokens, "train", recipe.seed, 0, recipe.batch_size, recipe.context)
    valid = validation(setting, tokens)
    writes = jax.process_index() == 0
    run = _identity_of(setting, tokens, base)
    with contextlib.ExitStack() as stack:
        in_first_process(lambda: stack.enter_context(lock_folder(out, run)))
        checkpoints = stack.enter_context(Checkpoints(out, run))
        weights, frozen = (
            (None, {}) if base is None else base.weights(setting, tokens.id_of(data.END))
        )
        restored = checkpoints.restore(training.abstract_training(setting))
        trained = restored or training.init(setting, weights)
        del weights, restored
        log = Log(out / "log.jsonl", int(trained.step), writes, board)
        trained = train(setting, trained, tokens, valid, checkpoints, log, tell, stopped, frozen)
        checkpoints.wait()
        if int(trained.step) < recipe.steps:
            tell(f"stopped at step {int(trained.step)}; the same command resumes")
            return None
        weights = _unsharded(setting, frozen | trained.weights)
        with writing(out):
            if base is not None:
                return base.export(out, setting, weights, writes)
            if writes:
                tokenizer = tokens.folder / data.TOKENIZER
                export(out / "hf", setting.config, weights, tokenizer, setting.front)
        return out / "hf"


def _identity_of(
    setting: TrainingSetting, tokens: DataFolder, base: BaseModel | None
) -> dict[str, Any]:
    """What run.json and every checkpoint record of a run: a resumed run must have the same."""
    recipe = dataclasses.asdict(setting.recipe)
    # Without a model to start from these are defaults, which earlier versions did not record.
    omitted = (*MAY_CHANGE, *(CONTINUED_FIELDS if base is None else ()))
    recorded = {name: value for name, value in recipe.items() if name not in omitted}
    run = {"recipe": recorded, "data": tokens.digest, "dtype": setting.dtype}
    return run | ({} if base is None else {"model": base.fingerprint})


def train(
    setting: TrainingSetting,
    trained: Training,
    tokens: DataFolder,
    valid: list[np.ndarray],
    checkpoints: Checkpoints,
    log: Log,
    tell: Callable[[str], None],
    stopped: Callable[[], bool],
    frozen: Weights,
) -> Training:
    """Run the remaining steps, or those until `stopped` returns True."""
    recipe, first = setting.recipe, int(trained.step)
    name, place = title(setting, trained), device.used_by(setting.mesh)
    _announce(setting, name, place, first, tell)
    rate, pace = training.lr_schedule(recipe), Pace(setting, first, log.seconds)
    for step in range(first, recipe.steps):
        runs = data.batch(tokens, "train", recipe.seed, step, recipe.batch_size, recipe.context)
        with memory.explained(partial(_memory_uses, trained), FEWER_TEMPORARIES):
            trained, metrics = training.update(setting, trained, setting.split(runs), frozen)
        done = step + 1
        evaluating = done == recipe.steps or done % recipe.eval_every == 0
        logging = evaluating or 0 in (done % recipe.log_every, done % recipe.save_every)
        # Several processes must stop at the same step; they agree on it where they wait anyway.
        stop = (logging or jax.process_count() == 1) and anywhere(stopped())
        saving = evaluating or stop or done % recipe.save_every == 0
        if not (logging or stop):
            continue
        line = {
            "step": done,
            "loss": float(metrics.loss),
            "lr": float(rate(step)),
            "grad_norm": float(metrics.grad_norm),
            **pace.since(done),
        }
        _check(trained, checkpoints)
        if evaluating:
            line |= evaluate(setting, trained, valid, tokens, tell, frozen)
            line |= {"device": place, "jax": jax.__version__}
        log.write(line)
        tell(format_line(line, recipe))
        if evaluating:
            log.draw(name)
        # The best first: a run that resumes from `last` then has its best checkpoint too.
        if evaluating and anywhere(log.is_best(line)):
            checkpoints.save(trained, "best")
        if saving:
            checkpoints.save(trained)
        if stop:
            break
        pace.resume(done)
    return trained


def _announce(
    setting: TrainingSetting, name: str, place: str, first: int, tell: Callable[[str], None]
) -> None:
    """Tell what is trained, where, and from which step on."""
    recipe, used = setting.recipe, 1 if setting.mesh is None else setting.mesh.size
    available = jax.device_count()
    part = recipe.batch_size // recipe.grad_accum_steps
    usable = max(count for count in range(1, available + 1) if part % count == 0)
    idle = f" ({available - used} more are idle: --mesh data={usable})"
    resumed = f"; resuming from step {first}" if first else ""
    tell(f"{name}, {setting.dtype}, {place}{idle if used < usable else ''}{resumed}")
    finished = first >= recipe.steps
    tell("all steps are done" if finished else f"compiling; a line every {recipe.log_every} steps")


def _check(trained: Training, checkpoints: Checkpoints) -> None:
    """Raise UserError after a step that was not finite; it left the weights unchanged."""
    if int(trained.failed) < 0:
        return
    checkpoints.wait()
    newest = checkpoints.newest()
    good = (
        "there is no checkpoint yet" if newest is None else f"the last good one is of step {newest}"
    )
    raise UserError(
        f"the loss or its gradient is not finite at step {int(trained.failed) + 1}; {good}; set a "
        "smaller lr, a longer warmup, or dtype=float32, with another --out"
    )


def anywhere(flag: bool) -> bool:
    """Whether `flag` is true in any process of the run; all of them call this together."""
    if jax.process_count() == 1:
        return flag
    return bool(process_allgather(np.array([flag])).any())


def in_first_process(act: Callable[[], object]) -> None:
    """Call `act` in the first process alone; its UserError is raised in all processes."""
    failure = b""
    if jax.process_index() == 0:
        try:
            act()
        except UserError as error:
            failure = str(error).encode()[:1000]
    if jax.process_count() > 1:
        message = np.frombuffer(failure.ljust(1000, b"\0"), np.uint8)
        failure = bytes(np.asarray(broadcast_one_to_all(message))).rstrip(b"\0")
    if failure:
        raise UserError(failure.decode(errors="ignore"))


def _memory_uses(trained: Training) -> list[memory.MemoryUse]:
    state = bytes_per_device((trained.weights, trained.moments))
    return [memory.MemoryUse("weights and moments", state, "a smaller model, or --mesh data=N")]


def setting_of(recipe: Recipe, tokens: DataFolder, mesh: Mesh | None = None) -> TrainingSetting:
    """The setting of a recipe on these data and devices."""
    return setting_for(
        recipe, tokens.vocab, tokens.front(recipe.sink_variant), tokens.id_of(data.END), mesh
    )


def setting_for(
    recipe: Recipe, vocab: int, front: tuple[int, ...], end: int, mesh: Mesh | None = None
) -> TrainingSetting:
    """The setting of a recipe; front and end: the ids of the sink tokens and of END."""
    training.check_mesh(mesh, recipe)
    config = decoder_config(recipe, vocab, next(iter(front), None), end)
    return TrainingSetting(recipe, config, front, training.dtype_of(recipe), mesh)


def validation(setting: TrainingSetting, tokens: DataFolder) -> list[np.ndarray]:
    """The validation samples, in parts of one accumulation step; fewer if the split is small."""
    recipe = setting.recipe
    size = recipe.batch_size // recipe.grad_accum_steps
    max_parts = tokens.count("valid") // recipe.context // size - 1
    parts = max(1, min(max_parts, -(-recipe.valid_samples // size)))
    return [data.batch(tokens, "valid", 0, part, size, recipe.context) for part in range(parts)]


def evaluate(
    setting: TrainingSetting,
    trained: Training,
    valid: list[np.ndarray],
    tokens: DataFolder,
    tell: Callable[[str], None],
    frozen: Weights,
) -> dict[str, Any]:
    """Validation loss, attention to the first token, and a sample of text."""
    losses = [
        float(training.mean_loss(setting, trained.weights, setting.place_samples(part), frozen))
        for part in valid
    ]
    weights = _unsharded(setting, frozen | trained.weights)
    alone = dataclasses.replace(setting, mesh=None)
    samples = valid[0][:ATTENTION_SAMPLES, : ATTENTION_LENGTH + 1]
    mass = np.asarray(
        training.first_token_mass(alone, weights, samples, min(64, setting.recipe.context // 2))
    )
    text = sample_text(setting, weights, tokens)
    tell(f"  {PROMPT}{text}".replace("\n", " "))
    return {
        "valid_loss": float(np.mean(losses)),
        "first_token": float(mass.mean()),
        "first_token_most": float(mass.max()),
        "sink_heads": float((mass > SINK_HEAD).mean()),
        "text": PROMPT + text,
    }


def sample_text(setting: TrainingSetting, weights: dict[str, Array], tokens: DataFolder) -> str:
    """A sample of text from a model in training."""
    context = setting.recipe.context
    tokenizer = dataclasses.replace(read_tokenizer(tokens.folder), front=setting.front)
    cast = {name: weight.astype(setting.dtype) for name, weight in weights.items()}
    llm = Llm(setting.config, cast, tokenizer, Chat(None, ()), tokens.folder, setting.dtype)
    policy = f"streaming:sinks=4,window={max(1, min(252, context - 4))}"
    sampling = Sampling(temperature=0.8, top_p=0.95)
    return generate(llm, PROMPT, policy, SAMPLE, sampling=sampling, ignore_eos=True).text


def _unsharded(setting: TrainingSetting, weights: dict[str, Array]) -> dict[str, Array]:
    """The unsharded weights on this process's own device; all processes call it together."""
    if setting.mesh is None:
        return weights
    replicated = _spread(NamedSharding(setting.mesh, PartitionSpec()))(weights)
    return jax.tree.map(lambda leaf: leaf.addressable_shards[0].data, replicated)


@functools.cache
def _spread(everywhere: NamedSharding) -> Callable:
    return jax.jit(lambda tree: tree, out_shardings=everywhere)


def format_line(line: dict[str, Any], recipe: Recipe) -> str:
    """A logged step as text for the terminal."""
    tokens_left = (recipe.steps - line["step"]) * recipe.batch_size * recipe.context
    minutes = tokens_left / max(line["tokens_per_second"], 1e-9) / 60
    text = (
        f"step {line['step']}/{recipe.steps}  loss {line['loss']:.4f}  lr {line['lr']:.2e}  "
        f"grad {line['grad_norm']:.2f}  {line['tokens_per_second']:,.0f} tokens/s  "
        f"MFU {line['mfu']:.0%}  {minutes:.0f} min left"
    )
    if "valid_loss" in line:
        text += (
            f"\n  valid {line['valid_loss']:.4f}, attention on the first token "
            f"{line['first_token']:.3f} (most {line['first_token_most']:.3f}), heads above "
            f"{SINK_HEAD}: {line['sink_heads']:.0%}"
        )
    return text


def title(setting: TrainingSetting, trained: Training) -> str:
    """The run in one line: trained weights, all weights if more, sinks, and tokens a step."""
    recipe, count = setting.recipe, sum(weight.size for weight in trained.weights.values())
    every = sum(math.prod(shape) for shape in setting.shapes.values())
    total = "" if count == every else f" of {every:,}"
    batch = f"{recipe.batch_size} x {recipe.context} tokens a step"
    return f"{count:,}{total} weights, sink_variant={recipe.sink_variant}, {batch}"
