"""The report's experiment and the published replays against the reference."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from jaxkv.errors import UserError
from jaxkv.evals.lib.run import run
from jaxkv.evals.prefix_caching import replay, report, traces
from jaxkv.evals.prefix_caching.report import ONE_PROMPT, ReplaySetting, closed_form, hits

# Checking types in millions of calls would dominate the time; tests/serve/prefix checks them.
pytestmark = pytest.mark.usefixtures("unchecked")


def test_the_closed_form_matches_the_reference():
    reference = {4: 2.06, 16: 8.21, 64: 28.6, 256: 70.7}
    assert all(abs(closed_form(concurrent) - hits) < 0.05 for concurrent, hits in reference.items())


@pytest.mark.parametrize("block", [4, 16, 32])
def test_an_alias_hits_almost_always(block):
    assert hits(replace(ONE_PROMPT, mode="alias", block=block), 0) >= 99.8


@pytest.mark.parametrize(
    "mode, block, reference",
    [("rekey", 8, 54.1), ("rekey", 4, 77.0), ("full", 8, 50), ("full", 4, 75)],
)
def test_hit_rates_of_identical_prompts(mode, block, reference):
    assert abs(hits(replace(ONE_PROMPT, mode=mode, block=block), 0) - reference) < 1


def test_equal_answers_do_not_help():
    """The report explains its 8.14 % by different answers; the actual cause is the block hash."""
    assert 5 < hits(replace(ONE_PROMPT, greedy=True), 0) < 11


@pytest.fixture(scope="module")
def mooncake(shared):
    return traces.read(shared / "traces" / "mooncake_conversation_trace.jsonl")


@pytest.mark.parametrize("capacity, blocks", [(1_000, 12_847), (10_000, 61_046), (30_000, 93_978),
                                              (None, 105_710)])  # fmt: skip
def test_mooncake_hit_rates_match_the_reference(mooncake, capacity, blocks):
    rates = traces.replay(mooncake, capacity)
    assert abs(rates["hit_rate_blocks"] - traces.MOONCAKE[capacity]) < 0.0005
    assert rates["hit_rate_blocks"] == blocks / 288_500
    if capacity is None:
        assert abs(rates["hit_rate_tokens"] - 0.3736) < 0.0001


@pytest.mark.parametrize(
    "where, number", [("last+branch", 2), ("last", 0), ("every=1", 1), ("every=16+last", 3)]
)
def test_hit_rates_by_rule_for_storing_snapshots(mooncake, where, number):
    share = traces.replay_snapshots(mooncake, where, traces.ENTRIES[number])
    assert abs(share - traces.SNAPSHOTS[where][number]) < 0.001


@pytest.fixture
def trace(tmp_path):
    """Two requests of three blocks; the first two blocks are equal, the last is partial."""
    rows = [{"hash_ids": [0, 1, last], "input_length": 1100} for last in (2, 3)]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_turns_of_agents_repeat_all_earlier_turns(tmp_path):
    roles = ("system", "user", "assistant", "user", "assistant")
    row = {"messages": [{"role": role, "content": f"{role} says {n} " * 20}
                        for n, role in enumerate(roles)]}  # fmt: skip
    (tmp_path / "agents.jsonl").write_text(json.dumps(row) + "\n")
    trace = traces.read(tmp_path / "agents.jsonl")
    first, second = (request.keys.tolist() for request in trace.requests)
    assert second[: len(first)] == first and len(second) > len(first)


@pytest.mark.parametrize(
    "content, said",
    [
        ('{"hash_ids": [1], "input_length": 513}', "513 with 1"),
        ('{"messages": []}', "holds no prompt"),
        ('{"hash_ids": [1]}', "input_length"),
    ],
)
def test_broken_traces_are_refused_in_one_line(tmp_path, content, said):
    (tmp_path / "trace").write_text(content + "\n")
    with pytest.raises(UserError, match="is broken") as caught:
        traces.read(tmp_path / "trace")
    assert said in str(caught.value)


def test_the_record_has_every_measurement(trace, monkeypatch, trials):
    """With a tiny trace and a tiny experiment."""
    small = {"requests": 20, "outputs": (1, 3)}
    monkeypatch.setattr(report, "ONE_PROMPT", ReplaySetting(frequent=1, **small))
    monkeypatch.setattr(report, "ReplaySetting", lambda **about: ReplaySetting(**about, **small))
    run(replay.MEASURE, ["--trace", str(trace), "--quick"])
    results = json.loads((trials / "prefix_replay.json").read_text())["results"]
    assert set(results) == {"report", "mooncake", "snapshots", "speed", "bars"}
    assert results["mooncake"]["inf"]["hit_rate_blocks"] == pytest.approx(1 / 3)
