"""Does a model need its first tokens? Sinks, cache sizes, positions (StreamingLLM, Tables 1, 2, 6).

Every policy reads the same text; losses are compared token by token with those of 4 sinks and a
window of 252. Full attention and the window with re-computation read only the beginning, because
their cost grows with the square of the length. Nothing is scored if full attention misses the loss
that is recorded for the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.evals.lib.record import Record
from jaxkv.evals.streaming.endless import tokens_of
from jaxkv.models import recompute, uncached
from jaxkv.models.llm import Llm

BASE = "streaming:sinks=4,window=252"
SINKS = [f"streaming:sinks={n},window={256 - n}" for n in (0, 1, 2, 4, 8)]
CACHES = [f"streaming:sinks=4,window={size - 4}" for size in (64, 128, 256, 512)]
OTHERS = [
    f"{BASE},positions=absolute",
    "streaming:sinks=4,window=253",  # what the published code sees: it evicts after attending
]
NEWLINES = "4 newlines in place of the first tokens"
SPAN = 1_000  # losses per mean for standard errors, because nearby losses are correlated


def main() -> None:
    ask = argparse.ArgumentParser(prog="python -m jaxkv.evals.streaming.sinks", description=__doc__)
    ask.add_argument("--model", required=True, help="a model folder or Hub id")
    ask.add_argument("--texts", required=True, type=Path, nargs="+",
                     help="text files, or folders with manifest.json")  # fmt: skip
    ask.add_argument("--tokens", type=int, default=400_000)
    ask.add_argument(
        "--beginning", type=int, default=8_192, help="tokens for full attention and re-computation"
    )
    ask.add_argument("--quick", action="store_true", help="write to out/, which no claim reads")
    given = ask.parse_args()

    llm = models.load(given.model)
    check(llm)
    texts = {
        (path if path.is_dir() else path.parent).name: tokens_of(llm, path, given.tokens + 1)
        for path in given.texts
    }
    files = [file for _, some in texts.values() for file in some]
    record = Record("sinks", [*llm.files, *files], quick=given.quick)
    results: dict[str, Any] = {
        "attention_on_first_token": first_token(llm, next(iter(texts.values()))[0][:512]),
        "even_attention": float(np.mean(1 / np.arange(65, 513))),
        "texts": {name: run(llm, ids, given.beginning, name) for name, (ids, _) in texts.items()},
    }
    print("wrote", record.save(results))


def check(llm: Llm) -> None:
    """Exit if full attention misses the perplexity that is recorded beside the model."""
    file = llm.path / "perplexity.json"
    if not file.exists():
        print(f"no {file.name} beside the model: full attention is not checked")
        return
    reported = json.loads(file.read_text("utf-8"))
    count = reported["dense512"]["predictions"]
    found = np.exp(
        gather(models.losses(llm, reported["first4096_ids"][: count + 1], "full")).mean()
    )
    if abs(found / reported["dense512"]["ppl"] - 1) > 1e-3:
        raise SystemExit(f"full attention gives perplexity {found:.4f}, not {reported['dense512']}")


def run(llm: Llm, ids: Sequence[int], beginning: int, name: str) -> dict[str, Any]:
    """Every policy on one text: perplexity, and loss minus the base."""
    losses = {}
    for policy in dict.fromkeys([*SINKS, *CACHES, *OTHERS]):
        losses[policy] = gather(models.losses(llm, ids, policy, chunk=200))
        print(f"{name}: {policy}: {np.exp(losses[policy].mean()):.4f}", flush=True)
    newline = llm.tokenizer.encode("a\n")[-1]
    losses[NEWLINES] = gather(models.losses(llm, [newline] * 4 + list(ids[1:]), BASE, 200))[4:]
    begun = {policy: loss[:beginning] for policy, loss in losses.items()}
    some = ids[: beginning + 1]
    begun["full"] = gather(models.losses(llm, some, f"full:max={len(some)}"))
    begun["recompute:window=256"] = gather(recompute.losses(llm, some, 256))
    return {
        "predictions": len(losses[BASE]),
        "perplexity": {policy: line(loss, losses[BASE]) for policy, loss in losses.items()},
        "predictions_of_beginning": len(begun[BASE]),
        "beginning": {policy: line(loss, begun[BASE]) for policy, loss in begun.items()},
    }


def gather(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate(list(parts)).astype(np.float64)


def line(loss: np.ndarray, base: np.ndarray) -> dict[str, float]:
    """Perplexity, and the mean difference of paired losses, aligned at the end."""
    size = min(len(loss), len(base))
    difference = loss[-size:] - base[-size:]
    spans = difference[: size - size % SPAN].reshape(-1, SPAN).mean(1)
    return {
        "perplexity": np.exp(loss.mean()),
        "loss": loss.mean(),
        "loss_over_base": difference.mean(),
        "standard_error": spans.std(ddof=1) / len(spans) ** 0.5 if len(spans) > 1 else 0.0,
    }


def first_token(llm: Llm, ids: Sequence[int], skip: int = 64) -> list[float]:
    """Mean attention on the first token by layer; a sink gets a third or more.

    skip: number of first queries to ignore, because they have few keys.
    """

    mass = uncached.mass_on_first(llm.config, llm.weights, jnp.asarray([ids], jnp.int32), skip)
    return [float(layer) for layer in mass.mean(1)]


if __name__ == "__main__":
    main()
