"""Tasks after RULER: what a context contains, how long it is, and on what it depends."""

import re

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.tasks import generators
from jaxkv.evals.tasks.generators import TASKS, samples

LENGTH = 2048


@pytest.fixture(scope="module")
def tokenizer():
    return models.load().tokenizer


@pytest.fixture(scope="module")
def samples_by_task(tokenizer):
    """Three samples of every task."""
    return {name: samples(name, tokenizer, LENGTH, 3, seed=0) for name in TASKS}


@pytest.mark.parametrize("task", TASKS)
def test_a_context_fills_its_length_to_within_a_sentence(tokenizer, samples_by_task, task):
    longest = max(len(tokenizer.encode(s, bos=False)) for s in generators.novel())
    slack = {"needle": longest + 1, "lines": 60}.get(task, 30)
    for sample in samples_by_task[task]:
        size = len(tokenizer.encode(sample.context, bos=False))
        assert LENGTH - slack <= size <= LENGTH


@pytest.mark.parametrize("task", TASKS)
def test_samples_depend_on_seed_and_number_alone(tokenizer, samples_by_task, task):
    again = samples(task, tokenizer, LENGTH, 2, seed=0)
    assert again == samples_by_task[task][:2]
    assert len({sample.context for sample in samples_by_task[task]}) == 3
    assert samples(task, tokenizer, LENGTH, 1, seed=1)[0].answers != again[0].answers


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_number_stands_at_its_depth(tokenizer, task, depth):
    sample = TASKS[task].generate(np.random.default_rng(0), tokenizer, LENGTH, depth)
    body = sample.context.split("\n\n", 1)[1]
    assert body.index(sample.answers[0]) / len(body) == pytest.approx(depth, abs=0.08)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_register_answers_from_its_own_lines(tokenizer, depth):
    """As LongEval's: all names differ, and all numbers."""
    sample = generators.lines(np.random.default_rng(1), tokenizer, LENGTH, depth)
    rows = re.findall(r"^line (\w+-\w+): REGISTER_CONTENT is <(\d{5})>$", sample.context, re.M)
    register = dict(rows)
    assert len(register) == len(set(register.values())) == sample.context.count("\nline ") > 9
    (name,) = re.findall(r"line (\S+)\?$", sample.question)
    assert sample.answers == (register[name],) and f"line {name} is" in sample.lead
    assert max(map(int, register.values())) <= 50_000
    assert rows.index((name, register[name])) == round(depth * (len(rows) - 1))
