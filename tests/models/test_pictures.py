"""Pictures of records and runs."""

from __future__ import annotations

import matplotlib
import pytest

from jaxkv.models.tools import pictures
from jaxkv.models.training.run_log import draw_curves

LINES = [{"step": 1, "loss": 5.0, "lr": 1e-3, "grad_norm": 1.0}] + [
    {"step": step, "loss": 5.0 / step, "lr": 1e-3, "grad_norm": 1.0, "valid_loss": 4.0}
    | {"first_token": 0.1, "first_token_most": 0.4}
    for step in (2, 3)
]


def test_a_font_that_is_missing_is_not_reported(capfd, caplog):
    with matplotlib.rc_context({"font.family": "a font that nobody has"}):
        figure, _ = pictures.begin()
        assert pictures.finish(figure, "a caption").startswith(b"\x89PNG")
    assert capfd.readouterr().err == "" and not caplog.records


@pytest.mark.parametrize("steps", [1, 3])
def test_curves_of_a_run(steps):
    assert draw_curves(LINES[:steps], "a run").startswith(b"\x89PNG")
