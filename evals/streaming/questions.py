"""A stream of multiple-choice questions with their answers (StreamingLLM, Table 5).

Every question is asked after all earlier questions and their right answers, in one stream under one
cache. The answer is the choice with the largest mean log-likelihood of its tokens. The stream is
many times longer than the cache. A question in the stream has solved ones before it, and one that
is asked alone has none, so two controls have the same ones: full attention to the whole stream, as
far as it fits the trained context, and full attention to the last tokens, read again for each
question. The paper compares exact matches of a chat model of 7 billion weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.evals.lib.record import read, standard_error
from jaxkv.evals.lib.run import SMOLLM2, Measure, Run, flag, run
from jaxkv.evals.lib.table import table
from jaxkv.evals.lib.verdict import above, below, claim, within
from jaxkv.evals.tasks.score import GATE
from jaxkv.models.loading.llm import Llm

CACHE = 256
POLICIES = {
    "4+252": f"streaming:sinks=4,window={CACHE - 4}",
    "0+256": f"window:window={CACHE}",
}
WINDOW = CACHE - 4  # tokens that are read again
MAX_TOKENS = 8_000  # tokens of the stream under full attention
BETWEEN = "\n\n"  # questions
Question = dict[str, Any]


def measure(run: Run) -> dict[str, Any]:
    """The shares of right answers to a file of questions."""
    lines = run.options.questions.read_text("utf-8").splitlines()[: run.options.count]
    return answered(run.llm, list(map(json.loads, lines)))


def answered(llm: Llm, questions: Sequence[Question]) -> dict[str, Any]:
    """The shares of right answers, and the paired differences of each stream from the controls."""
    full = f"full:max={min(MAX_TOKENS, llm.config.context)}"
    alone = [right_in_stream(llm, [question], POLICIES["4+252"])[0] for question in questions]
    right, tokens = {"alone": np.concatenate(alone)}, np.zeros(0, int)
    for name, policy in POLICIES.items():
        right[name], tokens = right_in_stream(llm, questions, policy, progress=name)
    fit = int((tokens <= min(MAX_TOKENS, llm.config.context)).sum())
    right["full"], _ = right_in_stream(llm, questions[:fit], full, progress="full")
    last = f"full:max={2 * CACHE}"  # with room for a choice
    right["reread"], _ = right_in_stream(llm, questions, last, WINDOW, progress="reread")
    by_stream: dict[str, Any] = {name: {"share": x.mean()} for name, x in right.items()}
    for name in POLICIES:
        by_stream[name]["minus"] = {
            base: difference(right[name], right[base]) for base in ("full", "reread", "alone")
        }
    chance = np.mean([1 / len(question["choices"]) for question in questions])
    return {
        "model": llm.name, "questions": len(questions), "questions_of_full": fit,
        "tokens": int(tokens[-1]), "reread": WINDOW, "policies": POLICIES, "chance": chance,
        "right": by_stream,
    }  # fmt: skip


def difference(right: np.ndarray, base: np.ndarray) -> dict[str, Any]:
    """The mean paired difference, on the questions that both answered, and its standard error."""
    size = min(len(right), len(base))
    gaps = right[:size].astype(float) - base[:size]
    return {"mean": gaps.mean(), "standard_error": standard_error(gaps)}


def right_in_stream(
    llm: Llm, questions: Sequence[Question], policy: str, reread: int | None = None,
    progress: str | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Whether each question is answered rightly, and the tokens up to its longest choice.

    reread: before each question a new stream reads only this many last tokens, the question's
    included. progress: a name for lines of progress.
    """
    stream, read = models.Stream(llm, policy), []
    encode = lambda text: llm.tokenizer.encode(text, bos=False, start=False)
    right, tokens, waiting = [], [], list(llm.tokenizer.front) or encode(BETWEEN)
    for number, question in enumerate(questions, 1):
        text = [*waiting, *encode(question["context"])]
        read += text[:-1]
        if reread:
            stream = models.Stream(llm, policy)
        stream.prefill([read[-reread + 1 :] if reread else text[:-1]])
        choices = [encode(choice) for choice in question["choices"]]
        means = [likelihood(llm, stream, [text[-1], *choice]) for choice in choices]
        right.append(int(np.argmax(means)) == question["answer"])
        tokens.append(len(read) + 1 + max(map(len, choices)))
        # The last token of the question is read with the right answer and what follows it.
        waiting = [text[-1], *choices[question["answer"]], *encode(BETWEEN)]
        if progress and number % 50 == 0:
            print(f"{progress}: {number} of {len(questions)}, {np.mean(right):.0%}", flush=True)
    return np.array(right), np.array(tokens)


def likelihood(llm: Llm, stream: models.Stream, ids: Sequence[int]) -> float:
    """Mean log-likelihood of ids 1, 2, ... after a stream that has read all before id 0."""
    decoding, lengths = stream.decoding, stream.lengths
    # Scoring takes the states, and other choices need them too.
    stream.decoding = jax.tree.map(jnp.copy, decoding)
    losses = np.concatenate(list(models.losses(llm, ids, stream=stream)))
    stream.decoding, stream.lengths = decoding, lengths
    return -float(losses.mean())


def answers_table() -> str:
    """Right answers by what the model reads before a question."""
    results = read("questions")["results"]
    titles = {
        "alone": "each question alone",
        "full": f"full attention to the stream (the first {results['questions_of_full']})",
        "reread": f"full attention to the last {results['reread']} tokens, read again",
        "4+252": "`streaming:sinks=4,window=252`",
        "0+256": "`window:window=256`",
    }
    cells = ((title, f"{results['right'][name]['share']:.1%}") for name, title in titles.items())
    caption = (
        f"{results['questions']} questions of ARC-E in a stream of {results['tokens']:,} tokens; "
        f"guessing gives {results['chance']:.0%}."
    )
    return table(("cache", "right answers"), cells, caption)


MEASURE = Measure(
    "questions", measure,
    [flag("--questions", type=Path, required=True,
          about="JSON lines with context, choices and answer"),
     flag("--count", 300, "questions; an interval needs two", minimum=2)],
    model=SMOLLM2, data=lambda options: [options.questions],
)  # fmt: skip
TABLES = {"questions": answers_table}
CLAIMS = (
    claim("Table 5, ARC-E, Llama-2-7B-chat: 71.34 against 71.25; window 3.58",
          "Questions in a stream are answered as well as by re-computation; a window alone answers "
          "fewer than full attention", "questions",
          within(lambda r: {"4+252 over re-computation": r["right"]["4+252"]["minus"]["reread"]},
                 by=0.05),
          below(lambda r: {"0+256 over full": r["right"]["0+256"]["minus"]["full"]}),
          seen=[above("right/full/share", GATE)], unit="points"),
)  # fmt: skip


if __name__ == "__main__":
    run(MEASURE)
