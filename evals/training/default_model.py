r"""The default model: exported from a run of the preset `default`, and evaluated.

    jaxkv data --text books/train --valid books/valid --vocab-size 4096 --out out/novels \
      --remove '_|([^\w\s] ?)\1{3,}'
    jaxkv pretrain --preset default --data out/novels --out out/runs/default
    python -m jaxkv.evals.training.default_model --run out/runs/default --data out/novels \
      --texts books/test

Without --run, the last command measures the model of the package again; the record keeps what it
says of the training.

The first command removes marks of emphasis and lines of a repeated punctuation mark, because a
small model degenerates into them. The project's other books are not all novels; a model trained on
all books ended in lists.
The model scores held-out books and generates texts, both far beyond its context under its streaming
policy, and gets its model card.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv import models
from jaxkv.cli.files import read_text
from jaxkv.cli.progress import Progress
from jaxkv.errors import UserError
from jaxkv.evals.lib.record import RESULTS, TRIALS, plain, read
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.timing import bar
from jaxkv.evals.streaming import endless
from jaxkv.evals.training.sink_tables import logged, recipe_of_record
from jaxkv.models.generation.text import Generation, encode
from jaxkv.models.loading.llm import DEFAULT, Llm
from jaxkv.models.tools.run_metadata import sha256
from jaxkv.models.training import data
from jaxkv.models.training.export import export

POLICY = "streaming:sinks=4,window=252"
CHUNK = 200  # tokens read at a time
PROMPT, SEEDS = "Once upon a time", [0, 1, 2, 3, 4]
TEMPERATURE, COLDER = 0.9, 0.8  # that of the README's command, and one at which texts may repeat
LAST = 100  # steps whose mean is the training loss
WORD, RUN = re.compile(r"[^\W\d_]+"), 4  # length of the word runs that should be distinct
CARD = "README.md"
PAGE = """\
---
license: apache-2.0
language: en
---
# The default model of jaxkv

A Llama of {weights:,} weights, trained with a learnable sink token (StreamingLLM, section 3.3) by
`jaxkv pretrain --preset default`. Its heads give this token only {first_token:.0%} of their
attention, so it has no attention sink. It is for first commands, examples and tests, because it
needs no download: it writes prose without a plot and answers no questions. `jaxkv generate` uses
it unless another model is given. All commands, starting from the texts, are at the top of
evals/training/default_model.py, which wrote this page from evals/results/default_model.json.

| | |
| --- | --- |
| data | {documents} English novels, public domain in the United States (the record names them) |
| tokens | {tokens:,}, drawn from texts of {tokens_there:,}; a byte-level BPE of {vocab:,} |
| step | {batch_size} samples of {context} tokens; {steps:,} steps; seed {seed} |
| recipe | {recipe} |
| hardware | {device}, {dtype}, {minutes:.0f} minutes; jax {jax} |
| training loss | {loss:.3f} nats per token in the last {last_steps} steps |
| loss on {held_back} held-out books | {valid:.3f} |
| loss on {tested} books by other authors | {tested_loss:.3f}, mean over the blocks below |
| stored | bfloat16, {megabytes:.1f} MB |
| licence | Apache-2.0, like the code |

## Beyond its context

The model was trained on samples of {context} tokens. With `{policy}`:

- It scored {read:,} tokens of {tested} books by unseen authors as one stream, in blocks of
  {block:,}. The loss of the first block is {begins:.3f}, of the last {ends:.3f}. The blocks are
  different texts, so each was also scored with a new cache: the loss differs by at most
  {worst:.2f} %.
- It generated {texts} texts of {written:,} tokens each at temperature {temperature}. At least
  {known_first:.1f} % of the words of the first block occur in those books, and at least
  {known_last:.1f} % of the words of the last block. (Each time, the book with the most matches is
  left out.) For comparison, {known_least:.1f} to {known_most:.1f} % of the words of each book occur
  in the others.
- At temperature {colder}, {silent} of {texts} texts ended in a repeated punctuation mark, such as
  the rules and dotted lines in some books.

Continuation of "{prompt}":

> {first} ...

and its end:

> ... {last}

## Limits

