"""The model that comes with the package: stored from a run of the preset `default`, and looked at.

    jaxkv pretrain --preset default --data tokens --out out/runs/default
    python -m evals.default_model --run out/runs/default --data tokens --texts books/test

It reads books that it was not trained on and writes a text of its own, both far past its context
under its streaming policy, and gets its model card. `--check` only says if the card is in step.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import models
from evals import endless
from evals.record import TRIALS, Record, read
from evals.timing import bar
from models import data
from models.hf.export import export
from models.llm import DEFAULT, Llm

POLICY = "streaming:sinks=4,window=252"
CHUNK = 200  # tokens read at a time
PROMPT, TEMPERATURE = "Once upon a time", 0.8
WORD, RUN = re.compile(r"[^\W\d_]+"), 4  # words in a row that should not come again and again
CARD = "README.md"
PAGE = """\
---
license: apache-2.0
language: en
---
# The default model of jaxkv

A Llama of {weights:,} weights with a learnable sink token (StreamingLLM, section 3.3), made by
`jaxkv pretrain --preset default`, so that `jaxkv generate` has something to write with. This page
was written by
`{command}`
from evals/results/default_model.json.

| | |
| --- | --- |
| data | {documents} English books, public domain in the United States; the record names them |
| tokens | {tokens:,} of the {tokens_there:,} there are; a byte-level BPE of {vocab:,} |
| a step | {rows} samples of {context} tokens; {steps:,} steps; seed {seed} |
| recipe | {recipe} |
| hardware | {device}, {dtype}, {minutes:.0f} minutes |
| loss | {loss:.3f}; of held-back books {valid:.3f} (nats a token) |
| stored | bfloat16, {megabytes:.1f} MB |
| licence | Apache-2.0, as the code |

## Far past its context

It was trained on samples of {context} tokens. Under `{policy}` it

- read {read:,} tokens of books by other authors, in blocks of {block:,}. The loss of the first was
  {begins:.3f}, of the last {ends:.3f}. They are other texts: read afresh, each alone, no block is
  further than {worst:.2f} % from what it was in the stream;
- wrote {written:,} tokens at temperature {temperature}. Of the words of the first block
  {known_first:.1f} % are words of those books, of the last {known_last:.1f} %. Of a book's own
  words {known_least:.1f} to {known_most:.1f} % are words of the others.

How it goes on from "{prompt}":

> {first} ...

and where it ended:

> ... {last}

## What it cannot do

