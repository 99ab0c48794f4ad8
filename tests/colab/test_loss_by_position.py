"""The loss by position over many texts."""

from __future__ import annotations

import numpy as np
import pytest

from jaxkv import models
from jaxkv.colab import loss_by_position, runtime


@pytest.mark.slow
def test_each_row_is_the_loss_of_one_text():
    llm = models.load()
    ids = runtime.passage(llm, 60)
    texts = [ids[:1] + ids[at : at + 24] for at in (1, 20, 35)]
    found = loss_by_position.losses(llm, texts, ["full", "window:window=8"])
    assert {each.shape for each in found.values()} == {(3, 24)}
    alone = np.concatenate(list(models.losses(llm, texts[1], "full")))
    np.testing.assert_allclose(found["full"][1], alone, atol=1e-6)
    assert np.abs(found["full"] - found["window:window=8"])[:, :7].max() < 1e-4
    assert np.abs(found["full"] - found["window:window=8"])[:, 8:].max() > 0.01
    drawn = loss_by_position.draw(found, {"the window is full": 8}, "a caption")
    assert drawn.png.startswith(b"\x89PNG")
