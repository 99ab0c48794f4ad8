"""Documents with facts, and policies of equal budgets beside a learned memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.comparison import learned_memory
from jaxkv.evals.tasks.generators import THINGS
from jaxkv.models import compaction

LENGTH, SLOTS = 700, 48
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm():
    """One layer of the default model: quick to compile."""
    model = models.load(dtype="float32")
    return replace(model, config=replace(model.config, layers=1, windows=(None,)))


@pytest.fixture(scope="module")
def case(llm):
    return learned_memory.case(llm, 10, LENGTH, seed=3)


def test_every_policy_keeps_its_budget(llm, case):
    for name, policy in learned_memory.settings(len(case.document), SLOTS).items():
        stream = learned_memory.after(llm, policy, case.document)
        assert learned_memory.cached(llm, stream) == pytest.approx(SLOTS, rel=0.08), name


def test_the_facts_are_in_the_document(llm, case):
    document = llm.tokenizer.decode(case.document)
    facts = case.texts[learned_memory.KINDS.index("facts")]
    assert len(facts.ids) == len(THINGS)
    for ids, scored in zip(facts.ids, facts.scored, strict=True):
        answer = llm.tokenizer.decode(ids[scored].tolist()).strip()
        assert len(answer) == learned_memory.DIGITS and answer.isdecimal()
        assert document.count(answer) == 1


def test_spans_are_in_the_document(llm, case):
    spans = case.texts[learned_memory.KINDS.index("spans")]
    for ids, scored in zip(spans.ids, spans.scored, strict=True):
        ids, size = ids[scored].tolist(), learned_memory.CONTINUED
        assert any(case.document[at : at + size] == ids for at in range(len(case.document)))


def test_losses_are_those_of_the_library(llm, case):
    """Under full attention the losses of the text after the document are `models.losses`."""
    full = learned_memory.after(llm, f"full:start={LENGTH + 400}", case.document)
    arguments = full.policies, full.decoding.states, len(case.document), case
    losses = learned_memory.scores(llm, *arguments)[0][0, 0]
    ids = case.document + case.texts[0].ids[0].tolist()
    expected = np.concatenate(list(models.losses(llm, ids, "full")))[-len(losses) :]
    np.testing.assert_allclose(losses, expected, atol=1e-4)


def test_untrained_pairs_score_as_snapkv(llm, case, monkeypatch):
    """The row of a memory before training is that of snapkv; rows state the same budget."""
    every = learned_memory.settings
    monkeypatch.setattr(
        learned_memory, "settings", lambda *sizes: {"snapkv": every(*sizes)["snapkv"]}
    )
    document = compaction.read(llm, case.document, SLOTS)
    pairs = np.stack(compaction.pairs_of(llm, document, SLOTS))
    variants = learned_memory.measure(llm, case, SLOTS, pairs)
    rows = learned_memory.table(llm, [variants])
    assert rows["learned"]["bytes"] == rows["snapkv"]["bytes"] < rows["full"]["bytes"] / 10
    for kind in learned_memory.KINDS:
        assert rows["learned"][kind]["loss"] == pytest.approx(
            rows["snapkv"][kind]["loss"], abs=1e-3
        )
        assert rows["full"][kind]["over_full"] == 0
    assert rows["full"]["facts"]["recalled"] == rows["full"]["facts"]["of"]
