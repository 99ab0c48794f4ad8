"""Pretraining, with and without learnable sinks (StreamingLLM, section 3.3).

    jaxkv data --text BOOKS --vocab-size 4096 --out data
    jaxkv pretrain --preset tiny --data data --out run --set sinks=token

The same command again goes on where the last one stopped, and on a CPU ends with the weights that
it would have had without stopping, bit for bit. This file is the run, from top to bottom; the step
itself is in training.py, recipes are in recipes.py.

    OUT/log.jsonl    an object for every logged step
    OUT/curves.png   the same as a picture
    OUT/last, best   checkpoints; OUT/run.json says of what run
    OUT/hf           the trained model, as a Hugging Face folder
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv import files
from jaxkv.errors import UserError
from jaxkv.models import curves, data, device, training
from jaxkv.models.chat import Chat
from jaxkv.models.checkpoint import Checkpoints, own, writing
from jaxkv.models.compilation import clock, enable_compilation_cache
from jaxkv.models.data import Tokens
from jaxkv.models.hf.export import export
from jaxkv.models.llm import Llm
from jaxkv.models.recipes import SEEN, Recipe, config_of
from jaxkv.models.text import generate
from jaxkv.models.tokenizer import read_tokenizer
from jaxkv.models.training import Setting, Training
from jaxkv.models.uncached import SINK_HEAD
from jaxkv.sampling import Sampling
from jaxkv.typing import Array

# The tokens before every sample, by the recipe's `sinks`.
FRONT = {"token": (data.SINK,), "two_tokens": (data.SINK, data.SECOND_SINK)}
PROMPT, SAMPLE = "The", 60  # how a sample of text begins, and its new tokens
LOOKED_AT = 2  # samples whose attention is looked at


def pretrain(
    recipe: Recipe,
    tokens: Tokens,
    out: Path,
    mesh: Mesh | None = None,
    tell: Callable[[str], None] = print,
    stopped: Callable[[], bool] = lambda: False,
    tensorboard: bool = False,
) -> Path | None:
    """Train a model, or go on with it; the folder of the exported model.

    tokens: a data folder (models.data.read). out: a folder for this run alone. mesh: its axis
    `data` splits samples, weights and moments; every process calls this alike, and the first one
    writes. tell: is given lines to show. stopped: asked after every step; where it says True, a
    checkpoint is kept and None is returned.
    Raises UserError for data, a mesh or a folder that does not fit, a full disk, and a loss that is
    no number.
    """
    enable_compilation_cache()
    if jax.process_count() > 1 and (mesh is None or mesh.size != jax.device_count()):
        raise UserError(
            "several processes train one model over a mesh of all their devices; write --mesh "
            f"data={jax.device_count()}"
        )
    setting = setting_of(recipe, tokens, mesh)
    board = _board() if tensorboard else None
    data.batch(tokens, "train", recipe.seed, 0, recipe.rows, recipe.context)
    valid = _valid(setting, tokens)
    writes = jax.process_index() == 0
    run = {
        "recipe": {k: v for k, v in dataclasses.asdict(recipe).items() if k not in SEEN},
        "data": tokens.digest,
        "dtype": setting.dtype,
    }
    with contextlib.ExitStack() as held:
        together(lambda: held.enter_context(own(out, run)))
        checkpoints = held.enter_context(Checkpoints(out, run))
        trained = checkpoints.restore(training.shape(setting)) or training.begin(setting)
        log = Log(out / "log.jsonl", int(trained.step), writes, board)
        trained = train(setting, trained, tokens, valid, checkpoints, log, tell, stopped)
        checkpoints.wait()
        if int(trained.step) < recipe.steps:
            tell(f"stopped at step {int(trained.step)}; the same command goes on")
            return None
        weights, tokenizer = _whole(setting, trained.weights), tokens.folder / data.TOKENIZER
        if writes:
            with writing(out):
                export(out / "hf", setting.config, weights, tokenizer, setting.front)
        return out / "hf"


def train(
    setting: Setting,
    trained: Training,
    tokens: Tokens,
    valid: list[np.ndarray],
    checkpoints: Checkpoints,
    log: Log,
    tell: Callable[[str], None],
    stopped: Callable[[], bool],
) -> Training:
    """The loop: all steps that are left, or those until `stopped` says so."""
    recipe, first = setting.recipe, int(trained.step)
    name = title(setting, trained)
    used, there = 1 if setting.mesh is None else setting.mesh.size, jax.device_count()
    place = device.used_by(setting.mesh)
    tell(
        f"{name}, {setting.dtype}, {place}"
        + (f" ({there - used} more are idle: --mesh data={there})" if used < there else "")
        + (f"; going on from step {first}" if first else "")
    )
    left = first < recipe.steps
    tell(f"compiling; a line every {recipe.log_every} steps" if left else "all steps are done")
    rate, pace = training.rate(recipe), Pace(setting, first, log.seconds)
    for step in range(first, recipe.steps):
        runs = data.batch(tokens, "train", recipe.seed, step, recipe.rows, recipe.context)
        trained, told = training.update(setting, trained, setting.split(runs))
        done = step + 1
        looking = done == recipe.steps or done % recipe.look_every == 0
        logging = looking or 0 in (done % recipe.log_every, done % recipe.save_every)
        # Several processes must stop at one step, and agree on it only where they wait anyway.
        stop = (logging or jax.process_count() == 1) and anywhere(stopped())
        saving = looking or stop or done % recipe.save_every == 0
        if not (logging or stop):
            continue
        line = {
            "step": done,
            "loss": float(told.loss),
            "lr": float(rate(step)),
            "grad_norm": float(told.grad_norm),
            **pace.since(done),
        }
        _check(trained, checkpoints)
        if looking:
            line |= look(setting, trained, valid, tokens, tell)
            line |= {"device": place, "jax": jax.__version__}
        log.write(line)
        tell(shown(line, recipe))
        if looking:
            log.draw(name)
        # First the best: where a run goes on from, its best is kept.
        if looking and anywhere(log.is_best(line)):
            checkpoints.save(trained, "best")
        if saving:
            checkpoints.save(trained)
        if stop:
            break
        pace.resume(done)
    return trained


def _check(trained: Training, checkpoints: Checkpoints) -> None:
    """Raise UserError once a step had no numbers; since then the weights are as they were."""
    if int(trained.failed) < 0:
        return
    checkpoints.wait()
    kept = checkpoints.newest()
    there = "there is no checkpoint yet" if kept is None else f"the last good one is of step {kept}"
    raise UserError(
        f"the loss or its gradient is no number at step {int(trained.failed) + 1}; {there}; set a "
        "smaller lr, a longer warmup, or dtype=float32, with another --out"
    )


def anywhere(flag: bool) -> bool:
    """Whether it holds in any process of the run; all of them ask together."""
    if jax.process_count() == 1:
        return flag
    return bool(process_allgather(np.array([flag])).any())


def together(act: Callable[[], object]) -> None:
    """What the first process alone does, and all must know to have failed."""
    told = b""
    if jax.process_index() == 0:
        try:
            act()
        except UserError as error:
            told = str(error).encode()[:1000]
    if jax.process_count() > 1:
        message = np.frombuffer(told.ljust(1000, b"\0"), np.uint8)
        told = bytes(np.asarray(broadcast_one_to_all(message))).rstrip(b"\0")
    if told:
        raise UserError(told.decode(errors="ignore"))


def setting_of(recipe: Recipe, tokens: Tokens, mesh: Mesh | None = None) -> Setting:
    """What the steps of a recipe compile to on these data and devices."""
    front = tuple(tokens.id_of(name) for name in FRONT.get(recipe.sinks, ()))
    return setting_for(recipe, tokens.vocab, front, tokens.id_of(data.END), mesh)


def setting_for(
    recipe: Recipe, vocab: int, front: tuple[int, ...], end: int, mesh: Mesh | None = None
) -> Setting:
    """What the steps of a recipe compile to; front and end: ids of the sink tokens and of END."""
    training.check_mesh(mesh, recipe)
    config = config_of(recipe, vocab, next(iter(front), None), end)
    native = device.native_dtype(jax.local_devices()[0])
    dtype = native if recipe.dtype == "auto" else recipe.dtype
    return Setting(recipe, config, front, dtype, mesh)


def _valid(setting: Setting, tokens: Tokens) -> list[np.ndarray]:
    """The samples of every look, in parts as large as those of training; as many as there are."""
    recipe = setting.recipe
    size = recipe.rows // recipe.accumulate
    most = tokens.count("valid") // recipe.context // size - 1
    parts = max(1, min(most, -(-recipe.valid_samples // size)))
    return [data.batch(tokens, "valid", 0, part, size, recipe.context) for part in range(parts)]


def look(
    setting: Setting,
    trained: Training,
    valid: list[np.ndarray],
    tokens: Tokens,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """What a run is worth by now: loss on held-back text, where its heads look, how it writes."""
    losses = [
        float(training.mean_loss(setting, trained.weights, setting.place_samples(part)))
        for part in valid
    ]
    weights = _whole(setting, trained.weights)
    alone, some = dataclasses.replace(setting, mesh=None), valid[0][:LOOKED_AT]
    mass = np.asarray(
        training.first_token_mass(alone, weights, some, min(64, setting.recipe.context // 2))
    )
    text = write(setting, weights, tokens)
    tell(f"  {PROMPT}{text}".replace("\n", " "))
    return {
        "valid_loss": float(np.mean(losses)),
        "first_token": float(mass.mean()),
        "first_token_most": float(mass.max()),
        "sink_heads": float((mass > SINK_HEAD).mean()),
        "text": PROMPT + text,
    }


def write(setting: Setting, weights: dict[str, Array], tokens: Tokens) -> str:
    """Some text of a model in training."""
    context = setting.recipe.context
    tokenizer = dataclasses.replace(read_tokenizer(tokens.folder), front=setting.front)
    cast = {name: weight.astype(setting.dtype) for name, weight in weights.items()}
    llm = Llm(setting.config, cast, tokenizer, Chat(None, ()), tokens.folder, setting.dtype)
    policy = f"streaming:sinks=4,window={max(1, min(252, context - 4))}"
    sampling = Sampling(temperature=0.8, top_p=0.95)
    return generate(llm, PROMPT, policy, SAMPLE, sampling=sampling, ignore_eos=True).text


def _whole(setting: Setting, weights: dict[str, Array]) -> dict[str, Array]:
    """The weights in one piece on this process's own device; all processes call it together."""
    if setting.mesh is None:
        return weights
    same = _spread(NamedSharding(setting.mesh, PartitionSpec()))(weights)
    return jax.tree.map(lambda leaf: leaf.addressable_shards[0].data, same)


