"""StreamingLLM's tables on a real model: sinks, cache sizes, positions (Tables 1, 2, 6; Figure 3).

Every case reads the beginning of the same texts. Its losses are compared, token by token, with
those of 4 sinks in a cache of the same size, after the cache is full. Intervals are over texts.
Re-computation is measured at every 64th token, because each of its predictions costs a forward pass
over the window. Parts are kept under out/, so that an interrupted run continues.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv import models
from jaxkv.evals.lib.parts import Parts
from jaxkv.evals.lib.record import Record
from jaxkv.evals.streaming.endless import tokens_of
from jaxkv.models import recompute
from jaxkv.models.llm import Llm

COUNTS = (0, 1, 2, 4, 8)  # sinks
SIZES = (256, 1024, 2048)  # of a cache, for Tables 1 and 2
CACHES = (64, 128, 256, 512, 1024, 2048)  # of a cache, for Table 6
SIZE, SINKS = 256, 4  # of what is compared in more ways
BIN = 512  # tokens per point of the curve


@dataclass(frozen=True)
class Case:
    """policy: a policy string, or recompute:window=W. front: text in front of each text.

    every: only every so-many-th token is predicted.
    """

    policy: str
    front: str = ""
    every: int = 1


def ring(sinks: int, size: int) -> str:
    return f"streaming:sinks={sinks},window={size - sinks}"


def label(sinks: int, size: int) -> str:
    """4+252, as the paper writes it."""
    return f"{sinks}+{size - sinks}"


BASE = label(SINKS, SIZE)
RINGS = {label(n, size): Case(ring(n, size)) for size in SIZES for n in COUNTS}
TABLE_6 = {label(SINKS, size): Case(ring(SINKS, size)) for size in CACHES}
OTHERS = {  # of the smallest size
    "re-computation": Case(f"recompute:window={SIZE}", every=64),
    "full": Case("full"),
    f"{BASE}, positions absolute": Case(f"{ring(SINKS, SIZE)},positions=absolute"),
    "4+253": Case("streaming:sinks=4,window=253"),  # the published code evicts after attending
    "newline+255": Case(ring(1, SIZE), "\n"),
    "<|endoftext|>+255": Case(ring(1, SIZE), "<|endoftext|>"),
    "4 newlines+252": Case(ring(SINKS, SIZE), "\n\n\n\n"),
}
CURVES = ("full", label(0, SIZE), label(1, SIZE), BASE, "re-computation")


def main() -> None:
    ask = argparse.ArgumentParser(
        prog="python -m jaxkv.evals.streaming.tables", description=__doc__
    )
    ask.add_argument("--model", default="smollm2-135m", help="a model folder, GGUF file or Hub id")
    ask.add_argument("--texts", required=True, type=Path, nargs="+", help="text files")
    ask.add_argument("--tokens", type=int, default=20_000, help=f"per text, with a cache of {SIZE}")
    ask.add_argument("--beginning", type=int, default=8_192, help="per text, with larger caches")
    ask.add_argument("--quick", action="store_true", help="write to out/, which no claim reads")
    given = ask.parse_args()

    llm = models.load(given.model)
    texts = {path.stem: tokens_of(llm, path, given.tokens + 1)[0] for path in given.texts}
    record = Record("streaming_tables", [*llm.files, *given.texts], quick=given.quick)
    print("wrote", record.save(run(llm, texts, given.beginning, record)))
    if not given.quick:
        from jaxkv.evals.lib.figures import draw

        draw("streaming_tables")


def run(
    llm: Llm, texts: dict[str, Sequence[int]], beginning: int, record: Record
) -> dict[str, Any]:
    """All cases on all texts."""
    cases = RINGS | TABLE_6 | OTHERS
    parts = Parts(record, len(cases) * len(texts))
    losses: dict[str, list[np.ndarray]] = {name: [] for name in cases}
    small = {name for name, case in cases.items() if name in OTHERS or cache_of(case) <= SIZE}
    for text, ids in texts.items():
        for name, case in cases.items():
            some = ids if name in small else ids[: beginning + 1]
            key = f"{llm.name}, {text}, {name}, {len(some)}"
            losses[name].append(parts.part(key, lambda c=case, s=some: losses_of(llm, s, c)))
    tables = {
        str(size): rows(losses, [label(n, size) for n in COUNTS], label(SINKS, size), size)
        for size in SIZES
    }
    return {
        "model": llm.name,
        "context": llm.config.context,
        "texts": {text: len(ids) - 1 for text, ids in texts.items()},
        "tables": tables,
        "others": rows(losses, [BASE, *OTHERS], BASE, SIZE),
        "beyond_context": rows(losses, [BASE, *OTHERS], BASE, llm.config.context),
        "table_6": rows(losses, [*TABLE_6], BASE, max(CACHES)),
        "curve": curve(losses),
        "commits_of_parts": parts.commits,
    }


def cache_of(case: Case) -> int:
    """The slots of a streaming cache."""
    fields = dict(field.split("=") for field in case.policy.partition(":")[2].split(","))
    return int(fields["sinks"]) + int(fields["window"])


def losses_of(llm: Llm, ids: Sequence[int], case: Case) -> np.ndarray:
    """The losses of tokens 1, 2, ... of a text, NaN where none was computed."""
    window = recompute.window_of(case.policy)
    if window:
        return gather(recompute.losses(llm, ids, window, case.every))
    front = llm.tokenizer.encode(case.front) if case.front else []
    policy = f"full:max={len(front) + len(ids)}" if case.policy == "full" else case.policy
    return gather(models.losses(llm, [*front, *ids], policy))[len(front) :]


def rows(
    losses: dict[str, list[np.ndarray]], names: Sequence[str], base: str, skip: int
) -> dict[str, dict[str, Any]]:
    """Perplexity of each case, and its loss minus the base's, beyond the first `skip` tokens."""
    found = {}
    for name in names:
        pairs = list(zip(losses[name], losses[base], strict=True))
        paired = [[one[skip : min(map(len, pair))] for one in pair] for pair in pairs]
        over = [float(np.nanmean(one - other)) for one, other in paired]
        own = [float(np.nanmean(one)) for one, _ in paired]
        found[name] = {
            "perplexity": np.exp(np.mean(own)),
            "loss": np.mean(own),
            "loss_over_base": np.mean(over),
            "standard_error": np.std(over, ddof=1) / len(over) ** 0.5 if len(over) > 1 else 0.0,
            "loss_over_base_by_text": over,
            "predictions": sum(int(np.isfinite(one).sum()) for one, _ in paired),
        }
    return found


def curve(losses: dict[str, list[np.ndarray]]) -> dict[str, list[float]]:
    """Loss by position: the mean over texts of each bin of tokens.

    Few tokens are re-computed, so their mean difference from the base is added to the base's loss.
    """
    size = min(map(len, losses[BASE])) // BIN * BIN

    def binned(name: str) -> np.ndarray:
        return np.array([one[:size].reshape(-1, BIN) for one in losses[name]])

    base = binned(BASE)
    found = {name: (base.mean((0, 2)) + np.nanmean(binned(name) - base, (0, 2))).tolist()
             for name in CURVES}  # fmt: skip
    return {"tokens": [*range(BIN, size + 1, BIN)]} | found


def gather(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate(list(parts)).astype(np.float64)


if __name__ == "__main__":
    main()
