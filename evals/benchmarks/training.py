"""Training of a published model with jaxkv and with a plain PyTorch loop, in one process.

Both start from the same float32 weights, read the same batches and follow one recipe: AdamW that
decays matrices alone, clipping by the global norm, and a learning rate per step. Their losses must
then agree, and this is checked. Steps alternate. PyTorch's loop is that of its documentation:
logits, cross_entropy, backward, clip_grad_norm_, and AdamW's step. The group `peers` installs it.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import sleep
from typing import Any

import jax
import numpy as np

from jaxkv import models
from jaxkv.evals.benchmarks.weights import as_folder
from jaxkv.evals.lib.record import Record, make_parser, run_command
from jaxkv.evals.lib.text import PASSAGE
from jaxkv.evals.lib.timing import Variant, bar, rate, ratio, time_rounds, timed
from jaxkv.evals.lib.verdict import Statement, above
from jaxkv.models.loading.llm import Llm
from jaxkv.models.training import training
from jaxkv.models.training.continued import BaseModel, open_base
from jaxkv.models.training.recipes import Recipe, recipe_from
from jaxkv.models.training.training import TrainingSetting
from jaxkv.typing import Int32

ASKED = 0.9  # of PyTorch's tokens per second
CLOSE = 2e-4  # nats: the largest difference of two losses of one step
PAUSE = 0.3  # seconds before a step, in which the threads of the other side go to sleep
Step = Callable[[np.ndarray], float]  # trains on a batch and returns its loss


def main() -> None:
    parser = make_parser("jaxkv.evals.benchmarks.training", __doc__, rounds=7)
    parser.add_argument("--model", default="smollm2-135m", help="a model folder or GGUF file")
    parser.add_argument("--rows", type=int, default=4, help="samples a step")
    parser.add_argument("--context", type=int, default=512, help="tokens of a sample")
    options = parser.parse_args()
    llm = models.load(options.model, "float32")
    record = Record("training_peers", [*llm.files, PASSAGE], [0], quick=options.quick)
    record.finish(measure(llm, options.rows, options.context, options.rounds))


def measure(
    llm: Llm, rows: int, context: int, rounds: int, settings: Sequence[str] = ()
) -> dict[str, Any]:
    """Losses and times of both sides; settings: more fields of the recipe.

    Raises SystemExit where their losses differ.
    """
    base = open_base(llm.path)
    sizes = [f"batch_size={rows}", f"context={context}", f"steps={rounds + 1}", "dtype=float32"]
    recipe = recipe_from(base.config, [*sizes, *settings])
    batches = samples(base, recipe)
    with tempfile.TemporaryDirectory() as folder:
        with_torch = torch_step(as_folder(llm, Path(folder)), recipe)
    losses: dict[str, list[float]] = {"jaxkv": [], "PyTorch": []}
    steps = {"jaxkv": jaxkv_step(base, recipe), "PyTorch": with_torch}
    variants = {name: stepping(steps[name], batches, losses[name]) for name in steps}
    seconds = time_rounds(variants, rounds, f"{rows} x {context} tokens a step")
    difference = float(np.abs(np.subtract(*losses.values())).max())
    if not difference <= CLOSE:  # also where one is NaN
        raise SystemExit(
            f"losses of a step must agree within {CLOSE} nats, got {difference:.5f}; the sides do "
            "not train the same model"
        )
    tokens, over = rows * context, ratio(seconds["PyTorch"], seconds["jaxkv"])
    return {
        "recipe": dataclasses.asdict(recipe),
        "tokens_per_second": {name: rate(tokens, taken) for name, taken in seconds.items()},
        "speed_over_torch": over,
        "losses": losses,
        "largest_difference": difference,
        "bars": [bar(f"training of {llm.name} over a PyTorch loop", over, ">=", ASKED)],
    }


def samples(base: BaseModel, recipe: Recipe) -> Int32[np.ndarray, "S B X"]:
    """A batch per step, cut from the passage at random."""
    ids = np.array(base.tokenizer.encode(PASSAGE.read_text("utf-8")), np.int32)
    length = recipe.context + 1
    starts = np.random.default_rng(recipe.seed).integers(
        0, len(ids) - length, (recipe.steps, recipe.batch_size)
    )
    return ids[starts[..., None] + np.arange(length)]


def stepping(step: Step, batches: Sequence[np.ndarray], losses: list[float]) -> Variant:
    """A variant that trains on the next batch and stores its loss."""

    measured = timed(lambda: losses.append(step(batches[len(losses)])))

    def after_pause() -> float:
        sleep(PAUSE)
        return measured()

    return after_pause


def jaxkv_step(base: BaseModel, recipe: Recipe) -> Step:
    """The step of `jaxkv pretrain --from`."""
    setting = TrainingSetting(recipe, base.config, (), recipe.dtype)
    weights, frozen = base.weights(setting, base.config.eos[0])
    state = [training.begin(setting, weights)]

    def step(batch: np.ndarray) -> float:
        state[0], update = training.update(setting, state[0], setting.split(batch), frozen)
        return float(jax.block_until_ready((state[0], update))[1].loss)

    return step


def torch_step(folder: Path, recipe: Recipe) -> Step:
    """The step of a plain PyTorch loop on transformers' model."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [w for w in weights if w.ndim <= 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=(recipe.beta1, recipe.beta2))
    rates = iter([float(training.rate(recipe)(step)) for step in range(recipe.steps)])

    def step(batch: np.ndarray) -> float:
        tokens, lr = torch.from_numpy(batch).long(), next(rates)
        for group in adam.param_groups:
            group["lr"] = lr
        adam.zero_grad()
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, recipe.clip)
        adam.step()
        return loss.item()

    return step


STATEMENTS = (
    Statement("docs/training.md", "is faster than a step of a plain PyTorch loop",
              "training_peers", [above("speed_over_torch", 1)]),
)  # fmt: skip

if __name__ == "__main__":
    run_command(main)
