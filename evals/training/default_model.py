r"""The model that comes with the package: stored from a run of the preset `default`, and looked at.

    jaxkv data --text books/train --valid books/valid --vocab-size 4096 --out out/novels \
      --remove '_|([^\w\s] ?)\1{3,}'
    jaxkv pretrain --preset default --data out/novels --out out/runs/default
    python -m jaxkv.evals.training.default_model --run out/runs/default --data out/novels \
      --texts books/test

What is removed are marks of emphasis and lines of one sign, in which a small model gets lost. The
project's other books are not novels alone: a model trained on them too wrote lists in the end.
It reads books that it was not trained on and writes a text of its own, both far past its context
under its streaming policy, and gets its model card. `--check` only says if the card is in step.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv import models
from jaxkv.cli.progress import Progress
from jaxkv.evals.lib.record import TRIALS, Record, plain, read
from jaxkv.evals.lib.timing import bar
from jaxkv.evals.streaming import endless
from jaxkv.evals.training.sink_tables import logged
from jaxkv.models import data
from jaxkv.models.hf.export import export
from jaxkv.models.llm import DEFAULT, Llm
from jaxkv.models.run_metadata import sha256
from jaxkv.models.text import Run, encode

POLICY = "streaming:sinks=4,window=252"
CHUNK = 200  # tokens read at a time
PROMPT, SEEDS = "Once upon a time", [0, 1, 2, 3, 4]
TEMPERATURE, COLDER = 0.9, 0.8  # of README's command, and one at which texts may end in a loop
LAST = 100  # steps whose mean is the loss of training
WORD, RUN = re.compile(r"[^\W\d_]+"), 4  # words in a row that should not come again and again
CARD = "README.md"
PAGE = """\
---
license: apache-2.0
language: en
---
# The default model of jaxkv

A Llama of {weights:,} weights with a learnable sink token (StreamingLLM, section 3.3), made by
`jaxkv pretrain --preset default`, so that `jaxkv generate` has something to write with. The
commands, from the texts on, are at the top of evals/training/default_model.py, which wrote this
page from evals/results/default_model.json.

| | |
| --- | --- |
| data | {documents} English novels, public domain in the United States (the record names them) |
| tokens | {tokens:,}, of texts of {tokens_there:,}; a byte-level BPE of {vocab:,} |
| a step | {rows} samples of {context} tokens; {steps:,} steps; seed {seed} |
| recipe | {recipe} |
| hardware | {device}, {dtype}, {minutes:.0f} minutes; jax {jax} |
| loss | {loss:.3f} nats a token in the last {last_steps} steps |
| ... of {held_back} books held back | {valid:.3f} |
| ... of {tested} books by others | {tested_loss:.3f}, the mean over what follows |
| stored | bfloat16, {megabytes:.1f} MB |
| licence | Apache-2.0, as the code |

## Far past its context

It was trained on samples of {context} tokens. Under `{policy}` it

- read {read:,} tokens of {tested} books by authors it had never seen, one behind the other, in
  blocks of {block:,}. The loss of the first block was {begins:.3f}, of the last {ends:.3f}. They
  are other texts: read afresh, each alone, no block is further than {worst:.2f} % from what it was
  in the stream;
- wrote {texts} texts of {written:,} tokens each at temperature {temperature}. Of the words of
  the first block at least {known_first:.1f} % are words of those books, of the last at least
  {known_last:.1f} % (each time without the book that knows most). Of a book's own words
  {known_least:.1f} to {known_most:.1f} % are words of the others. At temperature {colder}, {silent}
  of {texts} texts ended in one sign without end, a rule or a dotted line as some books have them.

How it goes on from "{prompt}":

> {first} ...

and where it ended:

> ... {last}

## What it cannot do

