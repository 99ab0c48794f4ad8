"""Recall by distance: accuracy on facts n tokens back, at equal bytes.

The papers make this claim without a figure. `models.pretrain` trains a small model on
evals/lib/facts.py. Every policy then reads streams with a fact at each of several distances from
the end, among other facts or (needle) among letters only. Each question starts from the same state.
Methods that compress a finished prompt do so before the question.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.evals.lib.facts import FIRST_NAME, VALUES, question, write
from jaxkv.evals.lib.record import Record, make_parser, run_command
from jaxkv.models.llm import Llm
from jaxkv.models.pretrain import pretrain
from jaxkv.models.recipes import Recipe, read_recipe
from jaxkv.policy_spec import max_lookback, parse_policy
from jaxkv.typing import Int32

CONTEXT = 512
SLOTS = 128
CHUNK = 64  # tokens per prefill chunk
DISTANCES = (16, 32, 48, 64, 96, 129, 192, 256, 320, 384)
FAR = (64, 129, 256, 512, 1024, 2000)  # in streams longer than the trained context
LEARNT = 0.9  # minimal accuracy of full attention, below which no result is meaningful
ENDS = "sinks=1,window=63"
POLICIES = {  # of equal slots, unless the name has another number
    "full": "full",
    "window": f"window:window={SLOTS}",
    "streaming": f"streaming:sinks=1,window={SLOTS - 1}",
    "reservoir": f"reservoir:{ENDS},sample=64",
    "reservoir, weighted": f"reservoir:{ENDS},sample=64,weighted=true",
    "reservoir, geometric": f"reservoir:{ENDS},sample=64,scheme=geometric",
    "reservoir, sample 16": f"reservoir:{ENDS},sample=16",
    "reservoir, sample 256": f"reservoir:{ENDS},sample=256",
    "stratified": f"stratified:{ENDS},sample=64",
    "stratified, weighted": f"stratified:{ENDS},sample=64,weighted=true",
    "stratified, sample 16": f"stratified:{ENDS},sample=16",
    "stratified, sample 256": f"stratified:{ENDS},sample=256",
    "balance-stream": f"balance-stream:{ENDS},levels=3,block=32",
    "balance-stream, weighted": f"balance-stream:{ENDS},levels=3,block=32,weighted=true",
    "h2o": "h2o:heavy=64,window=64",
}
# Number of tokens that remain of a prompt of LENGTH_WITHIN after compression.
LENGTH_WITHIN, LEFT = CONTEXT - 9, 141  # without the sink token
COMPRESSED = {
    "balance": "balance:sinks=1,window=16,rounds=2",
    "uniform": "uniform:sinks=1,window=16,rounds=2",
    "uniform, unweighted": "uniform:sinks=1,window=16,rounds=2,weighted=false",
    "snapkv": f"snapkv:capacity={LEFT},window=16",
    "pyramidkv": f"pyramidkv:capacity={LEFT},window=16",
}


def main() -> None:
    ask = make_parser("jaxkv.evals.reservoir.recall", __doc__)
    ask.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of training")
    ask.add_argument("--rows", type=int, default=100, help="questions at each distance")
    ask.add_argument("--steps", type=int, default=600)
    ask.add_argument("--runs", type=Path, help="folder for data and runs (default: temporary)")
    ask.add_argument("--quick", action="store_true", help="write to out/, which no claim reads")
    given = ask.parse_args()

    record = Record("recall", [], given.seeds, quick=given.quick)
    results: dict[str, Any] = {
        "slots": SLOTS, "left": LEFT, "context": CONTEXT, "rows": given.rows,
        "policies": POLICIES, "compressed": COMPRESSED, "seeds": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        runs = given.runs or Path(scratch)
        tokens = write(runs / "data")
        trained = {}
        for seed in given.seeds:
            recipe = recipe_of(seed, given.steps)
            trained[seed] = models.load(pretrain(recipe, tokens, runs / str(seed), tell=print))
            full = accuracy(trained[seed], {"full": "full"}, DISTANCES, LENGTH_WITHIN, 50, seed)
            if (least := min(full["full"]["right"].values())) < LEARNT:
                raise SystemExit(
                    f"full attention answers {least:.0%} at some distance, so the model has not "
                    f"learnt the task and nothing is written; give more than {given.steps} --steps"
                )
        for seed, llm in trained.items():
            read = partial(accuracy, llm, rows=given.rows, seed=seed)
            results["seeds"][str(seed)] = {
                "within": read(POLICIES | COMPRESSED, DISTANCES, LENGTH_WITHIN),
                "needle": read(POLICIES | COMPRESSED, DISTANCES, LENGTH_WITHIN, facts=False),
                "beyond": read(endless(llm), FAR, FAR[-1] + 64),
            }
    results["recipe"] = dataclasses.asdict(recipe)
    record.finish(results)


def recipe_of(seed: int, steps: int) -> Recipe:
    return read_recipe("tiny", [
        "layers=2", "width=128", "heads=2", "kv_heads=2", "mlp=256", f"context={CONTEXT}",
        "sinks=token", f"steps={steps}", "rows=16", "optimizer=muon", "lr=1e-2", f"seed={seed}",
    ])  # fmt: skip


def accuracy(
    llm: Llm, policies: dict[str, str], distances: Sequence[int], length: int, rows: int, seed: int,
    facts: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """By policy and distance, the share of right answers."""
    seeds = [(seed, row) for row in range(rows)]
    asked = [question(length, tuple(distances), one, facts) for one in seeds]
    found: dict[str, Any] = {}
    for name, text in policies.items():
        said, held = answers(llm, text, *zip(*asked, strict=True), seeds)
        right = np.mean(said == np.array([known for _, known in asked]), axis=0)
        shares = dict(zip(map(str, distances), right.tolist(), strict=True))
        found[name] = {"policy": text, "right": shares, "state_bytes": held}
        print(f"{name}: {', '.join(f'{d} {r:.2f}' for d, r in shares.items())}", flush=True)
    return found


def answers(
    llm: Llm, text: str, prompts: Sequence[Sequence[int]], known: Sequence[Sequence[int]],
    seeds: Sequence[Sequence[int]],
) -> tuple[Int32[np.ndarray, "B X"], int]:  # fmt: skip
    """The model's answers to the names of known facts, and the bytes per sequence.

    Each question starts from the state after prefill. seeds: of each sequence's draws.
    """
    drawn = [int(np.random.default_rng([*one, 1]).integers(2**31)) for one in seeds]
    held = models.Stream(llm, text, batch=len(prompts), seed=drawn)
    held.prefill([[*llm.tokenizer.front, *prompt] for prompt in prompts], CHUNK)
    held.finish_prefill()
    read, lengths = held.decoding, held.lengths
    said = []
    for facts in zip(*known, strict=True):  # those of one distance
        held.decoding, held.lengths = jax.tree.map(jnp.copy, read), lengths
        held.prefill([[FIRST_NAME + fact // VALUES] for fact in facts], 1)
        said.append(np.asarray(held.decoding.logits).argmax(axis=1))
    return np.stack(said, axis=1).astype(np.int32), held.state_bytes // len(prompts)


def endless(llm: Llm) -> dict[str, str]:
    """The policies that stay within the trained context for every text length."""
    return {
        name: text
        for name, text in POLICIES.items()
        if max_lookback(parse_policy(text)) <= llm.config.context
    }


if __name__ == "__main__":
    run_command(main)
