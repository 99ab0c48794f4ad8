"""Unbounded generation: an interrupted run gives the same losses as one that was not."""

import numpy as np
import pytest

from jaxkv import models
from jaxkv.evals.lib import parts, record
from jaxkv.evals.streaming import endless

POLICY = "streaming:sinks=1,window=7"


class Interrupted(Exception):
    pass


def test_an_interrupted_stream_continues(llm, tmp_path, monkeypatch):
    ids = [int(x) for x in np.random.default_rng(0).integers(2, 250, 81)]

    def run(name):
        for module in (record, parts):
            monkeypatch.setattr(module, "TRIALS", tmp_path / name)
        trial = record.Record("trial", quick=True)
        return endless.losses(llm, ids, POLICY, 10, 20, parts.Parts(trial, 12))

    def losses(results):
        return {
            stream: [line["loss"] for line in results[stream]]
            for stream in ("endless", "wrapped", "fresh")
        }

    uninterrupted, count, computing = run("whole"), [0], endless.models.losses

    def interrupting(*args, **settings):
        count[0] += 1
        if count[0] in (3, 6, 9):  # within a stream, between streams, and in a fresh block
            raise Interrupted
        return computing(*args, **settings)

    monkeypatch.setattr(endless.models, "losses", interrupting)
    for _ in range(3):
        with pytest.raises(Interrupted):
            run("parts")
    assert losses(run("parts")) == losses(uninterrupted)
    assert count[0] == 12 + 3  # no block was computed twice
    assert losses(uninterrupted)["wrapped"] == pytest.approx(losses(uninterrupted)["endless"], 1e-5)
    assert not uninterrupted["summary"]["not_finite"]
    fresh = np.concatenate(list(models.losses(llm, [ids[0], *ids[21:41]], POLICY, 10)))
    assert uninterrupted["fresh"][1]["loss"] == pytest.approx(fresh.mean())
    assert uninterrupted["endless"][0]["loss"] == uninterrupted["fresh"][0]["loss"]
    ends = (20, 40, 60, 80)
    assert tuple(block["position"] for block in uninterrupted["endless"]) == ends
    wrapped = [(endless.BEFORE_WRAP + end) % 2**32 for end in ends]
    assert [block["position"] for block in uninterrupted["wrapped"]] == wrapped
