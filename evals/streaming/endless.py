"""Unbounded generation: millions of tokens of books through one cache, with the loss per block.

The paper's Figure 5 shows a flat perplexity up to four million tokens. Books differ in difficulty,
so a flat curve alone shows little. Here each block of the long stream is compared with the same
tokens streamed from position 0 with a new cache. A second stream starts just before 2^32, where
positions wrap. Every block is kept under out/ with the cache after it, so that an interrupted run
continues.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.evals.lib.parts import Parts
from jaxkv.evals.lib.record import plain
from jaxkv.evals.lib.run import DEFAULT, Measure, Run, flag, run
from jaxkv.evals.lib.text import tokens_of
from jaxkv.evals.lib.verdict import below, claim, within
from jaxkv.models.loading.llm import Llm
from jaxkv.state import batch

POLICY = "streaming:sinks=4,window=252"
BEFORE_WRAP = 2**32 - 50_000


FLAGS = (
    flag("--texts", type=Path, required=True, about="a folder with manifest.json"),
    flag("--tokens", 4_000_000, minimum=1),
    flag("--block", 100_000, "tokens in one loss", minimum=1),
    flag("--chunk", 200, "tokens read at a time", minimum=1),
    flag("--policy", POLICY),
    flag("--splits", ("train",), "of the manifest's books"),
)


def measure(run: Run) -> dict[str, Any]:
    """The losses of a text, and a summary, which is printed."""
    options = run.options
    if options.block % options.chunk or options.tokens % options.block:
        raise UserError(
            "--block must be a multiple of --chunk and --tokens one of --block, got "
            f"{options.block}, {options.chunk} and {options.tokens}: one shape; change one"
        )
    ids, files = tokens_of(run.llm, options.texts, options.tokens + 1, options.splits)
    if len(ids) <= options.tokens:
        raise UserError(
            f"--texts must have more than {options.tokens:,} tokens, {options.texts} has "
            f"{len(ids):,}; add texts or ask for fewer"
        )
    run.record.add(files)
    parts = Parts(run.record, 3 * options.tokens // options.block)
    results = losses(run.llm, ids, options.policy, options.chunk, options.block, parts)
    print(json.dumps(plain(results["summary"]), indent=1))
    return results


def losses(
    llm: Llm, ids: Sequence[int], policy: str, chunk: int, block: int, parts: Parts | None = None
) -> dict[str, Any]:
    """Score one text three times: endless, across the wrap, and with a new cache per block."""
    endless = read(llm, ids, policy, chunk, block, 0, "from 0", parts)
    wrapped = read(llm, ids, policy, chunk, block, BEFORE_WRAP, "across 2^32", parts)
    bos = ids[:1] if llm.tokenizer.adds_bos else ()
    fresh = [
        line
        for at in range(0, len(ids) - 1, block)
        for line in read(
            # With the BOS in front, as at the beginning of a text.
            llm, [*bos, *ids[at + len(bos) : at + block + 1]], policy, chunk, block, 0,
            f"fresh {at}", parts,
        )
    ]  # fmt: skip
    return {
        "model": llm.name,
        "policy": policy,
        "tokens": len(ids) - 1,
        "block": block,
        "chunk": chunk,
        "start_before_wrap": BEFORE_WRAP,
        "commits_of_parts": parts.commits if parts else {},
        "summary": summary(endless, wrapped, fresh),
        "endless": endless,
        "wrapped": wrapped,
        "fresh": fresh,
    }


FIELDS = ("loss", "standard_error", "not_finite", "state_bytes")


def read(
    llm: Llm, ids: Sequence[int], policy: str, chunk: int, block: int, start: int, name: str,
    parts: Parts | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Score one text with one cache, from position `start`; one result per block.

    parts: where blocks are kept; None keeps none.
    """
    stream = models.Stream(llm, policy, tokens=len(ids), start=start)
    key = f"{llm.name}, {policy}, {name}, chunks of {chunk}, {block}"
    saved = None if parts is None else parts.folder / f"{key}.state.npz"
    if saved and saved.exists():
        stream.decoding = batch.to_device(batch.load(saved, stream.decoding, key))
    done, lines = int(stream.decoding.position[0] - np.uint32(start)), []

    def score(at: int) -> np.ndarray:
        part = models.losses(llm, ids[at : at + block + 1], chunk=chunk, stream=stream)
        loss = np.concatenate(list(part)).astype(np.float64)
        spread = loss.std() / len(loss) ** 0.5
        return np.array([loss.mean(), spread, np.sum(~np.isfinite(loss)), stream.state_bytes])

    several = len(ids) - 1 > block
    for at in range(0, len(ids) - 1, block):
        tokens = min(at + block, len(ids) - 1)
        later = several and at >= done
        if parts is None:
            fields = score(at)
        else:
            fields = parts.part(f"{key}, {at}", lambda at=at: score(at), again=later)
        if saved and later:
            batch.save(saved, stream.decoding, key)
        line: dict[str, Any] = dict(zip(FIELDS, fields.tolist(), strict=True))
        line |= {name: int(line[name]) for name in FIELDS[2:]}
        position = (start + tokens) % 2**32
        lines.append({"tokens": tokens, "position": position, **line})
        print(f"{name}: {tokens:,} tokens, loss {line['loss']:.4f}", flush=True)
    return lines


def summary(endless: list[dict], wrapped: list[dict], fresh: list[dict]) -> dict[str, Any]:
    """The numbers that decide the claim."""
    loss, wrap, control = (np.array([b["loss"] for b in s]) for s in (endless, wrapped, fresh))
    blocks = [*endless, *wrapped, *fresh]
    return {
        "worst_change": np.max(np.abs(loss / control - 1)),
        "worst_change_wrapped": np.max(np.abs(wrap / control - 1)),
        "not_finite": sum(b["not_finite"] for b in blocks),
        "state_bytes": sorted({b["state_bytes"] for b in blocks}),
    }


MEASURE = Measure("endless", measure, FLAGS, model=DEFAULT)
RECORDS = {"endless_135m": "400,000", "endless": "4,000,000"}  # and their tokens
CLAIMS = (
    *(claim("Figure 5: flat perplexity over 4 million tokens, ten models of 2.8B to 70B",
            f"Over {tokens} tokens, also across position 2^32, the loss of each block is within "
            "0.5 % of that with a new cache", record,
            below("summary/worst_change", 0.005), below("summary/worst_change_wrapped", 0.005),
            unit="share")
      for record, tokens in RECORDS.items()),
    *(claim("section 1: constant memory",
            f"Over {tokens} tokens the state has equal bytes in every block, and every loss is "
            "finite", record,
            within(lambda r: {"sizes of the state": len(set(r["summary"]["state_bytes"]))}, 1),
            within(lambda r: {"losses that are not finite": r["summary"]["not_finite"]}),
            unit="count")
      for record, tokens in RECORDS.items()),
)  # fmt: skip


if __name__ == "__main__":
    run(MEASURE)
