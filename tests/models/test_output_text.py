"""Tokens become text: stop strings and incomplete characters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jaxkv.models.generation.text import OutputText


def letters(text: str, *, eos: str = "", stops=()) -> tuple[OutputText, list[str]]:
    """An `OutputText` after `text`, one letter per token, and the pieces it returned."""

    class Tokenizer:
        table, special, strip = tuple(bytes([i]) for i in range(128)), frozenset(), 0

    sequence = OutputText(SimpleNamespace(tokenizer=Tokenizer), [ord(e) for e in eos], stops)
    return sequence, [sequence.push(ord(letter)) for letter in text]


def test_a_stop_string_across_tokens():
    sequence, pieces = letters("one two three", stops=["two"])
    assert pieces == ["o", "n", "e", " ", "", "", "", "", "", "", "", "", ""]
    assert (sequence.text, sequence.reason, len(sequence.tokens)) == ("one ", "stop", 7)
    assert sequence.end("length") == "" and sequence.reason == "stop"


def test_text_withheld_for_a_stop_string_is_returned():
    sequence, pieces = letters("a tw", stops=["two"])
    assert pieces == ["a", " ", "", ""] and sequence.text == "a "
    assert sequence.end("length") == "tw" and (sequence.text, sequence.reason) == ("a tw", "length")
    sequence, pieces = letters("a tw.", eos=".", stops=["two"])
    assert pieces == ["a", " ", "", "", "tw"] and (sequence.text, sequence.reason) == (
        "a tw",
        "eos",
    )
    sequence, pieces = letters("a twin", stops=["two"])
    assert pieces == ["a", " ", "", "", "twi", "n"] and sequence.reason == ""


def test_an_incomplete_character_is_returned_at_the_end():
    class Tokenizer:
        table, special, strip = ("é".encode()[:1], b"x"), frozenset(), 0

    sequence = OutputText(SimpleNamespace(tokenizer=Tokenizer), [], [])
    assert sequence.push(0) == "" and sequence.end("length") == "\ufffd"


@pytest.mark.parametrize("stops", [["ab"], ["aab", "b"], ["abab", "ba"], ["aaa", "abb", "bbbb"]])
def test_stop_strings_equal_a_plain_search(stops, rng):
    """Tokens of one to three letters, against a search of the whole text after each token."""
    vocabulary = ["a", "b", "c", "ab", "ba", "bb", "aca", "cab"]

    class Tokenizer:
        table, special, strip = tuple(v.encode() for v in vocabulary), frozenset(), 0

    for _ in range(200):
        sequence, text, expected = (
            OutputText(SimpleNamespace(tokenizer=Tokenizer), [], stops),
            "",
            None,
        )
        pieces = []
        for token in rng.integers(0, len(vocabulary), 6):
            pieces.append(sequence.push(int(token)))
            if expected is None:
                text += vocabulary[token]
                starts = [text.index(stop) for stop in stops if stop in text]
                expected = text[: min(starts)] if starts else None
        assert sequence.reason == ("" if expected is None else "stop")
        pieces.append(sequence.end("length"))
        assert "".join(pieces) == sequence.text == (text if expected is None else expected)
