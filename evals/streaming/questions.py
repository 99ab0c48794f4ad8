"""A stream of multiple-choice questions with their answers (StreamingLLM, Table 5).

Every question is asked after all earlier questions and their right answers, in one stream under one
cache, and also alone. The answer is the choice with the largest mean log-likelihood of its tokens.
The stream is many times longer than the cache. The paper compares exact matches of a chat model of
7 billion weights; here the accuracy alone is the reference, so a small model can show whether the
stream costs anything.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.evals.lib.record import Record, standard_error
from jaxkv.models.llm import Llm

CACHE = 256
POLICIES = {
    "4+252": f"streaming:sinks=4,window={CACHE - 4}",
    "0+256": f"window:window={CACHE}",
}
BETWEEN = "\n\n"  # questions
Question = dict[str, Any]


def main() -> None:
    ask = argparse.ArgumentParser(
        prog="python -m jaxkv.evals.streaming.questions", description=__doc__
    )
    ask.add_argument("--model", default="smollm2-135m", help="a model folder, GGUF file or Hub id")
    ask.add_argument("--questions", required=True, type=Path,
                     help="JSON lines with context, choices and answer")  # fmt: skip
    ask.add_argument("--count", type=int, default=300, help="questions")
    ask.add_argument("--quick", action="store_true", help="write to out/, which no claim reads")
    given = ask.parse_args()
    if given.count < 2:
        ask.error(f"--count must be at least 2, got {given.count}: intervals need two questions")

    llm = models.load(given.model)
    lines = given.questions.read_text("utf-8").splitlines()[: given.count]
    questions = [json.loads(line) for line in lines]
    record = Record("questions", [*llm.files, given.questions], quick=given.quick)
    record.finish(run(llm, questions))


def run(llm: Llm, questions: Sequence[Question]) -> dict[str, Any]:
    """The share of right answers alone and in each stream, and the paired differences."""
    alone = np.concatenate([right_in_stream(llm, [one], POLICIES["4+252"])[0] for one in questions])
    found: dict[str, Any] = {"alone": {"share": alone.mean()}}
    for name, policy in POLICIES.items():
        right, tokens = right_in_stream(llm, questions, policy, progress=True)
        gaps = right.astype(float) - alone
        found[name] = {
            "share": right.mean(),
            "minus_alone": gaps.mean(),
            "standard_error": standard_error(gaps),
        }
    chance = np.mean([1 / len(one["choices"]) for one in questions])
    return {
        "model": llm.name, "questions": len(questions), "tokens": tokens, "policies": POLICIES,
        "chance": chance, "right": found,
    }  # fmt: skip


def right_in_stream(
    llm: Llm, questions: Sequence[Question], policy: str, progress: bool = False
) -> tuple[np.ndarray, int]:
    """Whether each question is answered rightly, and the tokens of the stream."""
    stream = models.Stream(llm, policy)
    encode = lambda text: llm.tokenizer.encode(text, bos=False)  # noqa: E731
    right, waiting = [], list(llm.tokenizer.front) or encode(BETWEEN)
    for number, one in enumerate(questions, 1):
        text = [*waiting, *encode(one["context"])]
        stream.prefill([text[:-1]])
        choices = [encode(choice) for choice in one["choices"]]
        means = [likelihood(llm, stream, [text[-1], *choice]) for choice in choices]
        right.append(int(np.argmax(means)) == one["answer"])
        # The last token of the question is read with the right answer and what follows it.
        waiting = [text[-1], *choices[one["answer"]], *encode(BETWEEN)]
        if progress and number % 50 == 0:
            print(f"{policy}: {number} of {len(questions)}, {np.mean(right):.0%}", flush=True)
    return np.array(right), int(stream.lengths[0])


def likelihood(llm: Llm, stream: models.Stream, ids: Sequence[int]) -> float:
    """Mean log-likelihood of ids 1, 2, ... after a stream that has read all before id 0."""
    decoding, lengths = stream.decoding, stream.lengths
    # Scoring takes the states, and other choices need them too.
    stream.decoding = jax.tree.map(jnp.copy, decoding)
    losses = np.concatenate(list(models.losses(llm, ids, stream=stream)))
    stream.decoding, stream.lengths = decoding, lengths
    return -float(losses.mean())


if __name__ == "__main__":
    main()
