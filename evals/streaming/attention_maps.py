"""The share of a real model's attention that the first token gets (Figure 2).

It is the mean over the queries after the first 64 of stretches of text, by layer. The sink metric
is that of Gu et al. (2025, arXiv 2410.10781, equation 2): the share of heads whose mean attention
on the first token of 64 is above 0.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv.evals.lib.run import SMOLLM2, Measure, Run, flag, run
from jaxkv.evals.lib.text import beginnings
from jaxkv.evals.lib.verdict import Results, above, claim
from jaxkv.models.network import uncached
from jaxkv.models.tools.sinks import SKIP, first_token
from jaxkv.typing import Int32

METRIC, METRICS = 64, 100  # tokens of a stretch, and stretches, as Gu et al. do
LONG = 512  # tokens of a longer stretch


def measure(run: Run) -> dict[str, Any]:
    """All measurements of one model."""
    llm = run.llm
    texts = beginnings(llm, run.options.texts, 50_000)
    by_text = {
        name: first_token(llm, samples([ids], LONG, run.options.stretches))
        for name, ids in texts.items()
    }
    metric = np.mean(
        [
            uncached.mass_on_first(llm.config, llm.weights, ids[None], 0) > uncached.SINK_HEAD
            for ids in samples(list(texts.values()), METRIC, METRICS)
        ]
    )
    return {
        "model": llm.name,
        "texts": {name: mass.mean(1).tolist() for name, mass in by_text.items()},
        "even_attention": float(np.mean(1 / np.arange(SKIP + 1, LONG + 1))),
        "first_token": {"by_layer": np.mean(list(by_text.values()), axis=(0, 2)).tolist()},
        "sink_metric": metric,
    }


def samples(texts: Sequence[Sequence[int]], length: int, count: int) -> Int32[np.ndarray, "B T"]:
    """Evenly spaced stretches of the texts."""
    ids = np.concatenate([np.asarray(text, np.int32) for text in texts])
    starts = np.linspace(0, len(ids) - length, count + 1)[:-1].astype(int)
    return np.stack([ids[start : start + length] for start in starts])


def shares_over_even(results: Results) -> dict[str, float]:
    """The attention on the first token over that of even attention, by layer above the second."""
    shares = results["first_token"]["by_layer"]
    return {
        f"layer {layer}": share / results["even_attention"]
        for layer, share in enumerate(shares)
        if layer >= 2
    }


MEASURE = Measure(
    "attention_maps", measure, [flag("--stretches", 2, "longer stretches per text")],
    model=SMOLLM2, texts=1,
)  # fmt: skip
CLAIMS = (
    claim("Figure 2: over half of the attention, Llama-2-7B",
          "Each layer above the two lowest gives the first token over three times its even share",
          "attention_maps", above(shares_over_even, 3), unit="times"),
)  # fmt: skip


if __name__ == "__main__":
    run(MEASURE)
