"""How often something said n tokens ago can still be used: accuracy by distance, at equal bytes.

What the papers claim in words. A stream states facts, a mark, a name and a value, between letters
that say nothing, and asks for each later: another mark, the name, and the model is to say the
value. A name comes again only when no question is open that it could answer. A small model is
trained on such streams by `models.pretrain`; then every policy reads streams that end in a question
whose fact stands a given distance back, among other facts or (needle) alone among letters. Methods
that thin a finished prompt do so before the question is asked.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np

import models
from evals.record import Record
from jaxkv.stack import policy, reach
from models import corpus, data
from models.llm import Llm
from models.pretrain import pretrain
from models.recipes import Recipe, read_recipe

NAMES, VALUES, LETTERS = 256, 64, 4
FACT, QUESTION = 0, 1  # the marks; then names, values, letters
FIRST_NAME, FIRST_VALUE, FIRST_LETTER = 2, 2 + NAMES, 2 + NAMES + VALUES
SYMBOLS = [chr(0x4E00 + i) for i in range(2 + NAMES + VALUES + LETTERS)]
DOCUMENTS, LENGTH = 22, 200_000
FARTHEST = 420  # tokens between a fact and its question, in training
CONTEXT = 512
SLOTS = 128
CHUNK = 64  # tokens read at a time: what h2o keeps depends on it
DISTANCES = (16, 32, 48, 64, 96, 129, 192, 256, 320, 384)
FAR = (64, 129, 256, 512, 1024, 2048, 4000)  # beyond the trained context
LEARNT = 0.9  # right answers of full attention, or nothing else is worth reading
POLICIES = {  # of as many slots; those that thin a prompt keep what that makes of it
    "full": "full",
    "window": f"window:window={SLOTS}",
    "streaming": f"streaming:sinks=1,window={SLOTS - 1}",
    "reservoir": "reservoir:sinks=1,window=63,sample=64",
    "reservoir, unweighted": "reservoir:sinks=1,window=63,sample=64,weighted=false",
    "reservoir, geometric": "reservoir:sinks=1,window=63,sample=64,scheme=geometric,weighted=false",
    "stratified": "stratified:sinks=1,window=63,sample=64",
    "balance-stream": "balance-stream:sinks=1,window=63,levels=3,block=32",
    "h2o": "h2o:heavy=64,window=64",
    "reservoir, sample 16": "reservoir:sinks=1,window=63,sample=16",
    "reservoir, sample 64": "reservoir:sinks=1,window=63,sample=64",
    "reservoir, sample 256": "reservoir:sinks=1,window=63,sample=256",
    "balance": "balance:sinks=1,window=16,rounds=2",
    "uniform": "uniform:sinks=1,window=16,rounds=2",
    "snapkv": f"snapkv:capacity={SLOTS},window=16",
    "pyramidkv": f"pyramidkv:capacity={SLOTS},window=16",
}


def main() -> None:
    ask = argparse.ArgumentParser(prog="python -m evals.recall", description=__doc__)
    ask.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of training")
    ask.add_argument("--rows", type=int, default=200, help="questions at each distance")
    ask.add_argument("--steps", type=int, default=3000)
    ask.add_argument("--runs", type=Path, help="keep data and runs there (default: nowhere)")
    ask.add_argument("--quick", action="store_true", help="write to out/, which no claim reads")
    given = ask.parse_args()

    record = Record("recall", [], given.seeds, quick=given.quick)
    results: dict[str, Any] = {
        "slots": SLOTS, "context": CONTEXT, "policies": POLICIES, "seeds": {}
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        runs = given.runs or Path(scratch)
        tokens = write(runs / "data")
        for seed in given.seeds:
            recipe = recipe_of(seed, given.steps)
            llm = models.load(pretrain(recipe, tokens, runs / str(seed), tell=lambda text: None))
            read = partial(accuracy, llm, rows=given.rows, seed=seed)
            found = {"within": read(POLICIES, DISTANCES, CONTEXT - 8)}
            if (least := min(found["within"]["full"]["right"].values())) < LEARNT:
                raise SystemExit(
                    f"full attention answers {least:.0%} at some distance, so the model has not "
                    f"learnt it and nothing is written; give more than {given.steps} --steps"
                )
            found["needle"] = read(POLICIES, DISTANCES, CONTEXT - 8, facts=False)
            found["beyond"] = read(endless(llm), FAR, FAR[-1] + 64)
            results["seeds"][str(seed)] = found
    results["recipe"] = dataclasses.asdict(recipe)
    print("wrote", record.save(results).name)
    if not given.quick:
        from evals.figures import draw

        draw("recall")


def recipe_of(seed: int, steps: int) -> Recipe:
    return read_recipe("tiny", [
        "layers=2", "width=128", "heads=2", "kv_heads=2", "mlp=256", f"context={CONTEXT}",
        "sinks=token", f"steps={steps}", "rows=16", "optimizer=muon", "lr=1e-2", f"seed={seed}",
    ])  # fmt: skip


def stream(length: int, seed: int) -> list[int]:
    """Facts and questions; a question's value follows it. Delays are even on a scale of their
    logarithms in a third of the facts, which is where a model begins to learn, and even in the
    others."""
    random, found = np.random.default_rng(seed), []
    unused, due = list(map(int, random.permutation(NAMES))), []
    while len(found) < length:
        found += letters(random, random.integers(0, 4))
        if due and due[0][0] <= len(found) + 1:
            _, name, value = heappop(due)
            found += [QUESTION, FIRST_NAME + name, value]
            unused.insert(int(random.integers(len(unused) // 2 + 1)), name)
        elif unused:
            name, value = unused.pop(), FIRST_VALUE + int(random.integers(VALUES))
            delay = random.uniform(math.log(5), math.log(FARTHEST))
            delay = math.exp(delay) if random.random() < 1 / 3 else random.uniform(5, FARTHEST)
            heappush(due, (len(found) + 1 + int(delay), name, value))
            found += [FACT, FIRST_NAME + name, value]
    return found[:length]


def letters(random: np.random.Generator, count: int) -> list[int]:
    return (FIRST_LETTER + random.integers(0, LETTERS, count)).tolist()


def question(
    length: int, distance: int, seed: Sequence[int], facts: bool = True
) -> tuple[list[int], int]:
    """A stream of `length` tokens that ends in a mark and a name, and the value stated `distance`
    tokens before the name. facts: others stand in it."""
    random = np.random.default_rng(list(seed))
    name, value = int(random.integers(NAMES)), FIRST_VALUE + int(random.integers(VALUES))
    found = stream(length, int(random.integers(2**31))) if facts else letters(random, length)
    # Of this name nothing else is said.
    others = [FIRST_NAME + n for n in range(NAMES) if n != name]
    found = [int(random.choice(others)) if x == FIRST_NAME + name else x for x in found]
    found[-2:] = [QUESTION, FIRST_NAME + name]
    at = length - 1 - distance
    found[at - 1 : at + 2] = [FACT, FIRST_NAME + name, value]
    return found, value


def accuracy(
    llm: Llm, policies: dict[str, str], distances: Sequence[int], length: int, rows: int, seed: int,
    facts: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Of each policy, by distance, the share of questions that are answered."""
    found: dict[str, Any] = {}
    for name, text in policies.items():
        found[name] = {"policy": text, "right": {}}
        for distance in distances:
            seeds = [(seed, distance, row) for row in range(rows)]
            asked = [question(length, distance, one, facts) for one in seeds]
            right = np.mean([a == value for a, (_, value) in zip(
                answers(llm, text, [prompt for prompt, _ in asked]), asked, strict=True
            )])  # fmt: skip
            found[name]["right"][str(distance)] = right
        shown = ", ".join(f"{d} {r:.2f}" for d, r in found[name]["right"].items())
        print(f"{name}: {shown}", flush=True)
    return found


