"""Lines of progress."""

from __future__ import annotations

import time

from jaxkv.cli.progress import Progress


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
