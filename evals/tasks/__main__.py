"""Long-context tasks under every policy at equal budgets.

A context is read, prefill is finished, and only then follow the question and the answer, so that no
policy knows the question when it drops tokens; with --query-aware the question is part of the
prefill. A task is scored only where full attention reaches the gate. Divergence from full attention
is measured in any case, but in RULER's tasks, on the answer that full attention gives. --gates
measures full attention alone, for a record of its own: which tasks a model solves at all. Parts are
kept under out/, so that an interrupted run continues, and a longer one starts from them.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxkv.errors import UserError
from jaxkv.evals.lib.parts import Parts, named
from jaxkv.evals.lib.run import SMOLLM2, Measure, Run, flag, run
from jaxkv.evals.tasks import budgets, model_rows, ruler, score
from jaxkv.evals.tasks.budgets import CALIBRATED, EQUAL, NAMES, RATIOS, SCORED
from jaxkv.evals.tasks.generators import TASKS, depth_of
from jaxkv.evals.tasks.prompts import ROOM, TaskPrompt, answer_of, check, prompts
from jaxkv.evals.tasks.run import COLUMNS, WIDTH, Batch
from jaxkv.models.loading.llm import Llm
from jaxkv.models.tools.passage import PASSAGE

RULER = "ruler"  # all of its tasks
SELDOM = (CALIBRATED, *SCORED, *EQUAL)  # policies to be named
FLAGS = (
    flag("--tasks", tuple(TASKS), f"{RULER}: all 13 of RULER's own, from {ruler.PACKAGE}",
         choices=[*TASKS, RULER, *ruler.NAMES]),
    flag("--lengths", (1024, 2048, 4096), "tokens of a context", minimum=1),
    flag("--ratios", (0.25, 0.5), "budgets, as shares of the context", choices=list(RATIOS)),
    flag("--policies", tuple(name for name in NAMES if name not in SELDOM),
         f"by default all but {', '.join(SELDOM)}", choices=NAMES),
    flag("--samples", 20, "of a task and length", minimum=1),
    flag("--batch", 4, "samples read at a time", minimum=1),
    flag("--seed", 0, minimum=0),
    flag("--gates", False, "measure full attention alone"),
    flag("--query-aware", False, "put the question into the prefill"),
)  # fmt: skip
# By the share of a context that is cached: name of a policy -> its string.
SpecsByRatio = dict[float, dict[str, str]]


def tasks_of(options: argparse.Namespace) -> list[str]:
    """The names of the tasks, without the name that stands for all of RULER's."""
    named = ((task,) if task != RULER else ruler.NAMES for task in options.tasks)
    return list(dict.fromkeys(task for names in named for task in names))


def record_name(options: argparse.Namespace) -> str:
    suite = "ruler" if set(tasks_of(options)) & set(ruler.NAMES) else "tasks"
    if options.gates:
        return "ruler_gates" if suite == "ruler" else "task_gates"
    return f"{suite}_query_aware" if options.query_aware else suite