def answers(llm: Llm, text: str, prompts: Sequence[Sequence[int]]) -> Iterator[int]:
    """What the model says to each prompt; its last two tokens come after the prompt is sealed."""
    with_sink = [[*llm.tokenizer.front, *prompt] for prompt in prompts]
    held = models.Stream(llm, text, rows=len(prompts), seed=list(range(len(prompts))))
    held.read([prompt[:-2] for prompt in with_sink], CHUNK)
    held.seal()
    held.read([prompt[-2:] for prompt in with_sink], 1)
    return map(int, np.asarray(held.decoding.logits).argmax(axis=1))


def endless(llm: Llm) -> dict[str, str]:
    """The policies that stay within what the model was trained on however long a text is."""
    return {
        name: text for name, text in POLICIES.items() if reach(policy(text)) <= llm.config.context
    }


def write(folder: Path, documents: int = DOCUMENTS, length: int = LENGTH) -> data.Tokens:
    """The streams as a data folder, the last two held back; or the one that is there."""
    if (folder / "tokens").exists():
        return data.read(folder / "tokens")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:02}.txt" for number in range(documents)]
    for number, path in enumerate(paths):
        path.write_text("".join(SYMBOLS[i] for i in stream(length, number)), "utf-8")
    vocab = {symbol: number for number, symbol in enumerate(SYMBOLS)}
    symbols = {"version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": []}}
    (folder / "symbols.json").write_text(json.dumps(symbols | {"decoder": {"type": "Fuse"}}))
    return corpus.prepare(
        paths[:-2], folder / "tokens", tokenizer=folder / "symbols.json", valid=paths[-2:]
    )


if __name__ == "__main__":
    main()
