"""Sink logits distilled from the model with its first token: one number per head and layer.

In a window without the first token, the attention that a head gives to that token goes to others. A
sink logit takes it without a token. Here the logits are trained, and all weights are frozen. The
loss is KL(all || window): between the predictions from all tokens of a sample and those from the
last `--window` tokens. `jaxkv pretrain --train sinks --set sink_variant=logit` trains them on text,
which gives the same losses with this learning rate (record sinks_distilled).

    python -m jaxkv.evals.training.distilled_logits --texts BOOKS --out out/distilled
    python -m jaxkv.evals.training.sinks_in_front --variants distilled=out/distilled --texts OTHERS
"""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.evals.lib.record import make_parser, run_command
from jaxkv.evals.lib.run import SMOLLM2, flag
from jaxkv.evals.lib.text import first_tokens
from jaxkv.models.loading import sinks
from jaxkv.models.loading.source import open_source
from jaxkv.models.network import uncached
from jaxkv.models.network.config import Config
from jaxkv.models.network.decoder import Weights
from jaxkv.models.tools.measurement import divergence
from jaxkv.models.tools.run_metadata import run_metadata
from jaxkv.typing import Array, Float32, Int32

LOG = "distilled.json"  # beside the file of sinks
EVERY = 5  # steps between two lines
FINAL_LR_RATIO = 0.05  # the final learning rate over the first


FLAGS = (
    flag("--model", SMOLLM2, "a model folder, GGUF file or Hub id"),
    flag("--texts", type=Path, required=True, nargs="+", about="text files"),
    flag("--out", type=Path, required=True, about="folder of the file of sinks"),
    flag("--window", 256, "tokens that a query sees", minimum=1),
    flag("--context", 512, "tokens of a sample"),
    flag("--rows", 1, "samples a step", minimum=1),
    flag("--steps", 160, minimum=1),
    flag("--lr", 0.1, minimum=1e-9),
    flag("--seed", 0, "the order of the samples", minimum=0),
)


def main() -> None:
    parser = make_parser("jaxkv.evals.training.distilled_logits", __doc__)
    for name, settings in FLAGS:
        parser.add_argument(name, **settings)
    options = parser.parse_args()
    if options.window >= options.context:
        raise UserError(
            f"--window must be less than --context {options.context}, got {options.window}; give "
            "another"
        )
    if (options.out / sinks.FILE).exists():
        raise UserError(
            f"--out must be a new folder, and {options.out} has {sinks.FILE}; name another"
        )
    options.out.mkdir(parents=True, exist_ok=True)  # fails before minutes of training
    llm = models.load(options.model, "float32")
    about = run_metadata("distilled_logits", [*llm.files, *options.texts], [options.seed])
    needed = -(-options.steps * options.rows // len(options.texts))  # samples of each text
    texts = first_tokens(llm, options.texts, needed * options.context)
    samples = np.concatenate([np.reshape(ids, (needed, -1)) for ids in texts.values()])
    samples = np.random.default_rng(options.seed).permutation(samples)[
        : options.steps * options.rows
    ]
    batches = samples.reshape(options.steps, options.rows, -1).astype(np.int32)
    logits, losses, seconds = distil(llm.config, llm.weights, batches, options.window, options.lr)
    if not np.isfinite(losses).all():
        raise SystemExit(f"the divergence must be finite, got {losses[-1]}; give a smaller --lr")
    named = {f"layers.{i}.sink_logits": row for i, row in enumerate(logits)}
    fingerprint = open_source(llm.path).fingerprint()
    print(sinks.write(options.out / sinks.FILE, named, len(logits), fingerprint))
    fields = {k: v for k, v in vars(options).items() if isinstance(v, int | float)}
    about |= fields | {"divergence": losses, "seconds": seconds}
    (options.out / LOG).write_text(json.dumps(about) + "\n", encoding="utf-8")


def distil(
    config: Config, weights: Weights, batches: Int32[np.ndarray, "S B T"], window: int, lr: float
) -> tuple[Float32[np.ndarray, "L N"], list[float], float]:
    """The logits after a step per batch, the divergence before each step, and the seconds."""
    schedule = optax.cosine_decay_schedule(lr, len(batches), FINAL_LR_RATIO)
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    logits = jnp.zeros((config.layers, config.heads), jnp.float32)
    moments, losses, start = adam.init(logits), [], perf_counter()
    for number, batch in enumerate(batches):
        loss, gradient = jax.value_and_grad(_divergence)(
            logits, config, window, weights, jnp.asarray(batch)
        )
        updates, moments = adam.update(gradient, moments)
        logits = logits + updates
        losses.append(float(loss))
        if number % EVERY == EVERY - 1:
            rate = (perf_counter() - start) / (number + 1)
            seconds_left = rate * (len(batches) - number - 1)
            mean = np.mean(losses[-EVERY:])
            print(f"step {number + 1} of {len(batches)}: KL {mean:.4f}, {seconds_left:.0f} s left",
                  flush=True)  # fmt: skip
    return np.asarray(logits), losses, perf_counter() - start


@partial(jax.jit, static_argnums=(1, 2))
def _divergence(
    logits: Float32[Array, "L N"],
    config: Config,
    window: int,
    weights: Weights,
    ids: Int32[Array, "B T"],
) -> Float32[Array, ""]:
    """KL(all || window with logits) of the tokens that do not see the first one, in nats."""
    decoder, hidden, _ = uncached.forward(config, weights, ids)
    full = jax.lax.stop_gradient(decoder.logits(hidden[:, window:]))
    limited: dict[str, Any] = {"windows": (window,) * config.layers, "sink_logit": "learned"}
    windowed = dataclasses.replace(config, **limited)
    named = {f"layers.{i}.sink_logits": row for i, row in enumerate(logits)}
    decoder, hidden, _ = uncached.forward(windowed, {**weights, **named}, ids)
    return jnp.mean(divergence(full, decoder.logits(hidden[:, window:]))[0])


if __name__ == "__main__":
    run_command(main)
