"""Recall by distance: accuracy on facts n tokens back, at equal bytes.

The papers make this claim without a figure. `pretrain` trains a small model on
evals/reservoir/facts.py. Every policy then reads streams with a fact at each of several distances
from the end, among other facts or (needle) among letters only. Each question starts from the same
state. Methods that compress a finished prompt do so before the question.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.run import Measure, Run, flag, run
from jaxkv.evals.lib.table import table
from jaxkv.evals.lib.verdict import Derived, Results, Statement, above, below, claim, within
from jaxkv.evals.reservoir import facts
from jaxkv.models.loading.llm import Llm
from jaxkv.models.training.pretrain import pretrain
from jaxkv.models.training.recipes import Recipe, read_recipe
from jaxkv.policy_spec import max_lookback, parse_policy
from jaxkv.typing import Int32

CONTEXT = 512
SLOTS = 128
CHUNK = 64  # tokens per prefill chunk
DISTANCES = (16, 32, 48, 64, 96, 129, 192, 256, 320, 384)
FAR = (64, 129, 256, 512, 1024, 2000)  # in streams longer than the trained context
MIN_ACCURACY = 0.9  # of full attention; below it, no result is meaningful
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
LENGTH_WITHIN = CONTEXT - 9  # tokens of a prompt within the trained context, without the sink token
TOKENS_LEFT = 141  # of such a prompt after compression
COMPRESSED = {
    "balance": "balance:sinks=1,window=16,rounds=2",
    "uniform": "uniform:sinks=1,window=16,rounds=2",
    "uniform, unweighted": "uniform:sinks=1,window=16,rounds=2,weighted=false",
    "snapkv": f"snapkv:capacity={TOKENS_LEFT},window=16",
    "pyramidkv": f"pyramidkv:capacity={TOKENS_LEFT},window=16",
}


FLAGS = (
    flag("--seeds", (0, 1, 2, 3, 4), "of training"),
    flag("--rows", 100, "questions at each distance", minimum=1),
    flag("--steps", 600, minimum=1),
    flag("--runs", type=Path, about="folder for data and runs (default: temporary)"),
)


def measure(run: Run) -> dict[str, Any]:
    """Train a model per seed, and ask all of them under every policy."""
    options, trained, by_seed = run.options, {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        runs = options.runs or Path(scratch)
        tokens = facts.write(runs / "data")
        for seed in options.seeds:
            recipe = recipe_of(seed, options.steps)
            trained[seed] = models.load(pretrain(recipe, tokens, runs / str(seed), tell=print))
            check_learnt(trained[seed], seed, options.steps)
        for seed, llm in trained.items():
            ask = partial(accuracy, llm, rows=options.rows, seed=seed)
            by_seed[str(seed)] = {
                "within": ask(POLICIES | COMPRESSED, DISTANCES, LENGTH_WITHIN),
                "needle": ask(POLICIES | COMPRESSED, DISTANCES, LENGTH_WITHIN, others=False),
                "beyond": ask(endless(llm), FAR, FAR[-1] + 64),
            }
    return {
        "slots": SLOTS, "left": TOKENS_LEFT, "context": CONTEXT, "rows": options.rows,
        "policies": POLICIES, "compressed": COMPRESSED, "seeds": by_seed,
        "recipe": dataclasses.asdict(recipe),
    }  # fmt: skip


def check_learnt(llm: Llm, seed: int, steps: int) -> None:
    """Exit where full attention does not answer: no result would be meaningful."""
    full = accuracy(llm, {"full": "full"}, DISTANCES, LENGTH_WITHIN, 50, seed)
    if (lowest := min(full["full"]["right"].values())) < MIN_ACCURACY:
        raise SystemExit(
            f"full attention answers {lowest:.0%} at some distance, so the model has not learnt "
            f"the task and nothing is written; give more than {steps} --steps"
        )


def recipe_of(seed: int, steps: int) -> Recipe:
    return read_recipe("tiny", [
        "layers=2", "width=128", "heads=2", "kv_heads=2", "mlp=256", f"context={CONTEXT}",
        "sink_variant=token", f"steps={steps}", "batch_size=16", "optimizer=muon", "lr=1e-2",
        f"seed={seed}",
    ])  # fmt: skip


def accuracy(
    llm: Llm, policies: dict[str, str], distances: Sequence[int], length: int, rows: int, seed: int,
    others: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """By policy and distance, the share of right answers. others: among other facts."""
    seeds = [(seed, row) for row in range(rows)]
    asked = [facts.question(length, tuple(distances), row_seed, others) for row_seed in seeds]
    by_policy: dict[str, Any] = {}
    for name, text in policies.items():
        predictions, sequence_bytes = answers(llm, text, *zip(*asked, strict=True), seeds)
        right = np.mean(predictions == np.array([facts_asked for _, facts_asked in asked]), axis=0)
        shares = dict(zip(map(str, distances), right.tolist(), strict=True))
        by_policy[name] = {"policy": text, "right": shares, "state_bytes": sequence_bytes}
        print(f"{name}: {', '.join(f'{d} {r:.2f}' for d, r in shares.items())}", flush=True)
    return by_policy


def answers(
    llm: Llm, text: str, prompts: Sequence[Sequence[int]], facts_asked: Sequence[Sequence[int]],
    seeds: Sequence[Sequence[int]],
) -> tuple[Int32[np.ndarray, "B X"], int]:  # fmt: skip
    """The model's answers to the names of known facts, and the bytes per sequence.

    Each question starts from the state after prefill. seeds: seeds of each sequence's draws.
    """
    drawn = [int(np.random.default_rng([*row_seed, 1]).integers(2**31)) for row_seed in seeds]
    stream = models.Stream(llm, text, batch=len(prompts), seed=drawn)
    stream.prefill([[*llm.tokenizer.front, *prompt] for prompt in prompts], CHUNK)
    stream.finish_prefill()
    after_prompt, lengths = stream.decoding, stream.lengths
    predictions = []
    for of_distance in zip(*facts_asked, strict=True):  # those of one distance
        stream.decoding, stream.lengths = jax.tree.map(jnp.copy, after_prompt), lengths
        stream.prefill([[facts.FIRST_NAME + fact // facts.VALUES] for fact in of_distance], 1)
        predictions.append(np.asarray(stream.decoding.logits).argmax(axis=1))
    return np.stack(predictions, axis=1).astype(np.int32), stream.state_bytes // len(prompts)


def endless(llm: Llm) -> dict[str, str]:
    """The policies that stay within the trained context for every text length."""
    return {
        name: text
        for name, text in POLICIES.items()
        if max_lookback(parse_policy(text)) <= llm.config.context
    }


MEASURE = Measure("recall", measure, FLAGS)
NEARER = (16, 48)  # tokens back: in every window
BETWEEN = (64, 96)  # in streaming's window, and not in the shorter windows beside a sample
EVICTED = (SLOTS + 1, CONTEXT)  # beyond every window
LONGER = (SLOTS + 1, FAR[-1])  # the same, in streams longer than the trained context
ALL_DISTANCES = (0, CONTEXT)
MIN_DIFFERENCE = 0.05  # share of all answers; a smaller difference counts as none


def right_answers(
    results: Results, policy: str, distances: tuple[int, int], part: str = "within"
) -> list[float]:
    """By trained model, the share of right answers about facts so many tokens back."""
    near, farthest = distances
    return [
        mean(
            share
            for distance, share in model[part][policy]["right"].items()
            if near <= int(distance) <= farthest
        )
        for model in results["seeds"].values()
    ]


def shares(policies: Sequence[str], distances: tuple[int, int], part: str = "within") -> Derived:
    """The right answers of each policy."""
    return lambda results: {
        policy: right_answers(results, policy, distances, part) for policy in policies
    }


def gains(pairs: Sequence[tuple[str, str]], distances: tuple[int, int]) -> Derived:
    """The right answers of the first policy of each pair minus those of the second."""

    def measure(results: Results) -> dict[str, list[float]]:
        return {
            f"{policy} over {baseline}": [
                x - y
                for x, y in zip(
                    right_answers(results, policy, distances),
                    right_answers(results, baseline, distances),
                    strict=True,
                )
            ]
            for policy, baseline in pairs
        }

    return measure


def evicted_needles(results: Results) -> dict[str, float]:
    """Of a record of tasks: right answers about evicted parts, reservoir's minus streaming's."""
    cases = {}
    for task, lengths in results["tasks"].items():
        for length, measured in lengths.items():
            for ratio, rows in measured["ratios"].items():
                if not measured["scored"] or not {"streaming", "reservoir"} <= set(rows):
                    continue
                evicted = int(len(measured["full"]["by_depth"]) * (1 - float(ratio)))
                sample, window = (
                    mean(rows[name]["by_depth"][:evicted]) for name in ("reservoir", "streaming")
                )
                cases[f"{task}, {length} tokens, {ratio}"] = sample - window
    return cases


SAMPLES = ("reservoir", "stratified", "balance-stream")
SIZES = ("reservoir, sample 16", "reservoir", "reservoir, sample 256")
NO_FIGURE = "sections 6 and 7, no figure"
RESERVOIR = (
    claim(NO_FIGURE,
          "About evicted parts of a context, a sample answers over 5 percentage points more "
          "needles and pass keys than streaming",
          "tasks", above(evicted_needles, MIN_DIFFERENCE), unit="points"),
    claim(NO_FIGURE,
          "In small models, a sample answers over 5 percentage points more questions about evicted "
          "facts than streaming, by the equations and by the pseudocode (geometric)",
          "recall",
          above(gains([(name, "streaming") for name in ("reservoir", "reservoir, geometric")],
                      EVICTED), MIN_DIFFERENCE), unit="points"),
    claim("section 6, no figure",
          "A sample of 64 tokens answers over 5 percentage points more questions about evicted "
          "facts than one of 16, and one of 256 as many more than that",
          "recall",
          above(gains([(large, small) for small, large in pairwise(SIZES)], EVICTED),
                MIN_DIFFERENCE),
          unit="points"),
)  # fmt: skip
BALANCEKV = (
    claim("not claimed",
          "In small models BalanceKV answers over 5 percentage points more questions than uniform "
          "sampling, SnapKV, PyramidKV and StreamingLLM",
          "recall",
          above(gains([("balance", name) for name in
                       ("uniform", "snapkv", "pyramidkv", "streaming")], ALL_DISTANCES),
                MIN_DIFFERENCE),
          unit="points"),
)  # fmt: skip


def by_policy(policies: Sequence[str], columns: dict[str, tuple[str, tuple[int, int]]]) -> str:
    """Right answers by policy, for each column's part of the record and distances."""
    results = read("recall")["results"]
    return table(["cache", *columns], (
        (f"`{policy}`", *(
            f"{mean(right_answers(results, policy, distances, part)):.0%}"
            if policy in results["seeds"]["0"][part] else ""
            for part, distances in columns.values()
        )) for policy in policies
    ))  # fmt: skip