The model generates English sentences in the style of old novels, without coherent meaning over
longer passages. It knows no facts, follows no instructions and holds no conversation. It does not
remember evicted text, such as the characters of the previous page. Its training books contain the
prejudices of their time, and neither the books nor the model were filtered.
"""


FLAGS = (
    flag("--run", type=Path, about="folder of a finished run (default: the model of the package)"),
    flag("--data", type=Path, about="the data folder that it was trained on"),
    flag("--texts", type=Path, required=True, about="folder of held-out books, *.txt"),
    flag("--tokens", 100_000, "tokens to score, and to generate per text", minimum=1),
    flag("--block", 10_000, "tokens per block", minimum=CHUNK),
)


def measure(run: Run) -> dict[str, Any]:
    """Measure a model, and write it with its card: to the package, or to out/."""
    options, record = run.options, run.record
    if bool(options.run) != bool(options.data):
        raise UserError("--run and --data stand together, got one; give the missing one")
    if options.block % CHUNK or options.tokens % options.block:
        raise UserError(
            f"--block must be a multiple of {CHUNK} and --tokens one of --block, got "
            f"{options.block} and {options.tokens}; change one"
        )
    books = books_of(options)
    if len(books) < 2 or options.tokens % len(books):
        raise UserError(
            f"--texts must be two books or more that divide --tokens, got {len(books)}; give others"
        )
    reported = (
        training(options.run, options.data)
        if options.run
        else read("default_model", RESULTS)["results"]["training"]
    )
    folder = TRIALS / "default" if options.quick else DEFAULT
    with tempfile.TemporaryDirectory() as scratch:
        stored = Path(scratch)
        if options.run:
            store(options.run, stored)
        else:
            shutil.copytree(DEFAULT, stored, dirs_exist_ok=True)
        results = measures_of(models.load(stored), books, options.tokens, options.block)
        weights = stored / "model.safetensors"
        record.about["data"][f"models/default/{weights.name}"] = sha256(weights)
        results = {"training": reported, **results}
        text = card(json.loads(json.dumps(plain(record.about | {"results": results}))))
        (stored / CARD).write_text(text, "utf-8")
        shutil.copytree(stored, folder, dirs_exist_ok=True)
    return results


def books_of(options: Namespace) -> list[Path]:
    return sorted(options.texts.glob("*.txt"))


def store(run: Path, folder: Path) -> None:
    """Export the trained model in bfloat16."""
    llm = models.load(run / "hf")
    front = llm.tokenizer.front
    export(folder, llm.config, llm.weights, run / "hf" / data.TOKENIZER, front, "bfloat16")


def training(run: Path, folder: Path) -> dict[str, Any]:
    """The settings, data and losses of the run."""
    about, tokens = json.loads((run / "run.json").read_text("utf-8")), data.read(folder)
    if tokens.digest != about["data"]:
        raise UserError(f"{run} was not trained on {folder}; name its own data folder")
    log = logged(run)
    last, recipe = log[-1], about["recipe"]
    if last["step"] < recipe["steps"]:
        raise UserError(f"{run} has come to step {last['step']} of {recipe['steps']}; finish it")
    return about | {
        "tokens": recipe["steps"] * recipe["batch_size"] * recipe["context"],
        "tokens_there": tokens.count("train"),
        "removed": tokens.manifest["removed"],
        "documents": {
            split: [f["file"] for f in tokens.manifest["files"] if split in f["documents"]]
            for split in data.SPLITS
        },
        "curve": [[line["step"], line["valid_loss"]] for line in log if "valid_loss" in line],
        "loss": np.mean([x["loss"] for x in log if x["step"] > recipe["steps"] - LAST]),
        **{key: last[key] for key in ("seconds", "device", "jax", "valid_loss", "first_token")},
    }


def measures_of(llm: Llm, files: Sequence[Path], tokens: int, block: int) -> dict[str, Any]:
    """The model's size, its losses on a stream of books in equal parts, and its generated texts."""
    texts = [read_text(str(file), "book") for file in files]
    book_tokens = tokens // len(files)
    books = [llm.tokenizer.encode(text, bos=False) for text in texts]
    if min(map(len, books)) < book_tokens:
        raise UserError(
            f"of each book {book_tokens:,} tokens are read, one has fewer; ask for fewer"
        )
    ids = [*llm.tokenizer.front, *(i for book in books for i in book[:book_tokens])]
    model = {
        "weights": sum(weight.size for weight in llm.weights.values()),
        "bytes": sum(file.stat().st_size for file in llm.files),
        "vocab": llm.config.vocab,
        "context": llm.config.context,
        "sink_tokens": len(llm.tokenizer.front),
    }
    results = {
        "model": model,
        "reading": endless.losses(llm, ids[: tokens + 1], POLICY, CHUNK, block),
        "writing": writing(llm, texts, tokens, block),
    }
    return results | {"bars": bars(results)}


