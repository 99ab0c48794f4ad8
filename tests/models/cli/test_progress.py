"""Lines of progress."""

from __future__ import annotations

import time

from jaxkv.cli import progress as module
from jaxkv.cli.progress import Progress, show_phases


def test_a_steady_line_has_a_rate_and_the_time_left():
    progress = Progress("scoring", 300)
    progress.at(100)
    progress._first = (time.monotonic() - 10, 0)
    assert progress._line() == "scoring: 33%, 10 tokens/s, 0 min 20 s left"


def test_programs_have_no_rate_because_their_times_differ():
    progress = Progress("compiling", unit="programs", steady=False)
    progress._begun -= 7
    assert progress._line() == "compiling ... 7 s"
    progress.at(3, 13)
    assert progress._line() == "compiling: 3 of 13 programs, 7 s"


def test_a_logged_line_is_printed_at_the_beginning(capsys):
    for logged in (False, True):
        with Progress("compiling", logged=logged):
            pass
        assert capsys.readouterr().err == "compiling ...\n" * logged


def test_each_phase_has_a_rate_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(module, "REPEAT", -1.0)
    with show_phases("bytes") as at:
        at("reading", 1, 4)
        at("reading", 3, 4)
        at("tokenizing", 100, 200)  # of which a resumed run has done 100 before
        at("tokenizing", 150, 200)
    before, reading, first, second = capsys.readouterr().err.splitlines()
    assert before == "reading ... 0 s" and reading.startswith("reading: 75%, ")
    assert first == "tokenizing ... 0 s" and second.startswith("tokenizing: 75%, ")
    assert second.endswith("bytes/s, 0 min 0 s left")
