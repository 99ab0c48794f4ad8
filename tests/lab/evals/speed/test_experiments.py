"""The experiments on speed and streaming, at tiny sizes."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from jaxkv import models
from jaxkv.evals.lib import paired_losses, timing
from jaxkv.evals.lib.text import tokens_of
from jaxkv.evals.speed import cache_int8, kernels, profile, rates
from jaxkv.evals.streaming import endless
from jaxkv.models.generation import streams
from jaxkv.pallas_kernels.sign_walk import shapes as walk_shapes
from tests.seldom import seldom


@pytest.fixture(scope="module")
def llm(shared):
    return models.load(shared / "models" / "stories260K")


@pytest.fixture(scope="module")
def compress(llm):
    """The first layer only: quick to compile, for tests that do not depend on depth."""
    return replace(llm, config=replace(llm.config, layers=1, windows=(None,)))


@pytest.fixture(scope="module")
def ids(llm, shared):
    text = shared / "text" / "tinystories" / "valid.txt"
    return tokens_of(llm, text, 513)[0]


def test_a_long_stream_is_compared_with_new_caches_per_block(compress, ids):
    results = endless.run(compress, ids, "streaming:sinks=4,window=28", chunk=64, block=128)
    assert [block["tokens"] for block in results["endless"]] == [128, 256, 384, 512]
    # The first block of the stream equals one with a new cache, at every start position.
    assert results["endless"][0]["loss"] == results["fresh"][0]["loss"]
    assert results["summary"]["worst_change_wrapped_to_endless"] < 1e-5
    assert [block["position"] for block in results["endless"]] == [128, 256, 384, 512]
    wrapped = [block["position"] for block in results["wrapped"]]
    assert wrapped == [(endless.BEFORE_WRAP + n) % 2**32 for n in (128, 256, 384, 512)]
    assert results["summary"]["not_finite"] == 0
    assert results["compilations_later"] == Counter()
    assert len(results["summary"]["state_bytes"]) == 1


def test_books_are_read_in_the_order_of_their_manifests(tmp_path, llm):
    names = [("b.txt", "train"), ("a.txt", "train"), ("c.txt", "valid")]
    books = [{"file": name, "split": split} for name, split in names]
    (tmp_path / "manifest.json").write_text(json.dumps({"books": books}))
    for name, _ in names:
        (tmp_path / name).write_text(name * 9)
    ids, files = tokens_of(llm, tmp_path, 20)
    assert (len(ids), [file.name for file in files]) == (20, ["b.txt"])
    ids, files = tokens_of(llm, tmp_path, 10_000)
    assert [file.name for file in files] == ["b.txt", "a.txt"]


def test_the_decoder_without_nnx_is_the_same_program(compress):
    plain = profile.PLAIN
    texts = {
        profile.lowered(module, module.Stream(compress, profile.POLICY)).as_text()
        for module in (plain, streams)
    }
    assert len(texts) == 1


@pytest.mark.slow
def test_the_profile_of_the_loop(compress):
    results = profile.run(compress, 1)
    assert results["cache_copies"] == [] and results["same_program_without_nnx"]
    assert len(results["bars"]) == 5 and results["error"]["decode"] < 2e-6


def test_a_ring_is_exact_at_position_four_million():
    assert profile.far_error(chunk=64) < 2e-6


def test_each_round_decodes_from_the_same_state(compress):
    stream = profile.started(models.Stream(compress, profile.POLICY))
    before = int(stream.decoding.position[0])
    variant = timing.decode_variant(stream, 10)
    assert variant() > 0
    assert variant() > 0
    assert int(stream.decoding.position[0]) == before + 10


def test_variants_alternate():
    order = []
    variants = {name: lambda name=name: order.append(name) or float(len(order)) for name in "ab"}
    seconds = timing.time_rounds(variants, 2, "trial")
    assert "".join(order) == "baabba"
    assert seconds == {"a": [3.0, 6.0], "b": [4.0, 5.0]}


def test_a_bar_compares_the_median():
    assert timing.bar("x", timing.ratio([1, 2, 9], [1, 1, 1]), ">=", 2)["met"]
    assert not timing.bar("x", 1.06, "<=", 1.05)["met"]


def test_kernels_are_timed(monkeypatch):
    """A CPU has no kernel, so there is no bar."""
    tiny = [walk_shapes.WalkBenchShape(2, 16, 1, 8), walk_shapes.WalkBenchShape(2, 16, 2, 8)]
    monkeypatch.setattr(walk_shapes, "PROMPT", dict(zip(("tokens", "pairs"), tiny, strict=True)))
    monkeypatch.setattr(kernels, "LENGTHS", (256,))
    results = kernels.run(2, quick=True)
    assert set(results["sign_walk"]) == {
        f"{name}, {part}" for name in ("tokens", "pairs") for part in ("walk", "products and walk")
    }
    assert set(results["sampled_attention"]["float32, 256 slots"]) == {"dense", "xla"}
    assert results["sign_walk"]["tokens, walk"]["xla"]["n"] == 2 and results["bars"] == []


def test_rates_of_each_policy(compress):
    by_policy = rates.measure(compress, ["streaming", "snapkv"], 2, 300, 1, new=4)["policies"]
    assert all(row["prefill"]["median"] > 0 for row in by_policy.values())
    assert by_policy["snapkv"]["step_milliseconds"]["n"] == 1


@pytest.mark.parametrize("policy", [cache_int8.STREAMED[0], *map(seldom, cache_int8.STREAMED[1:])])
def test_drift_counts_rows_that_are_not_those_of_their_token(policy, monkeypatch):
    drift = cache_int8.drift(policy, 1024)
    assert drift["tokens"] == 1024 and drift["rows"] >= 120 and drift["rows_off"] == 0
    monkeypatch.setattr(cache_int8, "HALF", 0.4)  # rounding moves some elements by nearly a half
    assert cache_int8.drift(policy, 1024)["rows_off"] > 0


def test_losses_of_both_forms_of_a_cache(compress, ids, monkeypatch):
    monkeypatch.setitem(cache_int8.POLICIES, "streaming", "sinks=4,window=28")
    monkeypatch.setattr(paired_losses, "BIN", 64)
    results = cache_int8.losses(compress, "streaming", ids)
    assert results["tokens"] == len(ids) - 1
    assert 0 < abs(results["difference"]) < 0.05 and results["standard_error"] > 0
    shares = cache_int8.shares(compress, "streaming")
    assert 0.25 < shares["float32"] < 0.5 < shares["bfloat16"] < 1  # sinks are a part of so few


@pytest.mark.parametrize(
    "name, float32, bfloat16",
    [("streaming", 0.275, 0.534), ("reservoir", 0.277, 0.536), ("balance-stream", 0.277, 0.536)],
)
def test_bytes_of_int8_at_default_sizes(name, float32, bfloat16):
    """With the shape of SmolLM2-135M. docs/policies.md states some of these."""
    spec = replace(cache_int8.LAYER, kv_heads=3)
    shares = cache_int8.default_shares(spec, name)
    assert {dtype: round(share, 3) for dtype, share in shares.items()} == {
        "float32": float32, "bfloat16": bfloat16
    }  # fmt: skip
    bars = cache_int8.byte_bars("int8", cache_int8.DEFAULT_TOKENS, shares)
    assert [bar["met"] for bar in bars] == [False, False]
    assert bars[0]["bar"] == "int8: bytes of 256 tokens, of float32"
