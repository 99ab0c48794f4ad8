"""Unbounded generation: millions of tokens of books through one cache, with the loss per block.

The paper's Figure 5 shows a flat perplexity up to four million tokens. Books differ in difficulty,
so a flat curve alone shows little. Here each block of the long stream is compared with the same
tokens streamed from position 0 with a new cache. A second stream starts just before 2^32, where
positions wrap.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxkv import models
from jaxkv.evals.lib.record import Record, plain, resident
from jaxkv.models.llm import Llm

POLICY = "streaming:sinks=4,window=252"
BEFORE_WRAP = 2**32 - 50_000


def main() -> None:
    ask = argparse.ArgumentParser(
        prog="python -m jaxkv.evals.streaming.endless", description=__doc__
    )
    ask.add_argument("--model", required=True, help="a model folder or Hub id")
    ask.add_argument("--texts", required=True, type=Path, help="a folder with manifest.json")
    ask.add_argument("--tokens", type=int, default=4_000_000)
    ask.add_argument("--block", type=int, default=100_000, help="tokens in one loss")
    ask.add_argument("--chunk", type=int, default=200, help="tokens read at a time")
    ask.add_argument("--policy", default=POLICY)
    ask.add_argument("--quick", action="store_true", help="write to out/, which no claim reads")
    given = ask.parse_args()
    if given.block % given.chunk or given.tokens % given.block:
        ask.error("blocks must be whole numbers of chunks, and tokens of blocks: one shape")

    llm = models.load(given.model)
    ids, files = tokens_of(llm, given.texts, given.tokens + 1)
    if len(ids) <= given.tokens:
        ask.error(f"{given.texts} holds only {len(ids):,} tokens; add texts or ask for fewer")
    record = Record("endless", [*llm.files, *files], quick=given.quick)
    results = run(llm, ids, given.policy, given.chunk, given.block)
    print(json.dumps(plain(results["summary"]), indent=1))
    print("wrote", record.save(results))
    if not given.quick:
        from jaxkv.evals.lib.figures import draw

        draw("endless")


def run(llm: Llm, ids: Sequence[int], policy: str, chunk: int, block: int) -> dict[str, Any]:
    """Score one text three times: endless, across the wrap, and with a new cache per block."""
    compiled = compilations()
    endless = read(llm, ids, policy, chunk, block, 0, "from 0")
    after_one = Counter(compiled)
    wrapped = read(llm, ids, policy, chunk, block, BEFORE_WRAP, "across 2^32")
    fresh = [
        block_of
        for at in range(0, len(ids) - 1, block)
        for block_of in read(
            # The BOS token in front, as at the beginning of a text.
            llm, [ids[0], *ids[at + 1 : at + block + 1]], policy, chunk, block, 0, f"fresh {at:,}"
        )
    ]  # fmt: skip
    return {
        "policy": policy,
        "tokens": len(ids) - 1,
        "block": block,
        "chunk": chunk,
        "start_before_wrap": BEFORE_WRAP,
        "compilations": dict(after_one),
        "compilations_later": dict(compiled - after_one),
        "summary": summary(endless, wrapped, fresh),
        "endless": endless,
        "wrapped": wrapped,
        "fresh": fresh,
    }


def read(
    llm: Llm, ids: Sequence[int], policy: str, chunk: int, block: int, start: int, name: str
) -> list[dict[str, Any]]:
    """Score one text with one cache, from position `start`; one result per block."""
    stream = models.Stream(llm, policy, tokens=len(ids), start=start)
    lines = []
    for at in range(0, len(ids) - 1, block):
        begun = time.perf_counter()
        part = models.losses(llm, ids[at : at + block + 1], chunk=chunk, stream=stream)
        loss = np.concatenate(list(part)).astype(np.float64)
        seconds = time.perf_counter() - begun
        line = {
            "tokens": at + len(loss),
            "position": int(stream.decoding.position[0]),
            "loss": loss.mean(),
            "standard_error": loss.std() / len(loss) ** 0.5,
            "not_finite": int(np.sum(~np.isfinite(loss))),
            "seconds": seconds,
            "state_bytes": stream.state_bytes,
            "resident_bytes": resident(),
        }
        lines.append(line)
        left = (len(ids) - 1 - line["tokens"]) * seconds / len(loss)
        print(
            f"{name}: {line['tokens']:,} tokens, loss {line['loss']:.4f}, "
            f"{len(loss) / seconds:,.0f} tokens/s, {line['resident_bytes'] >> 20} MiB, "
            f"{left:.0f} s left",
            flush=True,
        )
    return lines


HELD_BACK = ("valid", "test")  # splits that the default model has not seen


def summary(endless: list[dict], wrapped: list[dict], fresh: list[dict]) -> dict[str, Any]:
    """The numbers that decide the claim."""
    loss, wrap, control = (np.array([b["loss"] for b in s]) for s in (endless, wrapped, fresh))
    # The first block fills caches and compiles, so memory is compared after it.
    later = [b["resident_bytes"] for b in endless[1:]] or [endless[0]["resident_bytes"]]
    blocks = [*endless, *wrapped, *fresh]
    return {
        "worst_change": np.max(np.abs(loss / control - 1)),
        "worst_change_wrapped": np.max(np.abs(wrap / control - 1)),
        "worst_change_wrapped_to_endless": np.max(np.abs(wrap / loss - 1)),
        "loss_first_block": loss[0],
        "loss_last_block": loss[-1],
        "not_finite": sum(b["not_finite"] for b in blocks),
        "state_bytes": sorted({b["state_bytes"] for b in blocks}),
        "resident_bytes": {"min": min(later), "max": max(later), "growth": later[-1] - later[0]},
        "tokens_per_second": endless[-1]["tokens"] / sum(b["seconds"] for b in endless),
    }


def compilations() -> Counter:
    """A counter of compilations by function name, from now on."""
    counts: Counter = Counter()

    def listen(event: str, _: float, fun_name: str = "?", **__: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            counts[fun_name] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    return counts


def tokens_of(
    llm: Llm, texts: Path, count: int, splits: Sequence[str] = ("train",)
) -> tuple[list[int], list[Path]]:
    """The first `count` tokens of a file, or of a folder's books as one text; all, if fewer."""
    files, text, ids = [], [], []
    for book in [texts] if texts.is_file() else books(texts, splits):
        files.append(book)
        text.append(book.read_text("utf-8"))
        # A token is rarely shorter than a byte, so encode only once there are enough bytes.
        if sum(map(len, text)) >= count:
            ids = llm.tokenizer.encode("\n\n".join(text))
            if len(ids) >= count:
                break
    return (ids or llm.tokenizer.encode("\n\n".join(text)))[:count], files


def books(folder: Path, splits: Sequence[str]) -> Iterator[Path]:
    """The books of some splits, those of manifest_more.json last.

    In a folder without manifest.json, every text.
    """
    if not (folder / "manifest.json").exists():
        yield from sorted(folder.glob("*.txt"))
    for name in ("manifest.json", "manifest_more.json"):
        if (folder / name).exists():
            listed = json.loads((folder / name).read_text("utf-8"))["books"]
            yield from (folder / book["file"] for book in listed if book["split"] in splits)


if __name__ == "__main__":
    main()