It writes English sentences that look like old novels and mean nothing for long; it knows no facts,
follows no instructions and holds no conversation. It wanders: what a cache has evicted is gone, and
who was spoken of a page ago with it. Its books are of their time, in their prejudices too, and
nobody has filtered them or it.
"""


def main() -> None:
    ask = argparse.ArgumentParser(
        prog="python -m jaxkv.evals.training.default_model", description=__doc__
    )
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
            raise SystemExit(
                "the model card is out of step; run python -m jaxkv.evals.training.default_model"
            )
        return
    if None in (given.run, given.data, given.texts):
        ask.error("--run, --data and --texts say what to store, what made it, and what to read")
    if given.block % CHUNK or given.tokens % given.block:
        ask.error(f"blocks must be whole numbers of {CHUNK} tokens, and tokens of blocks")

    files = sorted(given.texts.glob("*.txt"))
    if len(files) < 2 or given.tokens % len(files):
        ask.error(f"--texts must be two books or more that divide --tokens, got {len(files)}")
    record = Record("default_model", files, [0], given.quick)
    reported = training(given.run, given.data)
    folder = TRIALS / "default" if given.quick else DEFAULT
    with tempfile.TemporaryDirectory() as scratch:
        stored = store(given.run, Path(scratch))
        results = measure(models.load(stored), files, given.tokens, given.block)
        weights = stored / "model.safetensors"
        record.about["data"][f"models/default/{weights.name}"] = sha256(weights)
        results = {"training": reported, **results}
        text = card(json.loads(json.dumps(plain(record.about | {"results": results}))))
        (stored / CARD).write_text(text, "utf-8")
        shutil.copytree(stored, folder, dirs_exist_ok=True)
    print("wrote", record.save(results), "and", folder.name)


def store(run: Path, folder: Path) -> Path:
    """The trained model in bfloat16, and nothing else of the run; the folder."""
    llm = models.load(run / "hf")
    front = llm.tokenizer.front
    return export(folder, llm.config, llm.weights, run / "hf" / data.TOKENIZER, front, "bfloat16")


def training(run: Path, folder: Path) -> dict[str, Any]:
    """What the run was, on which data, and how it went."""
    about, tokens = json.loads((run / "run.json").read_text("utf-8")), data.read(folder)
    if tokens.digest != about["data"]:
        raise SystemExit(f"{run} was not trained on {folder}; name its own data folder")
    log = logged(run)
    last, recipe = log[-1], about["recipe"]
    if last["step"] < recipe["steps"]:
        raise SystemExit(f"{run} has come to step {last['step']} of {recipe['steps']}; finish it")
    documents = tokens.manifest["documents"]
    return about | {
        "tokens": recipe["steps"] * recipe["rows"] * recipe["context"],
        "tokens_there": tokens.count("train"),
        "removed": tokens.manifest["removed"],
        "documents": {
            split: [one["file"] for one in documents if one["split"] == split]
            for split in data.SPLITS
        },
        "curve": [[line["step"], line["valid_loss"]] for line in log if "valid_loss" in line],
        "loss": np.mean([x["loss"] for x in log if x["step"] > recipe["steps"] - LAST]),
        **{key: last[key] for key in ("seconds", "device", "jax", "valid_loss", "first_token")},
    }


def measure(llm: Llm, files: Sequence[Path], tokens: int, block: int) -> dict[str, Any]:
    """What the model is, how it reads books in a row, as much of each, and how it writes."""
    texts = [file.read_text("utf-8") for file in files]
    each = tokens // len(files)
    books = [llm.tokenizer.encode(text, bos=False) for text in texts]
    if min(map(len, books)) < each:
        raise SystemExit(f"of each book {each:,} tokens are read, one has fewer; ask for fewer")
    ids = [*llm.tokenizer.front, *(i for book in books for i in book[:each])]
    results = {"model": model(llm)}
    results["reading"] = endless.run(llm, ids[: tokens + 1], POLICY, CHUNK, block)
    results["writing"] = writing(llm, texts, tokens, block)
    results["bars"] = bars(results)
    for one in results["bars"]:
        print(f"{one['bar']}: {one['value']:.4f} ({one['ask']})")
    return results


def model(llm: Llm) -> dict[str, Any]:
    return {
        "weights": sum(weight.size for weight in llm.weights.values()),
        "bytes": (llm.folder / "model.safetensors").stat().st_size,
        "vocab": llm.config.vocab,
        "context": llm.config.context,
        "sink_tokens": len(llm.tokenizer.front),
    }


def writing(llm: Llm, texts: Sequence[str], tokens: int, block: int) -> dict[str, Any]:
    """Generated texts of this length, a line per block, with the same measures of books."""
    every = [set(words(text)) for text in texts]
    known = [set().union(*every[:i], *every[i + 1 :]) for i in range(len(texts))]
    found: dict[str, Any] = {"policy": POLICY, "prompt": PROMPT, "tokens": tokens, "seeds": SEEDS}
    for temperature in (TEMPERATURE, COLDER):
        run = Run(
            llm, encode(llm, [PROMPT] * len(SEEDS)), POLICY, tokens,
            knobs={"temperature": temperature}, seed=SEEDS, ignore_eos=True,
        )  # fmt: skip
        total = tokens * len(SEEDS)
        with Progress(f"writing at {temperature:g}", total) as progress:
            for _ in run.blocks():
                progress.at(sum(output.count for output in run.outputs))
        written = [blocks_of(llm, output.tokens, block, known) for output in run.outputs]
        found[f"{temperature:g}"] = written
    size = int(np.median([part["letters"] for text in written for part in text["blocks"]]))
    found["books"] = [
        measures(text[len(text) // 2 :][:size], others)
        for text, others in zip(texts, known, strict=True)
    ]
    return found


def blocks_of(
    llm: Llm, tokens: Sequence[int], block: int, known: Sequence[set[str]]
) -> dict[str, Any]:
    """How a text begins and ends, and its measures; of several sets of words the worst."""
    parts = (tokens[at : at + block] for at in range(0, len(tokens), block))
    pieces = [llm.tokenizer.decode(part) for part in parts]
    blocks = [
        min((measures(piece, some) for some in known), key=lambda x: x["known"]) for piece in pieces
    ]
    return {"first": pieces[0][:400], "last": pieces[-1][-400:], "blocks": blocks}


def degenerated(text: dict[str, Any]) -> bool:
    """Whether its last block has hardly a word: a line of one sign, which some books have."""
    first, last = text["blocks"][0], text["blocks"][-1]
    return last["words"] < first["words"] / 10


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def measures(text: str, known: set[str]) -> dict[str, float]:
    """known: the share of words that are among some; anew: of runs of four words, the share of
    those that are the first of their kind."""
    found = words(text)
    runs = list(zip(*(found[i:] for i in range(RUN)), strict=False))
    return {
        "letters": len(text),
        "words": len(found),
        "known": sum(word in known for word in found) / max(1, len(found)),
        "anew": len(set(runs)) / max(1, len(runs)),
    }


def bars(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Recognisable English, and as good at the end as at the beginning."""
    writing, summary = results["writing"], results["reading"]["summary"]
    books = {key: min(book[key] for book in writing["books"]) for key in ("known", "anew")}
    texts = [text["blocks"] for text in writing[f"{TEMPERATURE:g}"]]
    least = {key: min(text[-1][key] for text in texts) for key in ("known", "anew")}
    kept = min(text[-1]["known"] / max(text[0]["known"], 1e-9) for text in texts)
    far = f"{results['reading']['tokens']:,} tokens"
    here = f"default model, the worst of {len(texts)} texts of {far}: "
    return [
        bar(f"default model, reading {far}: worst block against the same text afresh",
            summary["worst_change"], "<=", 0.01),
        bar(f"{here}words that are words, last block over first", kept, ">=", 0.98),
        bar(f"{here}the same, last block over the least of a book",
            least["known"] / books["known"], ">=", 0.95),
        bar(f"{here}runs of four words that are new, last block over the least of a book",
            least["anew"] / books["anew"], ">=", 0.95),
    ]  # fmt: skip