def measure(run: Run) -> dict[str, Any]:
    """All tasks, one length after the other."""
    llm, options = run.llm, run.options
    if options.gates and options.query_aware:
        raise UserError("--gates must stand without --query-aware: full attention sees all; leave "
                        "one out")  # fmt: skip
    for name in ("policies", "ratios"):  # argparse gives a list, the default is a tuple
        if options.gates and isinstance(getattr(options, name), list):
            raise UserError(f"--gates measures full attention alone, got --{name}; leave one out")
    if not options.gates:
        model_rows.check(llm, options.policies, options.query_aware)
    names, lengths = tasks_of(options), options.lengths
    if set(names) & set(ruler.NAMES):
        ruler.check_package()
    plan: dict[int, SpecsByRatio] = {}
    for length in lengths:
        check(llm, length)
        for task in {*names} & {*TASKS}:
            prompts(llm, task, length, 1, options.seed, options.query_aware)
            plan[length] = plan.get(length) or budgets_of(llm, options, length)
    batches = -(-options.samples // options.batch)
    policies = 1 + (not options.gates) * len(options.ratios) * len(options.policies)
    parts = Parts(run.record, batches * len(names) * len(lengths) * policies)
    tasks: dict[str, dict[str, Any]] = {task: {} for task in names}
    for length, task in itertools.product(lengths, names):
        tasks[task][str(length)] = measure_task(llm, options, task, length, plan, parts)
    return {
        "model": llm.name,
        "context": llm.config.context,
        "query_aware": options.query_aware,
        "samples": options.samples,
        "gate": score.GATE,
        "kvzap_tokens": model_rows.fitted_tokens(llm) if "kvzap" in options.policies else 0,
        "policies": plan,
        "tasks": tasks,
        "commits_of_parts": parts.commits,
    }


def budgets_of(llm: Llm, options: argparse.Namespace, size: int) -> SpecsByRatio:
    """The policies for contexts of `size` tokens, by ratio.

    Raises UserError for any that cannot run.
    """
    ratios = [] if options.gates else options.ratios
    tune = not {*budgets.TUNED}.isdisjoint(options.policies)
    tuned = budgets.tuned(llm, size, ratios) if ratios and tune else {}
    by_ratio: SpecsByRatio = {}
    for ratio in ratios:
        specs = budgets.settings(size, ratio, slots_of(size), tuned.get(ratio))
        specs |= model_rows.settings(llm, size, ratio, slots_of(size), specs["retrieval"])
        by_ratio[ratio] = {name: specs[name] for name in options.policies}
    for policy in strings(by_ratio):
        llm.policies(model_rows.policy_of(policy))
    return by_ratio


def strings(by_ratio: SpecsByRatio) -> Iterable[str]:
    """The string of each policy once."""
    return dict.fromkeys(text for by_name in by_ratio.values() for text in by_name.values())


def slots_of(length: int) -> int:
    """Slots of growing caches: a padded context, perhaps with its question, and an answer."""
    return -(-length // WIDTH) * WIDTH + 2 * ROOM


def measure_task(
    llm: Llm, options: argparse.Namespace, task: str, length: int, plan: dict[int, SpecsByRatio],
    parts: Parts,
) -> dict[str, Any]:  # fmt: skip
    """One task at one length: full attention, then each policy at each ratio.

    RULER's contexts are shorter than their length, so budgets are shares of their mean. Where full
    attention fails one of RULER's tasks, no policy is measured, and reading stops as soon as that
    is certain. plan: by size of a context; gets what is missing.
    """
    samples = prompts(llm, task, length, options.samples, options.seed, options.query_aware)
    if not samples:
        return {"scored": False, "full": {"samples": 0}, "ratios": {}}
    is_ruler = task in ruler.NAMES
    context_tokens = float(np.mean([len(prompt.context) for prompt in samples]))
    size = round(context_tokens) if is_ruler else length
    asked = "query-aware" if options.query_aware else "question after prefill"
    measured = partial(
        measure_policies, llm, task, slots_of(length), options, parts,
        f"{llm.name}, {task}, {length}, {asked}, seed {options.seed}",
    )  # fmt: skip
    by_ratio: SpecsByRatio = {} if is_ruler else plan[size]
    if is_ruler and not options.gates:
        samples = within_reach(samples, options.batch, partial(measured, ["full"]))
    # Policies share the reading of a batch.
    columns = measured(["full", *strings(by_ratio)], samples)
    full = columns.pop("full")
    scored = score.passes(float(full["score"].mean()))
    if is_ruler and scored:
        by_ratio = plan[size] = plan.get(size) or budgets_of(llm, options, size)
        columns = measured(strings(by_ratio), samples)
    depths = [] if is_ruler else [depth_of(i) for i in range(len(samples))]
    return {
        "context_tokens": context_tokens,
        "answer_tokens": full["tokens"].mean(),
        "scored": scored,
        "full": score.summary(full["score"], depths)
        | {
            "right": int((full["score"] == 1).sum()),
            "samples": len(samples),
            "state_bytes": full["state_bytes"].mean(),
        },
        "ratios": {
            f"{ratio:g}": {
                name: row(columns[policy], scored, depths) for name, policy in chosen.items()
            }
            for ratio, chosen in by_ratio.items()
        },
    }


def within_reach(
    samples: list[TaskPrompt], batch: int, measured: Callable[[list[TaskPrompt]], Any]
) -> list[TaskPrompt]:
    """All samples, or the first batches after which full attention can no longer pass the gate.

    measured: the COLUMNS of full attention for the first samples.
    """
    for count in range(batch, len(samples), batch):
        right = measured(samples[:count])["full"]["score"].sum()
        if not score.passes((right + len(samples) - count) / len(samples)):
            return samples[:count]
    return samples


def measure_policies(
    llm: Llm, task: str, slots: int, options: argparse.Namespace, parts: Parts, title: str,
    policies: Iterable[str], samples: Sequence[TaskPrompt],
) -> dict[str, dict[str, np.ndarray]]:  # fmt: skip
    """By policy, the COLUMNS of all prompts; one batch of them is in memory at a time."""
    tokens, match = answer_of(task)
    computed: dict[str, list[np.ndarray]] = {policy: [] for policy in policies}
    for start in range(0, len(samples), options.batch):
        of_batch = samples[start : start + options.batch]
        seeds = [options.seed + start + i for i in range(len(of_batch))]
        batch = Batch(llm, of_batch, tokens, slots, seeds, match)
        for policy, of_policy in computed.items():
            text = named(policy, llm.policies(model_rows.policy_of(policy)))
            name = f"{title}, {start}+{len(seeds)}, {text}"
            of_policy.append(parts.part(name, partial(batch.result, policy)))
    return {
        policy: dict(zip(COLUMNS, np.concatenate(of_policy).T, strict=True))
        for policy, of_policy in computed.items()
    }


def row(by_column: dict[str, np.ndarray], scored: bool, depths: Any) -> dict[str, Any]:
    """The entry of one policy in the record; without a score where full attention misses its."""
    entry: dict[str, Any] = score.summary(by_column["score"], depths) if scored else {}
    for name in ("kl", "agreement"):
        entry[name], entry[f"{name}_two_errors"] = score.mean_of(by_column[name])
    heads = float(by_column["answer_heads"].mean())
    entry["answer_heads"] = heads if np.isfinite(heads) else None
    return entry | {"state_bytes": by_column["state_bytes"].mean()}


MEASURE = Measure(record_name, measure, FLAGS, model=SMOLLM2, data=lambda _: [PASSAGE])

if __name__ == "__main__":
    run(MEASURE)
