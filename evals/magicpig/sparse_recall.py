"""Right answers to the questions of evals.reservoir.recall by the share of the keys that is read.

The question is a single token after prefill, so it is read sparsely. As part of the prompt, full
attention would answer it.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import jax

from jaxkv import models
from jaxkv.contract import Policy
from jaxkv.evals.lib import facts
from jaxkv.evals.lib.facts import FIRST_NAME, VALUES
from jaxkv.evals.magicpig import matched_budgets
from jaxkv.evals.magicpig.matched_budgets import EndsOnly, Seen
from jaxkv.evals.reservoir import recall as questions
from jaxkv.evals.reservoir.recall import CONTEXT, DISTANCES, LEARNT, LENGTH_WITHIN
from jaxkv.models.llm import Llm
from jaxkv.models.pretrain import pretrain
from jaxkv.policy_spec import format_policy

SINKS, WINDOW = 1, 16  # the models have a sink token; the nearest fact is just outside the window
FEWER = (0.005, 0.01)  # additional shares, because a fact is a single key
STEPS = 600
STRETCHES = 6  # on which shares are measured
NAMES = CONTEXT - 1 - LENGTH_WITHIN  # names that fit after a prompt
ANGLES, MEASURED = 91, 92  # seeds of streams without questions


def recall(given: Namespace) -> dict[str, Any]:
    """Right answers by trained model, method and share."""
    found: dict[str, Any] = {
        "rows": given.questions, "sinks": SINKS, "window": WINDOW,
        "distances": DISTANCES, "values": VALUES, "seeds": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        for seed, llm in trained(given.runs or Path(scratch), given.training).items():
            print(f"recall, model {seed}", file=sys.stderr, flush=True)
            found["seeds"][str(seed)] = of_model(llm, given, seed)
    return found


def trained(runs: Path, seeds: list[int]) -> dict[int, Llm]:
    """Models of evals.reservoir.recall, trained or loaded.

    Raises SystemExit for a model that has not learnt the task.
    """
    tokens, found = facts.write(runs / "data"), {}
    for seed in seeds:
        recipe = questions.recipe_of(seed, STEPS)
        llm = models.load(pretrain(recipe, tokens, runs / str(seed), tell=print))
        full = questions.accuracy(llm, {"full": "full"}, DISTANCES, LENGTH_WITHIN, 50, seed)
        if (least := min(full["full"]["right"].values())) < LEARNT:
            raise SystemExit(
                f"full attention answers {least:.0%} at some distance, so model {seed} has not "
                "learnt it and nothing is written; train it longer"
            )
        found[seed] = llm
    return found


def of_model(llm: Llm, given: Namespace, seed: int) -> dict[str, Any]:
    """Right answers, and the share of the keys that the questions read."""

    def answered(policies: dict[str, Policy | str]) -> dict[str, Any]:
        asked = DISTANCES, LENGTH_WITHIN, given.questions, seed
        lines = questions.accuracy(llm, policies, *asked)
        return {
            n: line | {"policy": format_policy(llm.policies(policies[n]))}
            for n, line in lines.items()
        }

    prompt = len(llm.tokenizer.front) + LENGTH_WITHIN
    seen = captured(llm, ANGLES)
    angles = matched_budgets.angles(llm.spec, seen, prompt, SINKS, WINDOW)
    seen = captured(llm, MEASURED)
    found = answered({"full": "full", "ends alone": EndsOnly(sinks=SINKS, window=WINDOW)})
    found = {"full": found["full"], "ends alone": found["ends alone"], "shares": {}}
    for share in (*FEWER, *given.shares):
        chosen = matched_budgets.methods(
            share, matched_budgets.tables(angles, share), SINKS, WINDOW
        )
        lines = answered(chosen)
        for name, line in lines.items():
            line["share_read"] = matched_budgets.read(llm, chosen[name], seen, prompt, NAMES)
        found["shares"][f"{share:g}"] = lines
        jax.clear_caches()  # a process can map only this many compiled programs
    return found


def captured(llm: Llm, seed: int) -> list[Seen]:
    """Recorded prompts, each followed by the names of its farthest facts."""
    asked = [facts.question(LENGTH_WITHIN, DISTANCES, (seed, i)) for i in range(STRETCHES)]
    return matched_budgets.captured(llm, [
        [*llm.tokenizer.front, *prompt, *(FIRST_NAME + fact // VALUES for fact in known[-NAMES:])]
        for prompt, known in asked
    ])  # fmt: skip
