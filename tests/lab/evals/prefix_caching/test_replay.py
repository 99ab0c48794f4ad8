"""The report's experiment and the published replays against the reference."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from jaxkv.errors import UserError
from jaxkv.evals.lib import figures
from jaxkv.evals.prefix_caching import replay, report, traces
from jaxkv.evals.prefix_caching.report import (
    ONE_PROMPT,
    TEN_SEEDS,
    ReplaySetting,
    closed_form,
    hits,
    measure,
)
from tests.seldom import seldom

RATES = ("hit_rate_blocks", "hit_rate_tokens", "hit_rate_requests", "evictions",
         "microseconds_per_block")  # fmt: skip


# Checking types in millions of calls would dominate the time; tests/serve/prefix checks them.
pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.record
@pytest.mark.parametrize("concurrent", [16, 64])
def test_ten_seeds_match_the_reference(concurrent):
    """The generators differ, so the mean must be within the range, and every run near it."""
    mean, low, high = TEN_SEEDS[concurrent]
    measured = measure(replace(ONE_PROMPT, concurrent=concurrent), 10)
    assert low <= measured["mean"] <= high
    assert abs(measured["mean"] - mean) < 0.5 * (high - low)
    assert abs(measured["mean"] - closed_form(concurrent)) < 0.5 * (high - low)
    assert low - 1 <= measured["min"] <= measured["max"] <= high + 1


def test_the_closed_form_matches_the_reference():
    reference = {4: 2.06, 16: 8.21, 64: 28.6, 256: 70.7}
    assert all(abs(closed_form(concurrent) - hits) < 0.05 for concurrent, hits in reference.items())


@pytest.mark.parametrize("block", [4, 16, 32])
def test_an_alias_hits_almost_always(block):
    assert hits(replace(ONE_PROMPT, mode="alias", block=block), 0) >= 99.8


@pytest.mark.parametrize("block", [16, 32])
def test_full_blocks_never_hit_for_shorter_prompts(block):
    assert hits(replace(ONE_PROMPT, mode="full", block=block), 0) == 0


@pytest.mark.parametrize(
    "mode, block, reference",
    [("rekey", 8, 54.1), ("rekey", 4, 77.0), ("full", 8, 50), ("full", 4, 75)],
)
def test_hit_rates_of_identical_prompts(mode, block, reference):
    assert abs(hits(replace(ONE_PROMPT, mode=mode, block=block), 0) - reference) < 1


def test_equal_answers_do_not_help():
    """The report explains its 8.14 % by different answers; the actual cause is the block hash."""
    assert 5 < hits(replace(ONE_PROMPT, greedy=True), 0) < 11


def test_answers_of_equal_length_admit_requests_together():
    assert abs(hits(replace(ONE_PROMPT, outputs=(112, 112)), 0) - 93.7) < 0.1


def test_blocks_of_one_token_find_the_whole_prompt():
    assert hits(replace(ONE_PROMPT, block=1, outputs=(2, 12)), 0) >= 99.8


@pytest.mark.record
@pytest.mark.parametrize("mode, block, concurrent", report.CURVES)
def test_figure_1_matches_the_reference(mode, block, concurrent):
    curve = report.CURVES[mode, block, concurrent]
    for p, reference in list(zip(report.SHARES, curve, strict=True))[3::6]:
        measured = measure(ReplaySetting(mode=mode, block=block, concurrent=concurrent, p=p))[
            "mean"
        ]
        # Means of three runs; at high hit rates the drawn share p varies as much.
        assert abs(measured - reference) < (2.5 if reference > 5 else 0.8)


@pytest.mark.record
@pytest.mark.parametrize("mode, block", report.POOLS)
def test_pool_sizes_match_the_reference(mode, block):
    row = report.POOLS[mode, block]
    base = ReplaySetting(mode=mode, block=block, p=0.5)
    means = [measure(replace(base, capacity=capacity))["mean"] for capacity in row]
    assert means == sorted(means)
    assert np.abs(np.subtract(means, list(row.values()))).max() < 3


@pytest.fixture(scope="module")
def mooncake(shared):
    return traces.read(shared / "traces" / "mooncake_conversation_trace.jsonl")


@pytest.mark.parametrize(
    "capacity, reference",
    [case if case[0] == 30_000 else seldom(*case) for case in traces.MOONCAKE.items()],
)
def test_mooncake_hit_rates_match_the_reference(mooncake, capacity, reference):
    result = traces.replay(mooncake, capacity)
    assert abs(result.rates()["hit_rate_blocks"] - reference) < 0.0005
    assert (
        result.blocks_hit
        == {1_000: 12_847, 10_000: 61_046, 30_000: 93_978, None: 105_710}[capacity]
    )
    assert (result.blocks, result.requests) == (288_500, 12_031)
    assert sum(result.missed.values()) + result.blocks_hit == result.blocks


@pytest.mark.record
@pytest.mark.parametrize("capacity, reference", [(4_000, 0.0882), (None, 0.3736)])
def test_mooncake_hits_are_equal_by_ids_and_by_tokens(mooncake, capacity, reference):
    """Looking up ids or the tokens derived from them gives equal hits."""
    by_ids = traces.replay(mooncake, capacity)
    result = traces.replay(mooncake, capacity, 512, "alias", prepare=traces.expand_ids)
    assert result.blocks_hit == by_ids.blocks_hit and result.tokens_hit == by_ids.tokens_hit
    assert abs(result.rates()["hit_rate_tokens"] - reference) < 0.0001
    assert result.evictions == by_ids.evictions


@pytest.mark.parametrize("order", ["lru-deepest-first", "lfu"])
def test_eviction_orders_on_a_part_of_a_trace(mooncake, order):
    part = traces.Trace("mooncake", mooncake.requests[:1500])
    linked = traces.replay(part, 2_000)
    replayed = traces.replay(part, 2_000, order=order)
    assert (replayed.blocks_hit == linked.blocks_hit) == (order == "lru-deepest-first")
    assert replayed.blocks_hit > 0


@pytest.mark.parametrize(
    "where, number", [("last+branch", 2), ("last", 0), ("every=1", 1), ("every=16+last", 3)]
)
def test_hit_rates_by_rule_for_storing_snapshots(mooncake, where, number):
    share = traces.replay_snapshots(mooncake, where, traces.ENTRIES[number])
    assert abs(share - traces.SNAPSHOTS[where][number]) < 0.001


@pytest.mark.record
@pytest.mark.parametrize("where", traces.SNAPSHOTS)
def test_the_table_of_snapshots_matches_the_reference(mooncake, where):
    shares = [traces.replay_snapshots(mooncake, where, n) for n in traces.ENTRIES]
    assert np.abs(np.subtract(shares, traces.SNAPSHOTS[where])).max() < 0.001


@pytest.fixture
def trace(tmp_path):
    """Two requests of three blocks; the first two blocks are equal, the last is partial."""
    rows = [{"hash_ids": [0, 1, last], "input_length": 1100} for last in (2, 3)]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run_replay(monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.argv", ["x", *map(str, words)])
    replay.main()
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("keys", ["ids", "tokens"])
def test_the_command_replays_a_trace(trace, monkeypatch, capsys, keys):
    words = ("--trace", trace, "--capacity", "inf", "--json", "--keys", keys)
    results = run_replay(monkeypatch, capsys, *words)
    assert list(results)[:5] == list(RATES)
    assert results["hit_rate_blocks"] == 2 / 6 and results["hit_rate_tokens"] == 1024 / 2200
    assert results["hit_rate_requests"] == 1 / 2 and results["evictions"] == 0
    assert results["microseconds_per_block"] > 0 and results["timed"] == keys


def test_the_command_runs_the_report(monkeypatch, capsys):
    words = ("--trace", "report", "--capacity", "0", "--requests", "40", "--json")
    with pytest.raises(SystemExit):
        run_replay(monkeypatch, capsys, *words)
    results = run_replay(monkeypatch, capsys, *words[:2], "--mode", "alias", *words[4:])
    assert set(RATES) < set(results) and results["hit_rate_blocks"] > 0.5


def test_turns_of_agents_repeat_all_earlier_turns(tmp_path, monkeypatch, capsys):
    roles = ("system", "user", "assistant", "user", "assistant")
    row = {"messages": [{"role": role, "content": f"{role} says {n} " * 20}
                        for n, role in enumerate(roles)]}  # fmt: skip
    (tmp_path / "agents.jsonl").write_text(json.dumps(row) + "\n")
    words = ("--trace", tmp_path / "agents.jsonl", "--json", "--block", "4", "--mode", "full")
    results = run_replay(monkeypatch, capsys, *words)
    assert results["requests"] == 2 and results["hit_rate_requests"] == 0.5
    requests = traces.read(tmp_path / "agents.jsonl").requests
    share = len(requests[0].keys) // 4 * 4 / sum(request.tokens for request in requests)
    assert results["hit_rate_tokens"] == pytest.approx(share)


def test_requests_with_lengths_only_never_hit(tmp_path, monkeypatch, capsys):
    (tmp_path / "azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,40,1\ny,40,2\n")
    results = run_replay(monkeypatch, capsys, "--trace", tmp_path / "azure.csv", "--json")
    assert results["hit_rate_tokens"] == 0 and results["prefixes"].startswith("none")
    assert (results["requests"], results["blocks"]) == (2, 6)


@pytest.mark.parametrize(
    "words, said",
    [
        ((), "--trace must be given"),
        (("--trace", "absent"), "cannot read absent"),
        (("--trace", "report", "--capacity", "few"), "--capacity: must be a whole number"),
        (("--trace", "report", "--p", "2"), "--p: must be from 0 to 1"),
        (("--trace", "report", "--mode", "half"), "invalid choice"),
        (("--trace", "report", "--concurrent", "0"), "--concurrent: must be a whole number"),
        (("--trace", "TRACE", "--block", "8"), "add --keys tokens"),
        (("--trace", "WRONG"), "a trace must have"),
        (("--trace", "BROKEN"), "is broken"),
        (("--trace", "report", "--seed", "-1"), "--seed: must be a whole number from 0"),
        (("--trace", "report", "--frequent", "99999999999999"), "--frequent: must be a whole"),
        (("--trace", "report", "--length", "100000000", "--requests", "1"), "10000000 tokens"),
        (("--trace", "report", "--p", "nan"), "--p: must be from 0 to 1"),
        (("--trace", "report", "--keys", "tokens"), "--keys changes nothing here"),
        (("--trace", "TRACE", "--p", "0.5"), "--p changes nothing here"),
        (("--trace", "TRACE", "--greedy"), "--greedy changes nothing here"),
        (("--trace", "AZURE", "--keys", "tokens"), "--keys is for traces of Mooncake"),
        (("--trace", "TRACE", "--record", "--capacity", "5"), "--capacity changes nothing here"),
        (("--trace", "TRACE", "--agents", "x"), "--agents changes nothing here"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(trace, monkeypatch, capsys, words, said):
    (trace.parent / "wrong").write_text("x\n")
    (trace.parent / "broken").write_text('{"hash_ids": [1]}\n')
    (trace.parent / "azure").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,40,1\n")
    files = {word: trace.parent / word.lower() for word in ("WRONG", "BROKEN", "AZURE")}
    files["TRACE"] = trace
    monkeypatch.setattr("sys.argv", ["x", *(str(files.get(word, word)) for word in words)])
    with pytest.raises(SystemExit) as end:
        replay.main()
    reported = capsys.readouterr()
    assert end.value.code == 2 and not reported.out
    assert said in reported.err and reported.err.count("\n") == 1


@pytest.mark.parametrize(
    "content, said",
    [
        ('{"hash_ids": 5, "input_length": 5}', "hash_ids must be a list"),
        ('{"hash_ids": [1, -1], "input_length": 600}', "hash_ids must be a list"),
        ('{"hash_ids": [8388608], "input_length": 5}', "below 8388608"),
        ('{"hash_ids": [1], "input_length": "x"}', "input_length must have"),
        ('{"hash_ids": [1], "input_length": null}', "input_length must have"),
        ('{"hash_ids": [], "input_length": 0}', "input_length must have"),
        ('{"hash_ids": [1], "input_length": -5}', "input_length must have"),
        ('{"hash_ids": [1], "input_length": 1e999}', "input_length must have"),
        ('{"hash_ids": [1], "input_length": 513}', "513 with 1"),
        ('{"hash_ids": [1], "input_length": 5}\n[]', "a row is no object"),
        ('{"messages": []}', "holds no prompt"),
        ('{"messages": [5]}', "a message is no object"),
        ('{"messages": 5}', "TypeError"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens", "holds no prompt"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nx,0,1", "holds no prompt"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nx,5000000000,1", "ContextTokens must be"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nx", "is broken"),
    ],
)
def test_broken_traces_are_refused_in_one_line(tmp_path, content, said):
    (tmp_path / "trace").write_text(content + "\n")
    with pytest.raises(UserError, match="is broken") as caught:
        traces.read(tmp_path / "trace")
    assert said in str(caught.value)


def test_a_closed_pipe_ends_without_a_message():
    """As with `| head`: no message, and the exit code of a closed pipe."""
    words = [
        sys.executable,
        "-m",
        "jaxkv.evals.prefix_caching.replay",
        "--trace",
        "report",
        "--requests",
        "1",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 141


def test_the_record_has_every_measurement(trace, monkeypatch, tmp_path, capsys):
    """With a tiny trace and a tiny experiment."""
    from jaxkv.evals.lib import record

    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "read", lambda name: record.read(name, tmp_path))
    monkeypatch.setenv("JAXKV_COMMIT", "0" * 40)
    pictures = {name: figures.FIGURES[name] for name in ("prefix_report", "prefix_snapshots")}
    monkeypatch.setattr(figures, "FIGURES", pictures)
    small = {"requests": 20, "outputs": (1, 3)}
    monkeypatch.setattr(report, "ONE_PROMPT", ReplaySetting(frequent=1, **small))
    monkeypatch.setattr(report, "ReplaySetting", lambda **about: ReplaySetting(**about, **small))
    monkeypatch.setattr("sys.argv", ["x", "--record", "--trace", str(trace)])
    replay.main()
    assert "wrote" in capsys.readouterr().out
    results = record.read("prefix_replay", tmp_path)["results"]
    assert set(results) == {"report", "mooncake", "snapshots", "speed", "bars"}
    assert results["mooncake"]["inf"]["hit_rate_blocks"] == pytest.approx(1 / 3)
    assert {path.name for path in tmp_path.glob("*.png")} == {f"{name}.png" for name in pictures}