def card(record: dict[str, Any]) -> str:
    """The model card, every figure from the record."""
    results = record["results"]
    training, writing = results["training"], results["writing"]
    recipe, summary = training["recipe"], results["reading"]["summary"]
    run = ("tokens", "tokens_there", "device", "dtype", "loss", "jax")
    reported = ("steps", "rows", "context", "seed", "dtype")
    texts, colder = writing[f"{TEMPERATURE:g}"], writing[f"{COLDER:g}"]
    known = [[100 * text["blocks"][at]["known"] for text in texts] for at in (0, -1)]
    of_books = [100 * book["known"] for book in writing["books"]]
    return PAGE.format(
        **{key: training[key] for key in run},
        **{key: results["model"][key] for key in ("weights", "vocab")},
        **{key: recipe[key] for key in ("steps", "rows", "context", "seed")},
        documents=len(training["documents"]["train"]),
        held_back=len(training["documents"]["valid"]),
        tested=len(writing["books"]),
        tested_loss=np.mean([block["loss"] for block in results["reading"]["endless"]]),
        last_steps=LAST,
        recipe=", ".join(f"{key} {value}" for key, value in recipe.items() if key not in reported),
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
        texts=len(texts),
        temperature=TEMPERATURE,
        colder=COLDER,
        silent=sum(map(degenerated, colder)),
        known_first=min(known[0]),
        known_last=min(known[-1]),
        known_least=min(of_books),
        known_most=max(of_books),
        prompt=writing["prompt"],
        first=quoted(texts[0]["first"]),
        last=quoted(texts[0]["last"]),
    )


def quoted(text: str) -> str:
    """On one line, as it stands in a card."""
    return " ".join(text.split())


if __name__ == "__main__":
    main()