@functools.cache
def _spread(everywhere: NamedSharding) -> Callable:
    return jax.jit(lambda tree: tree, out_shardings=everywhere)


def shown(line: dict[str, Any], recipe: Recipe) -> str:
    """A logged step as people read it."""
    left = (recipe.steps - line["step"]) * recipe.rows * recipe.context
    minutes = left / max(line["tokens_per_second"], 1e-9) / 60
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


def title(setting: Setting, trained: Training) -> str:
    recipe, count = setting.recipe, sum(weight.size for weight in trained.weights.values())
    batch = f"{recipe.rows} x {recipe.context} tokens a step"
    return f"{count:,} weights, sinks={recipe.sinks}, {batch}"


class Pace:
    """Tokens a second and the share of the hardware's arithmetic, without looks and compiling.

    seconds: what earlier starts of the run took, all in all, which is what it tells as well.
    """

    def __init__(self, setting: Setting, first: int, seconds: float):
        self._tokens = setting.recipe.rows * setting.recipe.context
        flops = training.flops_per_token(setting.config, setting.recipe.context)
        devices = 1 if setting.mesh is None else setting.mesh.size
        # The devices of a CPU are one processor.
        self._peak = device.peak() * (1 if jax.default_backend() == "cpu" else devices)
        self._flops, self._start = flops, time.perf_counter() - seconds
        clock()
        self.resume(first)

    def since(self, done: int) -> dict[str, float]:
        """Figures of the steps since the last call; call it when they are really done."""
        now = time.perf_counter()
        spent = now - self._begun - (clock().seconds - self._compiled)
        pace = (done - self._done) * self._tokens / max(spent, 1e-9)
        return {
            "tokens_per_second": pace,
            "mfu": pace * self._flops / self._peak,
            "seconds": now - self._start,
        }

    def resume(self, done: int) -> None:
        self._done, self._begun, self._compiled = done, time.perf_counter(), clock().seconds


