"""Prompts: a sample in the model's own chat template, as token ids."""

from __future__ import annotations

from typing import NamedTuple

from jaxkv.errors import UserError
from jaxkv.evals.tasks import ruler, score
from jaxkv.evals.tasks.generators import TASKS, samples
from jaxkv.models.generation.context_scores import around_message
from jaxkv.models.loading.llm import Llm

ROOM = 256  # tokens of a question and an answer, at most


class TaskPrompt(NamedTuple):
    """context: ids read before the end of prefill. rest: ids after it, up to the model's answer."""

    context: list[int]
    rest: list[int]
    answers: tuple[str, ...]


def prompts(
    llm: Llm,
    task: str,
    length: int,
    count: int,
    seed: int,
    query_aware: bool = False,
    beyond: bool = False,
) -> list[TaskPrompt]:
    """The prompts of a task; their contexts have at most `length` tokens, the template's included.

    RULER's tasks count the template beyond these tokens, and have no prompts of some lengths.
    query_aware: the question is read before the end of prefill too, beyond these tokens. beyond:
    the contexts may be longer than the trained context.
    Raises UserError for an unknown task, and as `check`.
    """
    if not beyond:
        check(llm, length)
    before, after = around_message(llm)
    # All is one text, so the parts after the first go on.
    encode = lambda text: llm.tokenizer.encode(text, bos=False, start=False)
    front = [*llm.tokenizer.sinks, *llm.tokenizer.encode(before, bos=False)]
    encoded = []
    if task in ruler.NAMES:
        drawn = ruler.samples(llm, task, length, count, seed)
    else:
        drawn = samples(task, llm.tokenizer, length - len(front), count, seed)
    tokens = answer_of(task)[0]
    for sample in drawn:
        context, rest = encode(sample.context), encode(f"{sample.question}{after}")
        lead = encode(sample.lead)
        if len(rest) + len(lead) + tokens > ROOM:
            raise UserError(
                f"the question of {task} has {len(rest) + len(lead)} tokens in the template of "
                f"{llm.name}, at most {ROOM - tokens} fit; use another model"
            )
        if query_aware:
            context, rest = context + rest, []
        encoded.append(TaskPrompt(front + context, rest + lead, sample.answers))
    return encoded


def answer_places(llm: Llm, prompt: TaskPrompt) -> list[list[range]]:
    """For each answer the places of its tokens in the context; none if other tokens write it."""
    places = []
    for answer in prompt.answers:
        ids = llm.tokenizer.encode(answer, bos=False, start=False)
        ranges = [range(i, i + len(ids)) for i in range(len(prompt.context) - len(ids) + 1)]
        places.append([r for r in ranges if prompt.context[r.start : r.stop] == ids])
    return places


def answer_of(task: str) -> tuple[int, score.Match]:
    """The maximal number of tokens of an answer to a task, and the score of an answer."""
    if task in ruler.NAMES:
        return ruler.task(task).tokens, ruler.task(task).match
    return TASKS[task].tokens, score.match


def check(llm: Llm, length: int) -> None:
    """Raise UserError for a length that exceeds the model's, or a model without a chat template."""
    if length + ROOM > llm.config.context:
        raise UserError(
            f"--lengths must be at most {llm.config.context - ROOM} for {llm.name}: its trained "
            f"context has {llm.config.context} tokens and {ROOM} are for question and answer, got "
            f"{length}; give a smaller one"
        )
    around_message(llm)
