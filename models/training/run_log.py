"""The record of a training run while it runs: speed, log.jsonl, its picture, TensorBoard."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxkv import files
from jaxkv.errors import UserError
from jaxkv.models.loading.compilation import clock
from jaxkv.models.network import device
from jaxkv.models.tools import pictures
from jaxkv.models.tools.palette import COLOURS
from jaxkv.models.training import training
from jaxkv.models.training.run_folder import writing
from jaxkv.models.training.training import TrainingSetting

BLUE, ORANGE, GREY = COLOURS["streaming"], COLOURS["window"], COLOURS["full"]
SMOOTH = 0.9  # weight of earlier steps in the smoothed loss


class Pace:
    """Tokens per second and model FLOPs utilisation, without evaluation and compiling.

    seconds: the total time of earlier starts of the run; `since` reports the time in total.
    """

    def __init__(self, setting: TrainingSetting, first: int, seconds: float):
        self._tokens = setting.recipe.batch_size * setting.recipe.context
        flops = training.flops_per_token(setting.config, setting.recipe.context, setting.trains)
        devices = 1 if setting.mesh is None else setting.mesh.size
        # The virtual devices of a CPU share one processor.
        self._peak = device.peak() * (1 if jax.default_backend() == "cpu" else devices)
        self._flops, self._start = flops, time.perf_counter() - seconds
        clock()
        self.resume(first)

    def since(self, done: int) -> dict[str, float]:
        """Measurements of the steps since `resume`; call it when those steps are complete."""
        now = time.perf_counter()
        spent = now - self._begun - (clock().seconds - self._compiled)
        pace = (done - self._done) * self._tokens / max(spent, 1e-9)
        return {
            "tokens_per_second": pace,
            "mfu": pace * self._flops / self._peak,
            "seconds": now - self._start,
        }

    def resume(self, done: int) -> None:
        """Start a new measurement after step `done`."""
        self._done, self._begun, self._compiled = done, time.perf_counter(), clock().seconds


class Log:
    """OUT/log.jsonl: one line per logged step, without steps after the checkpoint."""

    def __init__(self, path: Path, step: int, writes: bool, board: Callable | None):
        self._path, self._writes = path, writes
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        # Steps after the checkpoint will be logged again.
        self.lines = [line for line in map(_parsed, lines) if line and line["step"] <= step]
        self.seconds = self.lines[-1]["seconds"] if self.lines else 0.0
        folder = str(path.parent / "tensorboard")
        self._board = board(folder, purge_step=step + 1) if board and writes else None
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
                files.write({self._path.with_name("curves.png"): draw_curves(self.lines, title)})

    def is_best(self, line: dict[str, Any]) -> bool:
        """Whether no earlier validation loss is smaller; False in processes that do not write."""
        losses = [x["valid_loss"] for x in self.lines if "valid_loss" in x]
        return self._writes and line["valid_loss"] <= min(losses)


def _parsed(text: str) -> dict[str, Any] | None:
    """A line of the log; None for a partial line of a killed process."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def tensorboard_writer() -> Callable:
    """The TensorBoard writer class, imported before a run begins in every process."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise UserError(
            "--tensorboard needs the package tensorboardX; pip install 'jaxkv[train]', or omit "
            "the flag"
        ) from None
    return SummaryWriter


def draw_curves(lines: Sequence[Mapping[str, Any]], title: str) -> bytes:
    """A PNG of loss, learning rate, gradient norm, speed and sinks over the steps."""
    figure, all_axes = pictures.begin(10, 6, columns=2, rows=2)
    loss, rate, norm, sinks = all_axes
    steps = [line["step"] for line in lines]
    values = [line["loss"] for line in lines]
    loss.plot(steps, values, color=GREY, alpha=0.4, linewidth=0.8, label="a step")
    loss.plot(steps, smoothed(values), color=BLUE, label="smoothed")
    evaluated = [line for line in lines if "valid_loss" in line]
    seen = [line["step"] for line in evaluated]
    loss.plot(seen, [line["valid_loss"] for line in evaluated], ".-", color=ORANGE, label="valid")
    loss.set_ylabel("loss (nats a token)")
    loss.legend()
    rate.plot(steps, [line["lr"] for line in lines], color=BLUE)
    rate.set_ylabel("learning rate")
    norm.plot(steps, [line["grad_norm"] for line in lines], color=BLUE, linewidth=0.8)
    norm.set_ylabel("gradient norm, before clipping")
    norm.set_yscale("log")
    sinks.plot(seen, [line["first_token"] for line in evaluated], ".-", color=BLUE, label="mean")
    first_token_max = [line["first_token_most"] for line in evaluated]
    sinks.plot(seen, first_token_max, ".-", color=ORANGE, label="the head with the most")
    sinks.set_ylabel("attention on the first token")
    sinks.set_ylim(0, 1)
    sinks.legend()
    for axes in all_axes:
        axes.set_xlabel("step")
    caption = f"smoothed: a running mean, {SMOOTH:g} of it from earlier steps"
    return pictures.finish(figure, caption, dpi=110, title=title)


def smoothed(values: Sequence[float]) -> np.ndarray:
    """A running mean that starts unbiased."""
    total, weight, means = 0.0, 0.0, []
    for value in values:
        total = SMOOTH * total + (1 - SMOOTH) * value
        weight = SMOOTH * weight + (1 - SMOOTH)
        means.append(total / weight)
    return np.array(means)