class Log:
    """OUT/log.jsonl: a line a logged step, none of a step that is still to come."""

    def __init__(self, path: Path, step: int, writes: bool, board: Callable | None):
        self._path, self._writes = path, writes
        held = path.read_text("utf-8").splitlines() if path.exists() else []
        # What was written behind the checkpoint will be written again.
        self.lines = [line for line in map(_parsed, held) if line and line["step"] <= step]
        self.seconds = self.lines[-1]["seconds"] if self.lines else 0.0
        there = str(path.parent / "tensorboard")
        self._board = board(there, purge_step=step + 1) if board and writes else None
        if writes:
            text = "".join(json.dumps(line) + "\n" for line in self.lines)
            with writing(path.parent):
                files.write({path: text.encode()})

    def write(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        if self._writes:
            with writing(self._path.parent), self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        if self._board:
            for name, value in line.items():
                if isinstance(value, float):
                    self._board.add_scalar(name, value, line["step"])
            self._board.flush()

    def draw(self, title: str) -> None:
        """The picture of all lines beside the log."""
        if self._writes:
            with writing(self._path.parent):
                files.write({self._path.with_name("curves.png"): curves.draw(self.lines, title)})

    def is_best(self, line: dict[str, Any]) -> bool:
        """Whether no look before this one had a smaller loss, as the process that writes has it."""
        losses = [x["valid_loss"] for x in self.lines if "valid_loss" in x]
        return self._writes and line["valid_loss"] <= min(losses)


def _parsed(text: str) -> dict[str, Any] | None:
    """A line of the log; None for one that a killed process left half."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _board() -> Callable:
    """What writes for TensorBoard; asked for before a run begins, in every process."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise UserError(
            "--tensorboard needs the package tensorboardX; pip install tensorboardX, or leave the "
            "flag away"
        ) from None
    return SummaryWriter
