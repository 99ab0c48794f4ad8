"""A needle that left the window, in text longer than the trained context: constant memory only.

The cache is compressed while the text is read, and the question comes at the end. A query sees at
most the same number of tokens per KV head under every policy, a mean over the heads where their
budgets are unequal. Full attention cannot read a text beyond the trained context; within it, full
attention solves the task (record task_gates).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxkv.evals.lib.parts import Parts, named
from jaxkv.evals.lib.record import read
from jaxkv.evals.lib.run import SMOLLM2, Measure, Run, flag, run
from jaxkv.evals.lib.table import UNMEASURED, table
from jaxkv.evals.lib.verdict import Derived, Statement, above, below, within
from jaxkv.evals.tasks import model_rows, score
from jaxkv.evals.tasks.budgets import (
    CALIBRATED_HALF_WINDOW,
    HALF_WINDOW,
    SINKS,
    WINDOW,
    repeated,
)
from jaxkv.evals.tasks.generators import TASKS, depth_of
from jaxkv.evals.tasks.prompts import prompts
from jaxkv.evals.tasks.run import Batch
from jaxkv.models.tools.passage import PASSAGE
from jaxkv.policy_spec import parse_policy


def policies(budget: int, every: int, calibration: str) -> dict[str, str]:
    """The policies of one budget, by name. calibration: the name of the model's head shares."""
    ends, half = f"sinks={SINKS},window={budget - budget // 2 - SINKS}", budget // 2
    by_name = repeated(budget, every, WINDOW, calibration)
    return {
        "streaming": f"streaming:sinks={SINKS},window={budget - SINKS}",
        "reservoir": f"reservoir:{ends},sample={half}",
        **{name: by_name[name] for name in ("snapkv", "tova", "rkv", "vase", "triattention")},
        "keydiff": by_name["keydiff"],
        "keydiff-unrotated": f"{by_name['keydiff']},keys=unrotated",
        "retrieval": by_name["retrieval"],
        HALF_WINDOW: by_name[HALF_WINDOW],
        CALIBRATED_HALF_WINDOW: by_name[CALIBRATED_HALF_WINDOW],
    }


BUDGET, EVERY = 1024, 128
NAMES = tuple(policies(BUDGET, EVERY, "FILE"))
FLAGS = (
    flag("--tasks", ("needle",), choices=list(TASKS)),
    flag("--lengths", (2048, 8192, 16384), "tokens of a text", minimum=1),
    flag(
        "--policies",
        tuple(name for name in NAMES if name != CALIBRATED_HALF_WINDOW),
        f"by default all but {CALIBRATED_HALF_WINDOW}",
        choices=NAMES,
    ),
    flag("--budget", BUDGET, "tokens that a query sees per KV head, at most", minimum=256),
    flag("--every", EVERY, "tokens between two compressions", minimum=1),
    flag("--samples", 20, "of a task and length", minimum=1),
    flag("--batch", 4, "samples read at a time", minimum=1),
    flag("--seed", 0, minimum=0),
)