def streamed_table() -> str:
    """Recall of caches that evict while they read."""
    return by_policy(list(POLICIES), {
        "16 to 48 tokens back": ("within", NEARER),
        "64 and 96": ("within", BETWEEN),
        "129 to 384": ("within", EVICTED),
        "129 to 384, only fact": ("needle", EVICTED),
        "129 to 2,000, in longer streams": ("beyond", LONGER),
    })  # fmt: skip


def compressed_table() -> str:
    """Recall after a prompt was compressed."""
    return by_policy(["full", "streaming", *COMPRESSED], {
        "32 to 96 tokens back": ("within", (32, 96)),
        "129 to 384": ("within", EVICTED),
        "129 to 384, only fact": ("needle", EVICTED),
    })  # fmt: skip


TABLES = {"recall": streamed_table, "recall_compressed": compressed_table}
PAGE, BALANCEKV_PAGE = "docs/results/reservoir.md", "docs/results/balancekv.md"
WHICH_PAGE = "docs/which_cache.md"
STATEMENTS = (
    Statement(PAGE, "A sample recalls more of the facts that every window has evicted", "recall",
              [above(gains([(name, "streaming") for name in SAMPLES], EVICTED), MIN_DIFFERENCE)]),
    Statement(PAGE, "A sample of 64 tokens that represents the whole past loses most facts that "
              "only the longer window of `streaming` still holds", "recall",
              [below(shares(SAMPLES, BETWEEN), 0.5)]),
    Statement(PAGE, "it recalls less than a fifth", "recall",
              [below(shares(SAMPLES, LONGER, "beyond"), 0.2)]),
    Statement(PAGE, "a sample recalls no evicted needle that `streaming` does not recall", "tasks",
              [below(evicted_needles, 1e-9)]),
    Statement(BALANCEKV_PAGE, "`balance` recalls about as much as a uniform sample", "recall",
              [within(gains([("balance", "uniform")], ALL_DISTANCES), by=MIN_DIFFERENCE)]),
    Statement(BALANCEKV_PAGE, "`pyramidkv` recalls most", "recall",
              [above(gains([("pyramidkv", name) for name in COMPRESSED if name != "pyramidkv"],
                           ALL_DISTANCES))]),
    Statement(WHICH_PAGE, "recall distant facts more often with a sample", "recall",
              [above(gains([(name, "streaming") for name in SAMPLES], EVICTED), MIN_DIFFERENCE)]),
    Statement(WHICH_PAGE, "`balance`, `uniform`, `snapkv` and `pyramidkv` answer more questions "
              "about distant facts than `streaming`, and fewer about near ones", "recall",
              [above(gains([(name, "streaming") for name in COMPRESSED], EVICTED), MIN_DIFFERENCE),
               below(gains([(name, "streaming") for name in COMPRESSED], (32, 96)))]),
)  # fmt: skip

if __name__ == "__main__":
    run(MEASURE)