def writing(llm: Llm, texts: Sequence[str], tokens: int, block: int) -> dict[str, Any]:
    """Generated texts of this length with measures per block, and the same measures of books."""
    every = [set(words(text)) for text in texts]
    vocabularies = [set().union(*every[:i], *every[i + 1 :]) for i in range(len(texts))]
    results: dict[str, Any] = {"policy": POLICY, "prompt": PROMPT, "tokens": tokens, "seeds": SEEDS}
    for temperature in (TEMPERATURE, COLDER):
        generation = Generation(
            llm, encode(llm, [PROMPT] * len(SEEDS)), POLICY, tokens,
            knobs={"temperature": temperature}, seed=SEEDS, ignore_eos=True,
        )  # fmt: skip
        total = tokens * len(SEEDS)
        with Progress(f"writing at {temperature:g}", total) as progress:
            for _ in generation.blocks():
                progress.at(sum(output.count for output in generation.outputs))
        written = [
            blocks_of(llm, output.tokens, block, vocabularies) for output in generation.outputs
        ]
        results[f"{temperature:g}"] = written
    size = int(np.median([part["letters"] for text in written for part in text["blocks"]]))
    results["books"] = [
        measures(text[len(text) // 2 :][:size], vocabulary)
        for text, vocabulary in zip(texts, vocabularies, strict=True)
    ]
    return results


def blocks_of(
    llm: Llm, tokens: Sequence[int], block: int, vocabularies: Sequence[set[str]]
) -> dict[str, Any]:
    """Beginning and end of a text, and its measures by block; of several vocabularies the worst."""
    parts = (tokens[at : at + block] for at in range(0, len(tokens), block))
    pieces = [llm.tokenizer.decode(part) for part in parts]
    blocks = [
        min((measures(piece, vocabulary) for vocabulary in vocabularies), key=lambda x: x["known"])
        for piece in pieces
    ]
    return {"first": pieces[0][:400], "last": pieces[-1][-400:], "blocks": blocks}


def degenerated(text: dict[str, Any]) -> bool:
    """Whether the last block has almost no words: a repeated punctuation mark."""
    first, last = text["blocks"][0], text["blocks"][-1]
    return last["words"] < first["words"] / 10


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def measures(text: str, vocabulary: set[str]) -> dict[str, float]:
    """Measures of a text.

    known: the share of its words in a vocabulary. distinct_runs: the distinct ones of its runs of
    four words, as a share.
    """
    text_words = words(text)
    runs = list(zip(*(text_words[i:] for i in range(RUN)), strict=False))
    return {
        "letters": len(text),
        "words": len(text_words),
        "known": sum(word in vocabulary for word in text_words) / max(1, len(text_words)),
        "distinct_runs": len(set(runs)) / max(1, len(runs)),
    }


def bars(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The bars: recognisable English, at the end as at the beginning."""
    writing, summary = results["writing"], results["reading"]["summary"]
    books = {key: min(book[key] for book in writing["books"]) for key in ("known", "distinct_runs")}
    texts = [text["blocks"] for text in writing[f"{TEMPERATURE:g}"]]
    lowest = {key: min(text[-1][key] for text in texts) for key in ("known", "distinct_runs")}
    change = min(text[-1]["known"] / max(text[0]["known"], 1e-9) for text in texts)
    length = f"{results['reading']['tokens']:,} tokens"
    prefix = f"default model, the worst of {len(texts)} texts of {length}: "
    return [
        bar(f"default model, scoring {length}: worst block against the same text with a new cache",
            summary["worst_change"], "<=", 0.01),
        bar(f"{prefix}known words, last block over first", change, ">=", 0.98),
        bar(f"{prefix}known words, last block over the minimum of the books",
            lowest["known"] / books["known"], ">=", 0.95),
        bar(f"{prefix}distinct runs of four words, last block over the minimum of the books",
            lowest["distinct_runs"] / books["distinct_runs"], ">=", 0.95),
    ]  # fmt: skip


def card(record: dict[str, Any]) -> str:
    """The model card, with every number from the record."""
    results = record["results"]
    training, writing = results["training"], results["writing"]
    recipe, summary = recipe_of_record(training["recipe"]), results["reading"]["summary"]
    trained = ("tokens", "tokens_there", "device", "dtype", "loss", "jax", "first_token")
    reported = ("steps", "batch_size", "context", "seed", "dtype")
    texts, colder = writing[f"{TEMPERATURE:g}"], writing[f"{COLDER:g}"]
    known_shares = [[100 * text["blocks"][at]["known"] for text in texts] for at in (0, -1)]
    of_books = [100 * book["known"] for book in writing["books"]]
    return PAGE.format(
        **{key: training[key] for key in trained},
        **{key: results["model"][key] for key in ("weights", "vocab")},
        **{key: recipe[key] for key in ("steps", "batch_size", "context", "seed")},
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
        known_first=min(known_shares[0]),
        known_last=min(known_shares[-1]),
        known_least=min(of_books),
        known_most=max(of_books),
        prompt=writing["prompt"],
        first=quoted(texts[0]["first"]),
        last=quoted(texts[0]["last"]),
    )


def quoted(text: str) -> str:
    """The text on one line, for the card."""
    return " ".join(text.split())


MEASURE = Measure("default_model", measure, FLAGS, data=books_of)

if __name__ == "__main__":
    run(MEASURE)