def measure(run: Run) -> dict[str, Any]:
    """The right answers of the policies, by task and length."""
    options, llm = run.options, run.llm
    model_rows.check(llm, options.policies)
    by_name = policies(options.budget, options.every, str(model_rows.calibration_of(llm)))
    by_name = {name: by_name[name] for name in options.policies}
    batches = -(-options.samples // options.batch)
    cases = batches * len(options.tasks) * len(options.lengths) * len(by_name)
    parts, tasks = Parts(run.record, cases), {}
    for task in options.tasks:
        tasks[task] = {}
        for length in options.lengths:
            drawn = prompts(llm, task, length, options.samples, options.seed, beyond=True)
            tasks[task][str(length)] = {}
            for name, policy in by_name.items():
                right = []
                for start in range(0, len(drawn), options.batch):
                    part = drawn[start : start + options.batch]
                    seeds = [options.seed + start + i for i in range(len(part))]
                    batch = Batch(llm, part, TASKS[task].tokens, options.budget, seeds)
                    key = f"{llm.name}, {task}, {length}, seed {options.seed}, {start}+{len(part)}"
                    answers = lambda b=batch, p=policy: right_answers(b, p)
                    key = f"{key}, {named(policy, llm.policies(policy))}"
                    right.append(parts.part(key, answers))
                depths = [depth_of(i) for i in range(len(drawn))]
                entry = score.summary(np.concatenate(right), depths)
                tasks[task][str(length)][name] = entry
                print(f"{task}, {length} tokens, {name}: {entry['score']:.2f}", flush=True)
    return {
        "model": llm.name,
        "context": llm.config.context,
        "samples": options.samples,
        "policies": by_name,
        "tasks": tasks,
        "commits_of_parts": parts.commits,
    }


def right_answers(batch: Batch, policy: str) -> np.ndarray:
    """The share of each prompt's answers that the greedy answer contains."""
    stream = batch.prefill(policy)
    texts = [batch.llm.tokenizer.decode(answer) for answer in batch.greedy(stream)]
    pairs = zip(texts, batch.prompts, strict=True)
    return np.array([score.match(text, prompt.answers) for text, prompt in pairs])


NAME = "endless_needle"
MEASURE = Measure(NAME, measure, FLAGS, SMOLLM2, data=lambda _: [PASSAGE])


# The records of the table; the later ones have other budgets or policies.
RECORDS = (NAME, f"{NAME}_half_window", f"{NAME}_eighth")


def answers_table() -> str:
    """A row per policy, a column per length and budget."""
    records = [read(name)["results"] for name in RECORDS]
    (count,) = {results["samples"] for results in records}
    right: dict[str, dict[tuple[int, int], str]] = {}  # by policy, then length and budget
    for results in records:
        budget = seen_tokens(next(iter(results["policies"].values())))
        for length, by_name in results["tasks"]["needle"].items():
            for name, row in by_name.items():
                cell = f"{count * row['score']:.0f}"
                right.setdefault(name, {})[int(length), budget] = cell
    columns = sorted({column for row in right.values() for column in row})
    heads = ("policy", *(f"{length:,} tokens, {budget:,} cached" for length, budget in columns))
    caption = f"Right answers of {count} under SmolLM2-135M."
    return table(heads, (
        (f"`{name}`", *(row.get(column, UNMEASURED) for column in columns))
        for name, row in right.items()
    ), caption)  # fmt: skip


def seen_tokens(text: str) -> int:
    """The most tokens per KV head that a query sees under a policy string of `policies`."""
    policy = parse_policy(text)
    ends = policy.sinks + policy.window if text.startswith("streaming") else policy.capacity
    return ends + (getattr(policy, "every", None) or 0)


TABLES = {NAME: answers_table}
PAGE, WHICH, NEGATIVE = "docs/results/tasks.md", "docs/which_cache.md", "evals/NEGATIVE.md"


def in_quarter(number: int) -> Derived:
    """The share of needles that calibrated budgets find in this quarter of 20,000 tokens."""
    row = lambda results: results["tasks"]["needle"]["20000"][CALIBRATED_HALF_WINDOW]
    return lambda results: {"20000": row(results)["by_depth"][number]}


STATEMENTS = (
    *(Statement(page, says, f"{NAME}_eighth",
                [within(f"tasks/needle/20000/{CALIBRATED_HALF_WINDOW}/score", 1)])
      for page, says in (
          (PAGE, "With 2,560 of 20,000 tokens cached and calibrated budgets it finds all"),
          (WHICH, "With 2,560 tokens and calibrated budgets it finds all 8 in 20,000"),
      )),
    Statement(WHICH, "With 1,024 tokens per KV head, `retrieval` finds 5 of 8 needles in 8,192 "
              "tokens, and none in 20,000. With calibrated budgets it finds all 8, and 4", NAME,
              [within("tasks/needle/8192/retrieval/score", 5 / 8),
               within(f"tasks/needle/8192/{CALIBRATED_HALF_WINDOW}/score", 1),
               within("tasks/needle/20000/retrieval/score", 0),
               within(f"tasks/needle/20000/{CALIBRATED_HALF_WINDOW}/score", 0.5)]),
    Statement(WHICH, "those of the oldest quarter of the text were lost and those of the newest "
              "quarter found", NAME,
              [within(in_quarter(0), 0), within(in_quarter(3), 1)]),
    Statement(PAGE, "With half of its capacity as window and without calibrated budgets it finds "
              "few", f"{NAME}_half_window",
              [above(f"tasks/needle/8192/{HALF_WINDOW}/score"),
               below(f"tasks/needle/8192/{HALF_WINDOW}/score", 0.5)]),
    Statement(PAGE, "In 8,192 tokens, of which a cache has an eighth, `retrieval` finds most "
              "needles, and all with calibrated budgets", NAME,
              [above("tasks/needle/8192/retrieval/score", 0.5),
               within(f"tasks/needle/8192/{CALIBRATED_HALF_WINDOW}/score", 1)]),
    Statement(PAGE, "20,000 tokens it finds none, and half of them with calibrated budgets", NAME,
              [within("tasks/needle/20000/retrieval/score", 0),
               within(f"tasks/needle/20000/{CALIBRATED_HALF_WINDOW}/score", 0.5)]),
    Statement(NEGATIVE, "In 20,000 tokens of endless text, of which 1,024 are cached, it finds no "
              "needle; with calibrated budgets and half of its tokens as the window it finds half "
              "of them", NAME,
              [within("tasks/needle/20000/retrieval/score", 0),
               within(f"tasks/needle/20000/{CALIBRATED_HALF_WINDOW}/score", 0.5)]),
    Statement(PAGE, "`streaming` and `keydiff` find at most one needle of either length", NAME,
              [below(f"tasks/needle/{length}/{name}/score", 0.13)
               for length in ("8192", "20000") for name in ("streaming", "keydiff")]),
)  # fmt: skip

if __name__ == "__main__":
    run(MEASURE)
