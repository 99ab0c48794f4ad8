"""`jaxkv advise`: budgets, losses and divergence, repeats, errors, and what it concludes."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models import advise, advise_report, budgets, uncached
from jaxkv.policy_spec import parse_policy
from tests.tiny import write_sink_tokens, write_tiny

POLICIES = ["window:window=16", "reservoir:sinks=2,window=6,sample=8"]
TOKENS = 170


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return models.load(write_tiny(tmp_path_factory.mktemp("advise") / "tiny"))


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(2, 12, TOKENS).tolist()


@contextlib.contextmanager
def watch(label, total, unit):
    yield lambda done: None


@pytest.fixture(scope="module")
def readings(llm, ids):
    return advise.measure(llm, ids, POLICIES, 0, watch)


def test_the_shapes_have_the_default_fields_at_256_slots():
    for name in ("window", "streaming", "h2o", "reservoir", "stratified", "balance-stream"):
        assert parse_policy(budgets.shape(name, 256)) == parse_policy(name)


@pytest.mark.parametrize("name", budgets.SHAPES)
def test_the_shapes_use_all_slots(llm, name):
    for slots in (16, 17, 31, 100, 256, 300):
        assert budgets.slots_of(llm, llm.policies(budgets.shape(name, slots))) == slots


def test_a_policy_gets_the_largest_cache_that_fits(llm):
    config = llm.config
    token = config.layers * (2 * config.kv_heads * config.head_dim * 4 + 4)
    rest = 4 * config.layers
    for slots in (16, 40, 41):
        for spare in (0, token - 1):
            (found,) = budgets.fit(llm, slots * token + rest + spare, ["streaming"], 100)
            assert found == f"streaming:sinks=4,window={slots - 4}"
    chosen = budgets.fit(llm, 100 * token, [], 300)
    assert [policy.split(":")[0] for policy in chosen] == [
        "window", "streaming", "h2o", "reservoir", "stratified", "balance-stream", "streaming"
    ]  # fmt: skip
    sizes = [budgets.bytes_of(llm, policy, 300) for policy in chosen]
    assert max(sizes) <= 100 * token and min(sizes[:-1]) > 95 * token
    assert chosen[-1].endswith(",window=252,cache=int8")  # half of the context, 512
    beyond = budgets.fit(llm, 100 * token, [], config.context + 1)
    assert not any(policy.startswith("h2o") for policy in beyond)
    assert budgets.fit(llm, 10**9, ["window"], 300) == ["window:window=256"]


def test_the_default_budget(llm):
    streaming = budgets.bytes_of(llm, "streaming:sinks=4,window=252", 600)
    assert budgets.budget_of(llm, [], 600) == streaming
    own = ["window:window=20", "window:window=30", "h2o"]
    window = budgets.bytes_of(llm, "window:window=30", 600)
    assert budgets.budget_of(llm, own, 600) == window


def test_a_budget_below_the_smallest_cache_is_refused(llm):
    smallest = budgets.bytes_of(llm, budgets.shape("h2o", budgets.LEAST), 100)
    with pytest.raises(UserError, match=f"at least .*{smallest} bytes.* for h2o, got .*99 bytes"):
        budgets.fit(llm, 99, ["streaming", "h2o"], 100)
    with pytest.raises(UserError, match="for window:window=300"):
        budgets.fit(llm, smallest, ["window:window=300"], 100)


def test_growing_layers_count_at_the_size_of_the_text(llm):
    """A layer of full attention has the bytes of its tokens, not those of its first slots."""
    config, tokens = llm.config, 2048
    policy = "0=full:start=16;*=window:window=16"
    token = 2 * config.kv_heads * config.head_dim * 4 + 4
    needed = (tokens + 16) * token + 4 * config.layers  # two layers
    assert budgets.budget_of(llm, [policy], tokens) == needed
    assert budgets.fit(llm, needed, [policy], tokens) == [policy]
    with pytest.raises(UserError, match=f"{needed} bytes"):
        budgets.fit(llm, needed - 1, [policy], tokens)


@pytest.mark.parametrize("policy", ["full", "full:start=1024", "*=full", "0=full:max=4096;*=full"])
def test_full_attention_is_no_policy_to_advise(llm, policy):
    with pytest.raises(UserError, match="full is always measured"):
        advise.check_not_full(llm, policy)
    for other in ("full:cache=int8", "0=full;*=window:window=16"):
        advise.check_not_full(llm, other)


def test_the_caches_of_all_policies_must_fit_together(llm, ids, monkeypatch):
    """Each fits alone; it is refused before the first reading."""
    final = TOKENS + 96  # five decoded pieces of 16 tokens, and one that compiles
    sizes = [budgets.bytes_of(llm, name, final) for name in ("full", *POLICIES)]
    monkeypatch.setattr("jaxkv.state.memory.available", lambda *_, **__: sum(sizes) - 1)
    labels = []

    @contextlib.contextmanager
    def telling(label, total):
        labels.append(label)
        yield lambda done: None

    with pytest.raises(UserError, match="the caches of 3 policies for 266 tokens would take"):
        advise.measure(llm, ids, POLICIES, 0, telling)
    assert not labels


@pytest.mark.slow
def test_a_second_sink_token_has_no_loss(llm, ids, tmp_path):
    """It is left out of the means, and the other losses are those of scoring."""
    path = write_sink_tokens(tmp_path / "sinks.safetensors", llm.path, 2)
    with_sinks = models.load(llm.path, sinks=path)
    tokens = [*with_sinks.tokenizer.front, *ids]
    found = advise.measure(with_sinks, tokens, POLICIES[:1], 0, watch)
    for one in found:
        expected = np.concatenate(list(models.losses(with_sinks, tokens, one.policy)))
        np.testing.assert_allclose(one.losses, expected, atol=1e-4)
        assert np.isnan(one.losses[0]) and np.isfinite(one.losses[1:]).all()
    first = advise.first_counted(with_sinks, ["full:cache=int8"], len(tokens))
    assert first == 2
    rows = advise.rank(with_sinks, tokens, found, first, None)["policies"]
    assert all(np.isfinite(row["loss"]) for row in rows)


def test_errors_need_several_blocks(llm):
    first, block = 17, (TOKENS - 17) // 8
    assert advise.first_counted(llm, POLICIES, TOKENS, block) == first
    with pytest.raises(
        UserError, match=f"8 blocks, .* got --block {block + 1}; give at most {block}"
    ):
        advise.first_counted(llm, POLICIES, TOKENS, block + 1)


def test_losses_and_divergence_are_those_of_plain_computations(llm, ids, readings):
    decoder, hidden, _ = uncached.forward(llm.config, llm.weights, np.array([ids]))
    full = np.asarray(decoder.logits(hidden), np.float64)[:, 0, :-1]
    full = full - np.log(np.exp(full).sum(axis=0))
    assert [one.policy for one in readings] == ["full", *POLICIES]
    for one in readings:
        stream, kl, same, losses = models.Stream(llm, one.policy), [], [], []
        for number, token in enumerate(ids[:-1]):
            stream.prefill([[token]], 1)
            mine = np.asarray(stream.decoding.logits[0], np.float64)
            mine = mine - np.log(np.exp(mine).sum())
            kl.append(np.sum(np.exp(full[:, number]) * (full[:, number] - mine)))
            same.append(mine.argmax() == full[:, number].argmax())
            losses.append(-mine[ids[number + 1]])
        np.testing.assert_allclose(one.losses, losses, atol=1e-4)
        np.testing.assert_allclose(one.kl, kl, atol=1e-4)
        assert np.mean(one.same == same) > 0.98
        assert len(one.milliseconds) == advise.ROUNDS and (one.milliseconds > 0).all()
    assert readings[1].kl[20:].mean() > 1e-3


def test_the_distance_of_a_repeat():
    ids = np.random.default_rng(0).integers(0, 3, 60).tolist()
    found = advise.repeat_distances(ids)
    words = [tuple(ids[end - advise.REPEAT + 1 : end + 1]) for end in range(60)]  # empty at first
    for end in range(1, 60):
        back = [d for d in range(1, end + 1) if words[end] and words[end - d] == words[end]]
        assert found[end - 1] == min(back, default=0)


def test_errors_are_those_of_block_means(rng):
    values = rng.normal(size=120) + np.repeat(rng.normal(size=12), 10)
    means = values.reshape(12, 10).mean(axis=1)
    found = advise.ratio(values, 10)
    assert found["mean"] == pytest.approx(values.mean()) and found["count"] == 120
    assert found["two_errors"] == pytest.approx(2 * means.std(ddof=1) / 12**0.5)
    some = np.arange(120) % 10 < 3
    of_some = advise.ratio(values, 10, some)
    means = values.reshape(12, 10)[:, :3].mean(axis=1)
    assert of_some["two_errors"] == pytest.approx(2 * means.std(ddof=1) / 12**0.5)
    assert advise.ratio(values, 10, np.arange(120) < 5)["two_errors"] is None
    assert advise.ratio(values, 10, np.zeros(120, bool))["mean"] is None


def test_the_interval_covers_the_mean(rng):
    """Of 400 means of correlated values, about 95 % are within two errors of the true one."""
    inside = 0
    for _ in range(400):
        values = rng.normal(size=300) + np.repeat(rng.normal(size=30), 10)
        counted = rng.random(300) < np.repeat(rng.random(30), 10)
        found = advise.ratio(values, 10, counted)
        inside += abs(found["mean"]) <= found["two_errors"]
    assert 0.90 < inside / 400 < 0.98


def reading(policy: str, losses: np.ndarray, *milliseconds: float) -> advise.Reading:
    zeros, times = np.zeros(len(losses)), np.array(milliseconds or [1.0])
    return advise.Reading(policy, losses, zeros, zeros, 100, 1.0, 1.0, times)


def test_policies_are_ranked_and_noise_is_told(llm, rng):
    ids = rng.integers(2, 200, 241).tolist()
    base, noise = rng.normal(size=240), rng.normal(size=240)
    readings = [
        reading("full", base),
        reading("window:window=32", base + 1 + 0.01 * noise),
        reading("streaming:sinks=4,window=28", base + 0.1 + 0.01 * noise, 9.0),
        reading("reservoir:sinks=4,window=14,sample=14", base + 0.1001 - 0.01 * noise, 2.0),
    ]
    results = advise.rank(llm, ids, readings, first=41, block=20)
    rows = {row["policy"]: row for row in results["policies"]}
    assert next(iter(rows)) == "full" and list(rows)[-1] == "window:window=32"
    assert results["counted"] == 200 and results["block"] == 20
    worst = rows["window:window=32"]
    assert worst["over_full"]["mean"] == pytest.approx(1, abs=0.01)
    expected = (base + 1 + 0.01 * noise)[40:].mean()
    assert worst["loss"] == pytest.approx(expected)
    assert not advise.is_noise(worst["over_best"])
    told = "\n".join(advise_report.sentences(results))
    streaming, reservoir = readings[2].policy, readings[3].policy
    assert (
        f"{streaming} has the lowest loss; these are within noise of it: {reservoir}." in told
        or (f"{reservoir} has the lowest loss; these are within noise of it: {streaming}." in told)
    )
    assert "Then window:window=32, which is worse by +0." in told
    assert list(map(len, results["levels"])) == [2, 1]
    assert "Take reservoir:sinks=4,window=14,sample=14 (the fastest of these)" in told
    lines = advise_report.table(results).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["-", "1", "2", "3"]
    assert lines[-1].endswith("window:window=32") and "+1.0" in lines[-1]


def test_a_faster_policy_is_taken_with_what_it_may_lose(llm, rng):
    """Only if it is faster beyond the spread of the times; else the default or the lower loss."""
    ids, base, noise = (
        rng.integers(2, 200, 241).tolist(),
        rng.normal(size=240),
        rng.normal(size=240),
    )
    best, other = "reservoir:sinks=4,window=14,sample=14", "window:window=32"
    extra = 0.001 + 0.1 * (noise - noise[40:].mean())
    means = extra[40:].reshape(10, 20).mean(axis=1)
    most = means.mean() + 2 * means.std(ddof=1) / 10**0.5

    def told(*times):
        readings = [reading(best, base, *times[0]), reading(other, base + extra, *times[1])]
        results = advise.rank(llm, ids, readings, first=41, block=20)
        assert results["levels"] == [[best, other]]
        return advise_report.sentences(results)

    apart = told((9.0, 9.5, 10.0), (2.0, 3.0, 8.9))
    assert f"Take {other} (the fastest of these)" in apart[-2]
    assert apart[-1] == (
        f"Its loss may be up to {most:+.3f} above that of {best} "
        "(the mean and two standard errors)."
    )
    overlapping = told((8.8, 9.5, 10.0), (2.0, 3.0, 8.9))
    assert f"Take {best} (the lowest loss of the 2 fastest, whose times overlap)" in overlapping[-1]
    assert not any("may be up to" in line for line in overlapping)
    other = "streaming:sinks=4,window=28"
    default = told((8.8, 9.5, 10.0), (2.0, 3.0, 8.9))
    assert f"Take {other} (the default of the 2 fastest, whose times overlap)" in default[-2]
    best = "streaming:sinks=4,window=60,cache=int8"  # a lower loss by chance; not the default
    default = told((8.8, 9.5, 10.0), (2.0, 3.0, 8.9))
    assert f"Take {other} (the default of the 2 fastest, whose times overlap)" in default[-2]


def test_without_errors_the_lowest_loss_is_taken(llm, rng):
    base = rng.normal(size=240)
    readings = [reading("streaming:sinks=4,window=28", base, 9.0),
                reading("window:window=32", base + 1, 1.0)]  # fmt: skip
    results = advise.rank(llm, rng.integers(2, 200, 241).tolist(), readings, 41, block=1000)
    told = "\n".join(advise_report.sentences(results))
    assert "Take streaming:sinks=4,window=28 (by its loss)" in told


def test_absolute_positions_are_told(llm, rng):
    base = rng.normal(size=240)
    readings = [reading("h2o:heavy=16,window=16", base), reading("window:window=32", base, 5.0)]
    ids = rng.integers(2, 200, 241).tolist()
    results = advise.rank(llm, ids, readings, 41, None)
    told = advise_report.sentences(results)
    assert any(line.startswith("h2o:heavy=16,window=16 has the lowest loss") for line in told)
    assert told[-2].startswith("Take window:window=32 for endless text (by its loss)")
    alone = advise.rank(llm, ids, readings[:1], 41, None)
    told = advise_report.sentences(alone)
    assert told[-2].startswith("Take h2o:heavy=16,window=16")
    assert told[-1] == "Its positions are absolute, so it fails beyond the trained context."
    assert any("longer than the trained context" in line for line in told)


def test_the_loss_at_repeats_by_distance(llm, rng):
    """A policy whose loss is 2 higher at repeats from 64 tokens on, and nowhere else."""
    ids = rng.integers(0, 6, 301).tolist()
    distances, base = advise.repeat_distances(ids), rng.normal(size=300)
    policy = "window:window=32"
    readings = [reading("full", base), reading(policy, base + 2 * (distances >= 64))]
    row = advise.rank(llm, ids, readings, first=33, block=16)["policies"][1]
    counts = {one["from"]: (one["count"], one["mean"]) for one in row["recall"]}
    counted = distances[32:]
    assert counts[1] == (((counted > 0) & (counted < 32)).sum(), pytest.approx(0, abs=1e-12))
    assert counts[32] == (((counted >= 32) & (counted < 64)).sum(), pytest.approx(0, abs=1e-12))
    assert counts[64] == (((counted >= 64) & (counted < 128)).sum(), pytest.approx(2))
    far = counted >= 32
    assert row["far_recall"]["mean"] == pytest.approx(2 * (counted[far] >= 64).mean())


def test_an_interrupted_measurement_keeps_complete_policies(llm, ids):
    done = []

    @contextlib.contextmanager
    def counting(label, total, unit):
        yield lambda count: done.append(label)

    found = advise.measure(llm, ids, POLICIES, 0, counting, lambda: POLICIES[1] in done)
    assert [one.policy for one in found] == ["full", POLICIES[0]]
    assert not any(len(one.milliseconds) for one in found)
    results = advise.rank(llm, ids, found, 20, None)
    assert advise_report.sentences(results)[-1].startswith(f"Take {POLICIES[0]}")
    assert advise.measure(llm, ids, POLICIES, 0, counting, lambda: True) == []


def test_a_text_beyond_the_context_is_compared_without_full_attention(tmp_path, ids):
    llm = models.load(write_tiny(tmp_path / "short", max_position_embeddings=64))
    found = advise.measure(llm, ids, ["window:window=16"], 0, watch)
    assert [one.policy for one in found] == ["window:window=16"] and np.isnan(found[0].kl).all()
    results = advise.rank(llm, ids, found, 20, None)
    (row,) = results["policies"]
    assert row["over_full"] is None and row["kl"] is None
    assert results["recall_base"] == row["policy"]
    assert "KL" not in advise_report.table(results).splitlines()[0]


def test_the_picture_is_a_png(llm, ids, readings):
    pytest.importorskip("matplotlib")
    results = advise.rank(llm, ids, readings, 20, None)
    assert advise_report.draw(results, "caption").startswith(b"\x89PNG")
    without = advise.rank(llm, ids, readings[1:], 20, None)
    assert advise_report.draw(without, "caption").startswith(b"\x89PNG")