It writes English sentences that look like old novels and mean nothing for long; it knows no facts,
follows no instructions and holds no conversation. What a cache has evicted is gone. Its books are
of their time, in their prejudices too, and nobody has filtered them or it.
"""


def main() -> None:
    ask = argparse.ArgumentParser(prog="python -m evals.default_model", description=__doc__)
    ask.add_argument("--run", type=Path, help="the folder of a finished run")
    ask.add_argument("--data", type=Path, help="the data folder that it was trained on")
    ask.add_argument("--texts", type=Path, help="books that were not trained on, as *.txt")
    ask.add_argument("--tokens", type=int, default=100_000, help="read, and written")
    ask.add_argument("--block", type=int, default=10_000, help="tokens in one figure")
    ask.add_argument("--check", action="store_true", help="only whether the card is in step")
    ask.add_argument("--quick", action="store_true", help="write to out/ alone")
    given = ask.parse_args()
    if given.check:
        if (DEFAULT / CARD).read_text("utf-8") != card(read("default_model")):
            raise SystemExit("the model card is out of step; run python -m evals.default_model")
        return
    if None in (given.run, given.data, given.texts):
        ask.error("--run, --data and --texts say what to store, what made it, and what to read")
    if given.block % CHUNK or given.tokens % given.block:
        ask.error(f"blocks must be whole numbers of {CHUNK} tokens, and tokens of blocks")

    folder = TRIALS / "default" if given.quick else DEFAULT
    store(given.run, folder)
    llm = models.load(folder)
    ids, files = endless.tokens_of(llm, given.texts, given.tokens + 1)
    record = Record("default_model", [folder / "model.safetensors", *files], [0], given.quick)
    results = {"training": training(given.run, given.data), "model": model(llm)}
    results["reading"] = endless.run(llm, ids, POLICY, CHUNK, given.block)
    texts = [file.read_text("utf-8") for file in sorted(given.texts.glob("*.txt"))]
    results["writing"] = writing(llm, texts, given.tokens, given.block)
    results["bars"] = bars(results)
    for one in results["bars"]:
        print(f"{one['bar']}: {one['value']:.4f} ({one['ask']})")
    file = record.save(results)
    (folder / CARD).write_text(card(read(file.stem, file.parent)), "utf-8")
    print("wrote", file.name, "and", CARD)


def store(run: Path, folder: Path) -> None:
    """The trained model in bfloat16, and nothing else of the run."""
    llm = models.load(run / "hf")
    front = llm.tokenizer.front
    export(folder, llm.config, llm.weights, run / "hf" / data.TOKENIZER, front, "bfloat16")


def training(run: Path, folder: Path) -> dict[str, Any]:
    """What the run was, on which data, and how it went."""
    about, tokens = json.loads((run / "run.json").read_text("utf-8")), data.read(folder)
    if tokens.digest != about["data"]:
        raise SystemExit(f"{run} was not trained on {folder}; name its own data folder")
    documents = json.loads((folder / data.MANIFEST).read_text("utf-8"))["documents"]
    log = [json.loads(text) for text in (run / "log.jsonl").read_text("utf-8").splitlines()]
    last, recipe = log[-1], about["recipe"]
    return about | {
        "tokens": recipe["steps"] * recipe["rows"] * recipe["context"],
        "tokens_there": tokens.count("train"),
        "documents": [one["file"] for one in documents if one["split"] == "train"],
        "curve": [[line["step"], line["valid_loss"]] for line in log if "valid_loss" in line],
        **{key: last[key] for key in ("seconds", "device", "loss", "valid_loss", "first_token")},
    }


def model(llm: Llm) -> dict[str, Any]:
    return {
        "weights": sum(weight.size for weight in llm.weights.values()),
        "bytes": (llm.folder / "model.safetensors").stat().st_size,
        "vocab": llm.config.vocab,
        "context": llm.config.context,
        "sink_tokens": len(llm.tokenizer.front),
    }


def writing(llm: Llm, texts: Sequence[str], tokens: int, block: int) -> dict[str, Any]:
    """A text of so many tokens, a line for each block, beside what the same measures give books.

    known: the share of words that are words of the books; of a book, of the others. anew: the share
    of runs of four words that are the first of their kind in the block.
    """
    answer = models.generate(
        llm, PROMPT, POLICY, tokens, temperature=TEMPERATURE, seed=0, ignore_eos=True
    )
    parts = (answer.tokens[at : at + block] for at in range(0, tokens, block))
    pieces = [llm.tokenizer.decode(part) for part in parts]
    every = [set(words(text)) for text in texts]
    written = [measures(piece, set().union(*every)) for piece in pieces]
    size = int(np.median([len(piece) for piece in pieces]))
    books = [
        measures(text[len(text) // 2 :][:size], set().union(*every[:i], *every[i + 1 :]))
        for i, text in enumerate(texts)
    ]
    return {
        "policy": POLICY,
        "prompt": PROMPT,
        "temperature": TEMPERATURE,
        "tokens": len(answer.tokens),
        "tokens_per_second": answer.tokens_per_second,
        "state_bytes": answer.state_bytes,
        "first": pieces[0][:400],
        "last": pieces[-1][-400:],
        "blocks": written,
        "books": books,
    }


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def measures(text: str, known: set[str]) -> dict[str, float]:
    found = words(text)
    runs = list(zip(*(found[i:] for i in range(RUN)), strict=False))
    return {
        "words": len(found),
        "known": sum(word in known for word in found) / max(1, len(found)),
        "anew": len(set(runs)) / max(1, len(runs)),
    }


def bars(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Recognisable English, and as good at the end as at the beginning."""
    writing, summary = results["writing"], results["reading"]["summary"]
    books = {key: min(book[key] for book in writing["books"]) for key in ("known", "anew")}
    first, last = writing["blocks"][0], writing["blocks"][-1]
    far = f"{results['reading']['tokens']:,} tokens"
    return [
        bar(f"default model, reading {far}: worst block against the same text afresh",
            summary["worst_change"], "<=", 0.01),
        bar(f"default model, writing {far}: words that are words, last block over first",
            last["known"] / first["known"], ">=", 0.98),
        bar("default model, words that are words, last block over the least of a book",
            last["known"] / books["known"], ">=", 0.95),
        bar("default model, runs of four words that are new, last block over the least of a book",
            last["anew"] / books["anew"], ">=", 0.95),
    ]  # fmt: skip


def card(record: dict[str, Any]) -> str:
    """The model card, every figure from the record."""
    results = record["results"]
    training, writing = results["training"], results["writing"]
    recipe, summary = training["recipe"], results["reading"]["summary"]
    told = ("steps", "rows", "context", "seed", "dtype")
    known = [100 * block["known"] for block in writing["blocks"]]
    of_books = [100 * book["known"] for book in writing["books"]]
    return PAGE.format(
        **{key: training[key] for key in ("tokens", "tokens_there", "device", "dtype", "loss")},
        **{key: results["model"][key] for key in ("weights", "vocab")},
        **{key: recipe[key] for key in ("steps", "rows", "context", "seed")},
        command=record["command"],
        documents=len(training["documents"]),
        recipe=", ".join(f"{key} {value}" for key, value in recipe.items() if key not in told),
        minutes=training["seconds"] / 60,
        valid=training["valid_loss"],
        megabytes=results["model"]["bytes"] / 1e6,
        policy=writing["policy"],
        read=results["reading"]["tokens"],
        block=results["reading"]["block"],
        begins=summary["loss_first_block"],
        ends=summary["loss_last_block"],
        worst=100 * summary["worst_change"],
        written=writing["tokens"],
        temperature=writing["temperature"],
        known_first=known[0],
        known_last=known[-1],
        known_least=min(of_books),
        known_most=max(of_books),
        prompt=writing["prompt"],
        first=quoted(writing["first"]),
        last=quoted(writing["last"]),
    )


def quoted(text: str) -> str:
    """On one line, as it stands in a card."""
    return " ".join(text.split())


if __name__ == "__main__":
    main()
