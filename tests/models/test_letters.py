"""Bigram-backcopy streams: the data on which a head is mostly idle."""

from __future__ import annotations

import numpy as np

from jaxkv.models.training.letters import LETTERS, LetterChain


def test_the_letter_after_a_trigger_copies_the_one_before_it():
    chain = LetterChain(0)
    stream = chain.letters(5000, 1)
    triggers = np.isin(stream, chain.triggers)
    assert 0.1 < triggers.mean() < 0.5 and not (triggers[1:] & triggers[:-1]).any()
    after_prompt = np.flatnonzero(triggers[1:-1]) + 1
    np.testing.assert_array_equal(stream[after_prompt + 1], stream[after_prompt - 1])
    assert 0 < chain.floor(stream) < np.log(len(LETTERS))
