"""Sinks in front of a model that exists: StreamingLLM's Table 3 without a model trained for it.

The same stretches of text are read under caches of equal size: by the model as it is (plain), with
a token that begins every stream (constant), and with what `jaxkv pretrain --from` made of the
model; --variants zero adds a zero sink that nobody trained. Each stretch begins elsewhere in its
text, so the first token, on which the plain model leans, differs.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv import models
from jaxkv.evals.lib.record import Record
from jaxkv.evals.lib.text import ask_for_texts
from jaxkv.evals.training.sink_tables import SINKS, line
from jaxkv.models.llm import Llm
from jaxkv.models.score import gather
from jaxkv.models.sinks import FILE

BASE = "plain"
FOUR = 4  # sinks of the plain cache that others are compared with, as in the paper
LIMIT = 0.002  # nats: how far one constant sink may be above the plain cache with four


def main() -> None:
    ask = ask_for_texts("jaxkv.evals.training.sinks_in_front", __doc__)
    ask.add_argument("--variants", nargs="*", default=[], metavar="NAME=RUN",
                     help="folders of `jaxkv pretrain --from MODEL`; zero: untrained")  # fmt: skip
    ask.add_argument("--windows", type=int, nargs="+", default=[256, 1024], help="cache sizes")
    ask.add_argument("--sinks", type=int, nargs="+", default=list(SINKS), help="numbers of sinks")
    ask.add_argument("--starts", type=int, default=3, help="stretches of each text")
    ask.add_argument("--tokens", type=int, default=8_000, help="tokens of a stretch")
    ask.add_argument("--constant", default="constant", help="the constant sink, as --sinks has it")
    ask.add_argument("--name", default="sinks_in_front", help="name of the record")
    given = ask.parse_args()
    runs = dict(variant.partition("=")[::2] for variant in given.variants)
    record = Record(given.name, given.texts, quick=given.quick)
    plain = models.load(given.model)
    stretches = cut(plain, given.texts, given.starts, given.tokens)
    sizes = [(s, w) for w in given.windows for s in given.sinks]
    losses: dict[str, dict[str, Any]] = {}
    for name in [BASE, "constant", *runs]:
        llm = variant(name, plain, given, runs)
        losses[name] = {
            f"{s}+{w - s}": {at: read(llm, ids, s, w) for at, ids in stretches.items()}
            for s, w in sizes
        }
        for size, found in losses[name].items():
            mean = np.mean(np.concatenate(list(found.values())))
            print(f"{name}: {size}: {mean:.4f} nats", flush=True)
    record.finish({
        "stretches": {at: len(ids) for at, ids in stretches.items()},
        "first_tokens": {at: plain.tokenizer.decode(ids[:1]) for at, ids in stretches.items()},
        "variants": tables(losses),
        "bars": bars(losses, given.windows),
    })  # fmt: skip


def cut(llm: Llm, texts: Sequence[Path], starts: int, tokens: int) -> dict[str, list[int]]:
    """Stretches of equal length, evenly spaced in each text, without a BOS."""
    found = {}
    for path in texts:
        ids = llm.tokenizer.encode(path.read_text("utf-8"), bos=False)
        if len(ids) < tokens:
            raise SystemExit(
                f"{path.name} has {len(ids)} tokens, a stretch {tokens}: give --tokens"
            )
        for at in np.linspace(0, len(ids) - tokens, starts).astype(int).tolist():
            found[f"{path.stem} {at}"] = ids[at : at + tokens]
    return found


def variant(name: str, plain: Llm, given: argparse.Namespace, runs: dict[str, str]) -> Llm:
    """The model with the sinks of one variant."""
    if name == BASE:
        return plain
    if name == "constant":
        return models.load(given.model, sinks=given.constant)
    if name in runs and not runs[name]:
        if name != "zero":
            raise SystemExit(f"a variant is NAME=RUN or zero, got {name}")
        config = dataclasses.replace(plain.config, sink_logit="zero")
        return dataclasses.replace(plain, config=config)
    folder = Path(runs[name])
    file, model = folder / FILE, folder / "hf"
    return models.load(
        model if model.is_dir() else given.model, sinks=file if file.is_file() else None
    )


def read(llm: Llm, ids: Sequence[int], sinks: int, cache: int) -> np.ndarray:
    """The losses of all tokens of a stretch but its first."""
    policy = f"streaming:sinks={sinks},window={cache - sinks}"
    found, *_ = gather(models.losses(llm, [*llm.tokenizer.front, *ids], policy))
    return found[-len(ids) + 1 :].astype(np.float64)


def tables(losses: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Per variant and cache: the loss of all stretches, and over the plain cache of four sinks."""
    found: dict[str, Any] = {}
    for name, sizes in losses.items():
        found[name] = {}
        for size, by_stretch in sizes.items():
            base = losses[BASE].get(four(size), by_stretch)
            both = [np.concatenate(list(part.values())) for part in (by_stretch, base)]
            each = {at: loss.mean() - base[at].mean() for at, loss in by_stretch.items()}
            found[name][size] = line(*both) | {"over_base_by_stretch": each}
    return found


def four(size: str) -> str:
    """The plain cache that a cache is compared with."""
    total = sum(map(int, size.split("+")))
    return f"{FOUR}+{total - FOUR}"


def bars(losses: dict[str, dict[str, Any]], windows: Sequence[int]) -> list[dict[str, Any]]:
    """Whether one constant sink is as good as four tokens of the text, in every stretch."""
    found = []
    for window in windows:
        size = f"1+{window - 1}"
        mine, base = losses["constant"].get(size), losses[BASE].get(four(size))
        if mine is None or base is None:
            continue
        worst = max(mine[at].mean() - base[at].mean() for at in mine)
        found.append({"bar": f"one constant sink in a cache of {window}, worst stretch",
                      "value": worst, "ask": f"at most {LIMIT} nats over four sinks",
                      "met": bool(worst <= LIMIT)})  # fmt: skip
    return found


if __name__ == "__main__":
    main()
