"""Weights in int8 on SmolLM2-135M-Instruct: bytes, loss and decoding speed against float32.

The loss is that of the first tokens of a novel under the default cache. Decoding continues from a
prompt; both forms alternate in one process. `bandwidth` is that of a float32 product of a matrix
with a vector, measured between them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import defaults, models
from jaxkv.evals.lib.record import Record, spread, standard_error
from jaxkv.evals.lib.text import tokens_of
from jaxkv.evals.lib.timing import bar, decode_variant, prompt, ratio, time_rounds, timed
from jaxkv.models import smollm2
from jaxkv.models.llm import Llm

FORMS = {"float32": None, "int8": "int8"}
SIDE = 4096  # of the matrix that measures the bandwidth
BIN = 256  # tokens whose mean difference is one sample of the interval


def main() -> None:
    ask = argparse.ArgumentParser(prog="python -m jaxkv.evals.speed.int8", description=__doc__)
    ask.add_argument("--text", type=Path, required=True, help="a novel")
    ask.add_argument("--tokens", type=int, default=20_000, help="to score")
    ask.add_argument("--rounds", type=int, default=9)
    ask.add_argument("--quick", action="store_true", help="small numbers, into out/")
    given = ask.parse_args()
    if given.quick:
        given.tokens, given.rounds = 600, 2
    record = Record("int8", [smollm2.fetch(), given.text], quick=given.quick)
    llms = {name: models.load(smollm2.NAME, "float32", weights=w) for name, w in FORMS.items()}
    found = loss(llms, given.text, given.tokens) | speed(llms, given.rounds)
    found["bytes"] = {name: nbytes(llm) for name, llm in llms.items()}
    found["bars"] = [
        bar("bytes of weights in int8 over float32",
            found["bytes"]["int8"] / found["bytes"]["float32"], "<=", 0.26),
        bar("loss of int8 weights over float32, nats per token, absolute",
            abs(found["difference"]), "<=", 0.01),
        bar("decoding with int8 weights over float32, batch 1: tokens per second",
            found["faster"]["batch 1"], ">=", 1.5),
    ]  # fmt: skip
    record.finish(found)


def nbytes(llm: Llm) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(llm.weights))


def loss(llms: dict[str, Llm], text: Path, tokens: int) -> dict[str, Any]:
    """The mean loss of each form, and that of int8 minus float32 with its standard error."""
    ids, _ = tokens_of(llms["float32"], text, tokens)
    losses = {name: models.score(llm, ids).losses for name, llm in llms.items()}
    apart = losses["int8"] - losses["float32"]
    bins = [float(np.mean(apart[at : at + BIN])) for at in range(0, len(apart) - BIN + 1, BIN)]
    return {
        "text": text.stem,
        "tokens": len(ids),
        "loss": {name: float(np.mean(one)) for name, one in losses.items()},
        "difference": float(np.mean(apart)),
        "standard_error": standard_error(bins),
    }


def speed(llms: dict[str, Llm], rounds: int, new: int = 32) -> dict[str, Any]:
    """Tokens a second of each form, their ratio, and the share of the memory bandwidth."""
    matrix = jnp.ones((SIDE, SIDE), jnp.float32)
    product, vector = jax.jit(lambda m, v: m @ v), jnp.ones((SIDE,), jnp.float32)
    variants = {"bandwidth": timed(lambda: jax.block_until_ready(product(matrix, vector)))}
    for batch in (1, 8):
        for name, llm in llms.items():
            stream = models.Stream(llm, defaults.POLICY, batch=batch)
            stream.prefill([prompt(llm, 300, seed) for seed in range(batch)])
            variants[f"{name}, batch {batch}"] = decode_variant(stream, new)
    seconds = time_rounds(variants, rounds, "int8")
    bandwidth = matrix.nbytes / np.array(seconds["bandwidth"])
    one = {name: np.array(seconds[f"{name}, batch 1"]) / new for name in llms}
    return {
        "policy": defaults.POLICY,
        "tokens_per_second": {
            name: spread(int(name[-1]) * new / np.array(values))
            for name, values in seconds.items()
            if name != "bandwidth"
        },
        "faster": {
            f"batch {batch}": ratio(
                seconds[f"float32, batch {batch}"], seconds[f"int8, batch {batch}"]
            )
            for batch in (1, 8)
        },
        "bandwidth": spread(bandwidth),
        "share_of_bandwidth": {
            name: spread(nbytes(llm) / one[name] / bandwidth) for name, llm in llms.items()
        },
    }


if __name__ == "__main__":
    main()
