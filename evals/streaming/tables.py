"""StreamingLLM's tables on a real model: sinks, cache sizes, positions (Tables 1, 2, 6; Figure 3).

Every case reads the beginning of the same texts. Its losses are compared, token by token, with
those of 4 sinks in a cache of the same size, after the cache is full. Intervals are over texts.
Re-computation is measured at every 64th or 128th token, because each of its predictions costs a
forward pass over the window. An interrupted run continues, and a later run measures only the texts
and cases that the record lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv.evals.lib.paired_losses import (
    BIN,
    ByText,
    Case,
    begin,
    compare,
    loss_over_base,
    measure,
    record_header,
)
from jaxkv.evals.lib.record import Record, run_command
from jaxkv.models.llm import Llm

COUNTS = (0, 1, 2, 4, 8)  # sinks
SIZES = (256, 1024, 2048)  # of a cache, for Tables 1 and 2
CACHES = (64, 128, 256, 512, 1024, 2048)  # of a cache, for Table 6
SIZE, SINKS = 256, 4  # of what is compared in more ways
BEGINNING = 8_192  # tokens that larger caches read of each text


def ring(sinks: int, size: int) -> str:
    return f"streaming:sinks={sinks},window={size - sinks}"


def label(sinks: int, size: int) -> str:
    """4+252, as the paper writes it."""
    return f"{sinks}+{size - sinks}"


def streaming(sinks: int, size: int) -> Case:
    return Case(ring(sinks, size), tokens=BEGINNING if size > SIZE else None)


BASE = label(SINKS, SIZE)
ABSOLUTE = f"{BASE}, positions absolute"
RINGS = {label(n, size): streaming(n, size) for size in SIZES for n in COUNTS}
TABLE_6 = {label(SINKS, size): streaming(SINKS, size) for size in CACHES}
OTHERS = {  # of the smallest size
    "re-computation": Case(f"recompute:window={SIZE}", every=64),
    "full": Case("full"),
    ABSOLUTE: Case(f"{ring(SINKS, SIZE)},positions=absolute"),
    "4+253": Case("streaming:sinks=4,window=253"),  # the published code evicts after attending
    "newline+255": Case(ring(1, SIZE), ("\n",)),
    "<|endoftext|>+255": Case(ring(1, SIZE), ("<|endoftext|>",)),
    "4 newlines+252": Case(ring(SINKS, SIZE), ("\n",) * 4),
}
LARGE_BASE, LARGE = label(SINKS, 1024), "re-computation of 1024"
LARGER = {  # compared with the streaming cache of this size
    LARGE_BASE: streaming(SINKS, 1024),
    LARGE: Case("recompute:window=1024", every=128, tokens=BEGINNING),
}
CURVES = ("full", label(0, SIZE), label(1, SIZE), BASE, "re-computation")


def main() -> None:
    llm, texts, record = begin("jaxkv.evals.streaming.tables", "streaming_tables", __doc__)
    record.finish(run(llm, texts, record))


def run(llm: Llm, texts: dict[str, Sequence[int]], record: Record) -> dict[str, Any]:
    """All cases on all texts."""
    cases = RINGS | TABLE_6 | OTHERS
    by_text = measure(llm, texts, cases, BASE, record)
    for text, one in measure(llm, texts, LARGER, LARGE_BASE, record).items():
        by_text[text]["bins"] |= one["bins"]
    tables = {
        str(size): compare(by_text, [label(n, size) for n in COUNTS], label(SINKS, size), size)
        for size in SIZES
    }
    return record_header(llm, cases | LARGER, by_text) | {
        "tables": tables,
        "larger": compare(by_text, [*LARGER], LARGE_BASE, 1024),
        "others": compare(by_text, [BASE, *OTHERS], BASE, SIZE),
        "within_context": compare(by_text, [BASE, *OTHERS], BASE, SIZE, llm.config.context),
        "beyond_context": compare(by_text, [BASE, *OTHERS], BASE, llm.config.context),
        "table_6": compare(by_text, [*TABLE_6], BASE, max(CACHES)),
        "curve": curve(by_text),
    }


def curve(by_text: ByText) -> dict[str, list[float]]:
    """Loss by position: the mean over texts of each two bins of tokens, at their middle.

    Few tokens are re-computed, so their mean difference from the base is added to the base's loss.
    """
    size = min(len(one["bins"][BASE]["loss"]) for one in by_text.values()) // 2 * 2
    base = np.mean([one["bins"][BASE]["loss"][:size] for one in by_text.values()], axis=0)

    def joined(bins: np.ndarray) -> list[float]:
        return bins[:size].reshape(-1, 2).mean(1).tolist()

    def over(name: str) -> np.ndarray:
        return np.mean([loss_over_base(one, name, BASE)[:size] for one in by_text.values()], axis=0)

    return {"tokens": [*range(BIN, BIN * size, 2 * BIN)]} | {
        name: joined(base + over(name)) for name in CURVES
    }


if __name__ == "__main__":
    run_command(main)
