"""Long-context tasks under every policy at equal budgets.

A context is read, prefill is finished, and only then follow the question and the answer, so that no
policy knows the question when it drops tokens; with --query-aware the question is part of the
prefill. A task is scored only where full attention reaches the gate. Divergence from full attention
is measured in any case, on the answer that full attention gives. --gates measures full attention
alone, for a record of its own: which tasks a model solves at all. Parts are kept under out/, so
that an interrupted run continues, and a longer one starts from them.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from jaxkv.errors import UserError
from jaxkv.evals.lib.parts import Parts
from jaxkv.evals.lib.run import SMOLLM2, Measure, Run, flag, run
from jaxkv.evals.tasks import budgets, score
from jaxkv.evals.tasks.budgets import NAMES, RATIOS
from jaxkv.evals.tasks.generators import TASKS, depth_of
from jaxkv.evals.tasks.prompts import ROOM, prompts
from jaxkv.evals.tasks.run import COLUMNS, WIDTH, Batch
from jaxkv.models.loading.llm import Llm
from jaxkv.models.tools.passage import PASSAGE

FLAGS = (
    flag("--tasks", tuple(TASKS), choices=list(TASKS)),
    flag("--lengths", (1024, 2048, 4096), "tokens of a context", minimum=1),
    flag("--ratios", (0.25, 0.5), "budgets, as shares of the context", choices=list(RATIOS)),
    flag("--policies", NAMES, "by default all", choices=NAMES),
    flag("--samples", 20, "of a task and length", minimum=1),
    flag("--batch", 4, "samples read at a time", minimum=1),
    flag("--seed", 0, minimum=0),
    flag("--gates", False, "measure full attention alone"),
    flag("--query-aware", False, "put the question into the prefill"),
)


def record_name(options: argparse.Namespace) -> str:
    if options.gates:
        return "task_gates"
    return "tasks_query_aware" if options.query_aware else "tasks"


def measure(run: Run) -> dict[str, Any]:
    """All tasks, one length after the other."""
    llm, options = run.llm, run.options
    if options.gates and options.query_aware:
        raise UserError("--gates must stand without --query-aware: full attention sees all; leave "
                        "one out")  # fmt: skip
    plan = plan_of(llm, options)
    batches = -(-options.samples // options.batch)
    policies = sum(1 + sum(map(len, by_ratio.values())) for by_ratio in plan.values())
    parts = Parts(run.record, batches * len(options.tasks) * policies)
    tasks: dict[str, dict[str, Any]] = {task: {} for task in options.tasks}
    for length, by_ratio in plan.items():
        for task in options.tasks:
            tasks[task][str(length)] = measure_task(llm, options, task, length, by_ratio, parts)
    return {
        "model": llm.name,
        "context": llm.config.context,
        "query_aware": options.query_aware,
        "samples": options.samples,
        "gate": score.GATE,
        "policies": plan,
        "tasks": tasks,
        "commits_of_parts": parts.commits,
    }


def plan_of(llm: Llm, options: argparse.Namespace) -> dict[int, dict[float, dict[str, str]]]:
    """The policy strings by length and ratio; raises UserError before anything is measured."""
    plan: dict[int, dict[float, dict[str, str]]] = {}
    ratios = [] if options.gates else options.ratios
    tune = not options.gates and not {*budgets.TUNED}.isdisjoint(options.policies)
    for length in options.lengths:
        for task in options.tasks:
            prompts(llm, task, length, 1, options.seed, options.query_aware)
        settings = budgets.tuned(llm, length, ratios) if tune else {}
        plan[length] = {
            ratio: {name: specs[name] for name in options.policies}
            for ratio in ratios
            for specs in [budgets.settings(length, ratio, slots_of(length), settings.get(ratio))]
        }
        for policy in {text for by_name in plan[length].values() for text in by_name.values()}:
            llm.policies(policy)
    return plan


def slots_of(length: int) -> int:
    """Slots of growing caches: a padded context, perhaps with its question, and an answer."""
    return -(-length // WIDTH) * WIDTH + 2 * ROOM


def measure_task(
    llm: Llm, options: argparse.Namespace, task: str, length: int,
    by_ratio: dict[float, dict[str, str]], parts: Parts,
) -> dict[str, Any]:  # fmt: skip
    """One task at one length: full attention, then each policy at each ratio."""
    every = prompts(llm, task, length, options.samples, options.seed, options.query_aware)
    asked = "query-aware" if options.query_aware else "question after prefill"
    parts_by_policy: dict[str, list[np.ndarray]] = {}
    for start in range(0, len(every), options.batch):
        batch_prompts = every[start : start + options.batch]
        seeds = [options.seed + start + i for i in range(len(batch_prompts))]
        batch = Batch(llm, batch_prompts, TASKS[task].tokens, slots_of(length), seeds)
        key = f"{llm.name}, {task}, {length}, {asked}, seed {options.seed}, {start}+{len(seeds)}"
        policies = dict.fromkeys(p for chosen in by_ratio.values() for p in chosen.values())
        for policy in ("full", *policies):
            part = parts.part(f"{key}, {policy}", lambda b=batch, p=policy: b.result(p))
            parts_by_policy.setdefault(policy, []).append(part)
    columns = {policy: columns_of(parts) for policy, parts in parts_by_policy.items()}
    full = columns.pop("full")
    scored = score.passes(float(full["score"].mean()))
    depths = [depth_of(i) for i in range(len(every))]
    return {
        "context_tokens": np.mean([len(prompt.context) for prompt in every]),
        "answer_tokens": full["tokens"].mean(),
        "scored": scored,
        "full": score.summary(full["score"], depths)
        | {
            "right": int((full["score"] == 1).sum()),
            "samples": len(every),
            "state_bytes": full["state_bytes"].mean(),
        },
        "ratios": {
            f"{ratio:g}": {
                name: row(columns[policy], scored, depths) for name, policy in chosen.items()
            }
            for ratio, chosen in by_ratio.items()
        },
    }


def columns_of(parts: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Parts [B,C] as an array of all samples for each of the COLUMNS."""
    return dict(zip(COLUMNS, np.concatenate(parts).T, strict=True))


def row(by_column: dict[str, np.ndarray], scored: bool, depths: Any) -> dict[str, Any]:
    """The entry of one policy in the record; without a score where full attention misses its."""
    entry: dict[str, Any] = score.summary(by_column["score"], depths) if scored else {}
    for name in ("kl", "agreement"):
        entry[name], entry[f"{name}_two_errors"] = score.mean_of(by_column[name])
    return entry | {"state_bytes": by_column["state_bytes"].mean()}


MEASURE = Measure(record_name, measure, FLAGS, model=SMOLLM2, data=lambda _: [PASSAGE])

if __name__ == "__main__":
    run(MEASURE)
