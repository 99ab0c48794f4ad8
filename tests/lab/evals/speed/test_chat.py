"""The seconds of the turns of a chat, on a small model."""

import sys
from pathlib import Path

import pytest

from jaxkv.evals.speed import chat


@pytest.mark.slow
def test_each_message_has_its_seconds(shared, monkeypatch):
    """The start and the compilation are in those of the first message. Warm: compiled before."""
    model = str(shared / "models" / "stories260K")
    folders, measured = [], chat.chat

    def watched(model, asked, folder):
        folders.append((folder, len(list(Path(folder).iterdir()))))
        return measured(model, asked, folder)

    monkeypatch.setattr(chat, "chat", watched)
    seconds = chat.measure(model, ["Hello", "And?", "A page " * 60], rounds=1)
    (cold, before), (warm, programs) = folders
    assert cold == warm and before == 0 < programs
    assert set(seconds) == {"cold", "warm"}
    for turns in seconds.values():
        first, *later = [turn["median"] for turn in turns]
        assert len(later) == 2 and first > 4 * max(later)


def test_a_chat_that_ends_is_no_measurement(tmp_path):
    with pytest.raises(SystemExit, match="ended in turn 1"):
        chat.chat(str(tmp_path / "absent"), ["Hello"], "off")


def test_a_chat_that_ends_within_an_answer_is_no_measurement(monkeypatch):
    monkeypatch.setattr(chat, "COMMAND", [sys.executable, "-c", "input(); print('an answer')"])
    with pytest.raises(SystemExit, match="ended in turn 1"):
        chat.chat("tiny", ["Hello"], "off")


def test_the_fourth_message_is_a_page():
    lengths = list(map(len, chat.messages()))
    assert len(lengths) == 6 and lengths[3] > 1_900 and max(lengths[:3] + lengths[4:]) < 60
