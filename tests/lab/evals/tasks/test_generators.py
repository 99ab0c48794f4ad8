"""Tasks after RULER: what a context contains, how long it is, and on what it depends."""

import re
from collections import Counter

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.tasks import generators, haystack
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
    longest = max(len(tokenizer.encode(s, bos=False)) for s in haystack.novel())
    slack = {"needle": longest + 1, "frequent-words": 40}.get(task, 30)
    for sample in samples_by_task[task]:
        size = len(tokenizer.encode(sample.context, bos=False))
        assert LENGTH - slack <= size <= LENGTH


@pytest.mark.parametrize("task", TASKS)
def test_samples_depend_on_seed_and_number_alone(tokenizer, samples_by_task, task):
    again = samples(task, tokenizer, LENGTH, 2, seed=0)
    assert again == samples_by_task[task][:2]
    assert len({sample.context for sample in samples_by_task[task]}) == 3
    assert samples(task, tokenizer, LENGTH, 1, seed=1)[0].answers != again[0].answers


@pytest.mark.parametrize("task", generators.BY_DEPTH)
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_number_stands_at_its_depth(tokenizer, task, depth):
    sample = TASKS[task].generate(np.random.default_rng(0), tokenizer, LENGTH, depth)
    body = sample.context.split("\n\n", 1)[1]
    assert body.index(sample.answers[0]) / len(body) == pytest.approx(depth, abs=0.08)


def test_variables_form_a_chain_from_one_value(samples_by_task):
    for sample in samples_by_task["variable-tracking"]:
        text = sample.context.rpartition("\n\n")[2]
        (value,) = re.findall(r"\d+", sample.question)
        sources = {value}
        assignments = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text)
        for name, source in assignments:
            assert source in sources
            sources = {name}
        assert tuple(name for name, _ in assignments) == sample.answers
        assert len(sample.answers) == generators.HOPS + 1 and text.count(value) == 1
        assert value not in sample.context.replace(text, "")  # nor is it in the example


def test_common_words_are_ten_times_as_frequent(samples_by_task):
    for sample in samples_by_task["common-words"]:
        listed = re.findall(r"\d+\. (\S+)", sample.context)
        counts = Counter(listed)
        assert len(set(sample.answers)) == generators.COMMON
        assert {counts[word] for word in sample.answers} == {10}
        assert {n for word, n in counts.items() if word not in sample.answers} == {1}
        numbers = [int(n) for n in re.findall(r"(\d+)\. ", sample.context)]
        assert numbers == list(range(1, len(listed) + 1))


def test_frequent_words_follow_the_zeta_distribution(samples_by_task):
    for sample in samples_by_task["frequent-words"]:
        listed = sample.context.split("\n\n", 1)[1].split()
        (dots, max_count), *counts = Counter(listed).most_common()
        assert dots == "..." and tuple(word for word, _ in counts[:3]) == sample.answers
        for rank, (_, count) in enumerate(counts[:6], 2):
            assert count == pytest.approx(max_count / rank**2, abs=1)
        assert counts[2][1] > counts[3][1]  # the third is no tie
