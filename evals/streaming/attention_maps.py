"""Where a real model's attention goes: maps, and the share of the first token (Figure 2).

Maps are means over many short stretches of text, as in the paper. The share of the first token is
the mean over the queries after the first 64 of longer stretches, by layer and head. The sink metric
is that of Gu et al. (2025, arXiv 2410.10781, equation 2): the share of heads whose mean attention
on the first token of 64 is above 0.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.evals.lib.run import SMOLLM2, Measure, Run, flag, run
from jaxkv.evals.lib.text import beginnings
from jaxkv.evals.lib.verdict import Results, above, claim
from jaxkv.models.loading.llm import Llm
from jaxkv.models.network import uncached
from jaxkv.models.network.config import Config
from jaxkv.models.network.decoder import Weights
from jaxkv.models.tools.sinks import SKIP, first_token
from jaxkv.typing import Array, Float32, Int32

MAP, MAPS = 16, 256  # tokens of a stretch, and stretches, as in the paper's Figure 2
METRIC, METRICS = 64, 100  # the same, as Gu et al. do
LONG = 512  # tokens of a longer stretch


def measure(run: Run) -> dict[str, Any]:
    """All measurements of one model."""
    llm = run.llm
    texts = beginnings(llm, run.options.texts, 50_000)
    by_text = {
        name: first_token(llm, samples([ids], LONG, run.options.stretches))
        for name, ids in texts.items()
    }
    by_head = np.mean(list(by_text.values()), axis=0)
    metric = np.mean(
        [
            uncached.mass_on_first(llm.config, llm.weights, ids[None], 0) > uncached.SINK_HEAD
            for ids in samples(list(texts.values()), METRIC, METRICS)
        ]
    )
    seen = maps(llm.config, llm.weights, samples(list(texts.values()), MAP, MAPS))
    return {
        "model": llm.name,
        "texts": {name: mass.mean(1).tolist() for name, mass in by_text.items()},
        "even_attention": float(np.mean(1 / np.arange(SKIP + 1, LONG + 1))),
        "first_token": {
            "by_layer": by_head.mean(1).tolist(),
            "by_head": by_head.tolist(),
            "heads_above_share": float((by_head > uncached.SINK_HEAD).mean()),
            "most": by_head.max(),
        },
        "sink_metric": metric,
        "maps": {str(layer): np.asarray(seen[layer].mean(0)).tolist() for layer in shown(llm)},
    }


def shown(llm: Llm) -> list[int]:
    """The layers whose maps are drawn: the two lowest, and others evenly up to the last."""
    return sorted({0, 1, *np.linspace(2, llm.config.layers - 1, 4).round().astype(int).tolist()})


def samples(texts: Sequence[Sequence[int]], length: int, count: int) -> Int32[np.ndarray, "B T"]:
    """Evenly spaced stretches of the texts."""
    ids = np.concatenate([np.asarray(text, np.int32) for text in texts])
    starts = np.linspace(0, len(ids) - length, count + 1)[:-1].astype(int)
    return np.stack([ids[start : start + length] for start in starts])


@partial(jax.jit, static_argnums=0)
def maps(config: Config, weights: Weights, ids: Int32[Array, "B T"]) -> Float32[Array, "L N T T"]:
    """Attention of every layer and head, averaged over samples."""
    _, _, seen = uncached.forward(config, weights, ids, uncached.attend_with_probabilities)
    return jnp.stack([jnp.mean(layer, axis=0) for layer in seen])


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
