"""Stretches of several texts."""

import pytest

from jaxkv.errors import UserError
from jaxkv.evals.lib.text import stretches_of


@pytest.fixture
def texts(tmp_path):
    paths = [tmp_path / f"{letter}.txt" for letter in "ab"]
    for path in paths:
        path.write_text(100 * path.stem, "utf-8")
    return paths


def test_every_text_gives_as_many_stretches_from_its_beginning(llm, texts):
    ids, files = stretches_of(llm, texts, 4, 7)
    beginnings = [llm.tokenizer.encode(path.read_text("utf-8"))[:14] for path in texts]
    assert (
        ids == beginnings[0] + beginnings[1] and beginnings[0] != beginnings[1] and files == texts
    )


@pytest.mark.parametrize(
    "count, length, says",
    [(3, 7, "give --stretches 4"), (2, 9_999, r"1 x 9999 tokens of each text .*a\.txt has")],
)
def test_texts_that_cannot_give_as_many_are_refused(llm, texts, count, length, says):
    with pytest.raises(UserError, match=says):
        stretches_of(llm, texts, count, length)
