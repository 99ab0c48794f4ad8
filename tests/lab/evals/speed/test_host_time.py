"""The engine's host time, on a small random model."""

import time

import pytest

from jaxkv import models
from jaxkv.evals.speed import host_time
from tests.tiny import write_tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return models.load(write_tiny(tmp_path_factory.mktemp("host") / "model"), "float32")


def test_a_slow_listener_is_host_time(llm, monkeypatch):
    """Sixteen times a millisecond, in a step of a program that takes less."""

    def token(self: object, scored: object) -> bool:
        time.sleep(1e-3)
        return False

    monkeypatch.setattr(host_time.Ignore, "token", token)
    results = host_time.measure(llm, 2, "tiny")
    step, program = (results["milliseconds"][name]["min"] for name in ("engine", "programs"))
    assert step > 16 and results["share"]["median"] == pytest.approx(1 - program / step, abs=0.2)
    assert "sleep" in next(iter(results["functions"]))
    assert sum(results["functions"].values()) <= 1.001
