"""RULER's own tasks through `jaxkv serve`: the client of RULER's package asks a loopback server.

A prompt is that of `python -m jaxkv.evals.tasks --query-aware`: a server finishes the prefill after
the whole prompt, the question and the beginning of the answer included. The client sends it as
token ids to /v1/completions, one request at a time, and the package scores the answers. Tasks that
the first policy fails are not asked again, so it should be `full`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from jaxkv import defaults
from jaxkv.evals.benchmarks.servers import OURS, started
from jaxkv.evals.lib.parts import Parts
from jaxkv.evals.lib.record import RESULTS, read
from jaxkv.evals.lib.run import SMOLLM2, Measure, Run, flag, run
from jaxkv.evals.lib.table import UNMEASURED, table
from jaxkv.evals.tasks import ruler, score
from jaxkv.evals.tasks.prompts import ROOM, TaskPrompt, check, prompts

RECORD, SEED = "ruler_served", 42  # the seed of the package
NAME = "ruler"  # of the model in requests
FLAGS = (
    flag("--tasks", ruler.NAMES, "of RULER", choices=ruler.NAMES),
    flag("--lengths", (1024, 2048, 4096), "tokens of a prompt and its answer", minimum=1),
    flag("--policies", ("full", defaults.POLICY), "of the servers, the first to gate the tasks"),
    flag("--samples", 20, "of a task and length", minimum=1),
    flag("--seed", SEED, minimum=0),
)
Ask = Callable[[Sequence[int]], str]  # a prompt -> its greedy answer


def measure(run: Run) -> dict[str, Any]:
    """The scores of each policy, one server after the other."""
    llm, options = run.llm, run.options
    ruler.check_package()
    for length in options.lengths:
        check(llm, length)
    for policy in options.policies:
        llm.policies(policy)
    drawn = {
        (task, length): prompts(llm, task, length, options.samples, options.seed, query_aware=True)
        for length in options.lengths
        for task in options.tasks
    }
    parts = Parts(run.record, len(drawn) * len(options.policies))
    gate, *gated_policies = options.policies
    served = partial(served_scores, options.model, max(options.lengths) + ROOM, parts)
    scores = {gate: served(gate, f"{llm.name}, seed {options.seed}", drawn)}
    solved = {
        case: of_case for case, of_case in drawn.items()
        if of_case and score.passes(float(scores[gate][case].mean()))
    }  # fmt: skip
    for policy in gated_policies:
        scores[policy] = served(policy, f"{llm.name}, seed {options.seed}", solved)
    return {
        "model": llm.name,
        "samples": options.samples,
        "gate": score.GATE,
        "policies": {
            policy: {
                f"{task}, {length}": score.summary(values) | {"samples": len(values)}
                for (task, length), values in by_case.items()
            }
            for policy, by_case in scores.items()
        },
        "commits_of_parts": parts.commits,
    }


def served_scores(
    model: str, max_len: int, parts: Parts, policy: str, title: str,
    drawn: dict[tuple[str, int], list[TaskPrompt]],
) -> dict[tuple[str, int], np.ndarray]:  # fmt: skip
    """The score of each prompt by task and length, from a new server."""
    command = [*OURS, "--model", model, "--served-model-name", NAME, "--policy", policy]
    command += ["--max-len", str(max_len)]
    scores = {}
    with started(command, {}) as server:
        for (task, length), of_case in drawn.items():
            if not of_case:
                continue
            ask = client(server.target.port, ruler.task(task).tokens)
            name = f"{title}, {policy}, {task}, {length}, {len(of_case)}"
            answers = partial(scores_of, ask, ruler.task(task).match, of_case)
            scores[task, length] = parts.part(name, answers)
    return scores


def client(port: int, tokens: int) -> Ask:
    """A greedy request by the package's client. tokens: maximal number of tokens of an answer."""
    wrappers = import_module("long_context_eval.pred.client_wrappers")
    ask = wrappers.GenericOAIURLClient(
        url=f"http://127.0.0.1:{port}/v1/completions", mode="completion", tokens_to_generate=tokens,
        model_name=NAME, temperature=0.0, top_p=1.0, random_seed=0, stop=[],
    )  # fmt: skip
    return lambda prompt: ask(prompt=list(prompt))["text"][0]


def scores_of(ask: Ask, match: score.Match, of_case: Sequence[TaskPrompt]) -> np.ndarray:
    return np.array([match(ask(x.context + x.rest), x.answers) for x in of_case])


def served_table() -> str:
    """A row per policy: the score in each task that the first one solves."""
    if not (RESULTS / f"{RECORD}.json").exists():
        return table(("policy", "score"), [("all", UNMEASURED)])
    by_policy = read(RECORD)["results"]["policies"]
    cases = list(list(by_policy.values())[-1])
    rows = (
        (f"`{policy}`", *(f"{by_case[case]['score']:.0%}" for case in cases))
        for policy, by_case in by_policy.items()
    )
    return table(("policy", *cases), rows)


TABLES = {RECORD: served_table}
MEASURE = Measure(RECORD, measure, FLAGS, model=SMOLLM2)

if __name__ == "__main__":
    run(MEASURE)
