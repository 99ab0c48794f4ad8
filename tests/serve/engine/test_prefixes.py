"""A prompt that resumes from a cached prefix continues bit for bit as after a full prefill."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxkv.errors import UserError
from jaxkv.policies.prompt_compression import head_shares
from jaxkv.policies.prompt_compression.head_shares import HeadShares
from jaxkv.rotary import rotary
from jaxkv.serve.engine import Engine, PrefixConfig, Request
from jaxkv.serve.engine.store import model_root
from tests.seldom import seldom
from tests.serve.engine.plain import (
    CHUNK,
    HEAD_DIM,
    KV_HEADS,
    SPEC,
    VOCAB,
    Recorder,
    ask,
    finish,
    new_engine,
    plain,
)

STREAMING = "streaming:sinks=2,window=14"
RETRIEVAL = "retrieval:capacity=12,sinks=2,window=4,every=7"
TRIATTENTION = "triattention:capacity=8,every=5"
# Two layers with equal budgets for their heads in another order, so that they share programs.
CALIBRATED = "retrieval:capacity=12,sinks=2,window=4,budgets=calibrated,calibration=heads.json"
HEADS = HeadShares("plain", "", KV_HEADS, HEAD_DIM, SPEC.encoding, {}, ((0.1, 0.4), (0.4, 0.1)))
SHARED = tuple(np.random.default_rng(1).integers(0, VOCAB, 200).tolist())
APPEND_ONLY = ("full", "balance:sinks=2,window=4,rounds=1", "uniform:sinks=2,window=4,rounds=1",
             "snapkv:capacity=8,window=4", "pyramidkv:capacity=8,window=4",
             "expected-attention:capacity=8,sinks=2,future=16", "keydiff:capacity=8",
             "retrieval:capacity=8,sinks=2,window=4", CALIBRATED,
             "magicpig:K=4,L=6,sinks=2,window=4", "topk:sinks=2,window=4", "topp:sinks=2,window=4",
             "oracle:sinks=2,window=4", "quest:sinks=2,window=4,page=4",
             "loki:sinks=2,window=4",
             "vattention:sinks=2,window=4", "full:storage=int8",
             "balance:sinks=2,window=4,rounds=1,storage=int8")  # fmt: skip
EVICTING = ("streaming:sinks=2,window=14", "streaming:sinks=2,window=14,positions=absolute",
              "window:window=16", "h2o:heavy=8,window=8", "reservoir:sinks=2,window=6,sample=8",
              "stratified:sinks=2,window=6,sample=8",
              "balance-stream:sinks=2,window=6,levels=2,block=4",
              "balance-stream:sinks=2,window=6,levels=1,block=4",
              "0=full;*=streaming:sinks=2,window=14", "streaming:sinks=2,window=14,storage=int8",
              RETRIEVAL, f"{CALIBRATED},every=7", f"{RETRIEVAL},storage=int8",
              "keydiff:capacity=8,every=1,positions=absolute,storage=int8",
              "snapkv:capacity=8,window=4,every=5", "pyramidkv:capacity=8,window=4,every=5",
              "expected-attention:capacity=8,sinks=2,future=16,every=5",
              "tova:capacity=8", "rkv:capacity=8,window=4,every=5",
              "vase:capacity=16,window=4,every=5", TRIATTENTION,
              "balance-stream:sinks=2,window=6,levels=2,block=4,storage=int8")  # fmt: skip
OFTEN = {
    "full",
    "full:storage=int8",
    STREAMING,
    RETRIEVAL,
    TRIATTENTION,
    "0=full;*=streaming:sinks=2,window=14",
}


@pytest.fixture(autouse=True)
def calibration(tmp_path, monkeypatch):
    (tmp_path / "heads.json").write_text(head_shares.write(HEADS))
    monkeypatch.chdir(tmp_path)


def branches(lengths=(10, 16, 31, 33, 48, 130)):
    """Prompts that share these numbers of first tokens with SHARED and then diverge."""
    rng = np.random.default_rng(2)
    return [
        SHARED[:length] + tuple(rng.integers(0, VOCAB, int(rng.integers(1, 40))).tolist())
        for length in lengths
    ]


def usable(size: int) -> int:
    """Tokens of a prompt that are cached after the same prompt."""
    return (size - 1) // CHUNK * CHUNK


def cold(engine: Engine, request: Request) -> Recorder:
    """Answer a request with an empty prefix cache."""
    assert engine.reset_prefix_cache()
    (listener,) = ask(engine, request)
    assert listener.outcome.cached_tokens == 0
    return listener


def first_entry(engine: Engine) -> list[np.ndarray]:
    """All arrays of the first batch entry: caches, PRNG state and sampled tokens."""
    return [np.array(leaf[0]) for leaf in jax.tree.leaves(engine._running._batch)]


@pytest.mark.parametrize(
    "policy", [(pytest.param if p in OFTEN else seldom)(p, id=p) for p in APPEND_ONLY + EVICTING]
)
def test_a_hit_equals_a_full_prefill(policy):
    """Equal tokens, log probabilities and leaves of the batch entry, whatever came before."""
    engine = new_engine(policy, PrefixConfig(num_blocks=64))
    asked = [Request(SHARED, 8, logprobs=3), *(Request(p, 8, logprobs=3) for p in branches())]
    expected = [(cold(engine, request).scored, first_entry(engine)) for request in asked]
    assert engine.reset_prefix_cache()
    for repeat in range(2):
        for request, (want, leaves) in zip(asked, expected, strict=True):
            (got,) = ask(engine, request)
            assert got.scored == want
            for got_leaf, leaf in zip(first_entry(engine), leaves, strict=True):
                np.testing.assert_array_equal(got_leaf, leaf)
            if repeat:
                assert got.outcome.cached_tokens == usable(len(request.tokens))
            elif policy in APPEND_ONLY and request is not asked[0]:
                pairs = zip(request.tokens, SHARED, strict=False)
                alike = next((n for n, (a, b) in enumerate(pairs) if a != b), len(SHARED))
                assert got.outcome.cached_tokens == min(
                    usable(len(request.tokens)), alike // 16 * 16
                )
    assert [listener.scored for listener in ask(engine, *asked)] == [
        scored for scored, _ in expected
    ]


@pytest.mark.parametrize("policy", ["full", EVICTING[0], seldom(EVICTING[6])])
def test_a_collision_is_a_miss(policy):
    """If all hashes are equal, the tokens are compared; the first entry stays."""
    engine = new_engine(policy, PrefixConfig(num_blocks=64))
    reversed_tokens = tuple(reversed(SHARED))
    expected = [
        cold(engine, Request(tokens, 8, logprobs=3)).scored for tokens in (SHARED, reversed_tokens)
    ]
    assert engine.reset_prefix_cache()
    index = engine._store.index
    index.chain = dataclasses.replace(index.chain, hash=lambda _: bytes(32))
    for _ in range(2):
        for tokens, want in zip((SHARED, reversed_tokens), expected, strict=True):
            (got,) = ask(engine, Request(tokens, 8, logprobs=3))
            assert got.scored == want
            assert tokens is SHARED or not got.outcome.cached_tokens
    assert engine.metrics()["misses"]["collision"] > 0


@pytest.mark.parametrize(
    "policy, blocks", [("full", 14), seldom("snapkv:capacity=8,window=4", 14), (EVICTING[0], 2)]
)
def test_prefixes_return_from_the_host_unchanged(policy, blocks):
    config = PrefixConfig(num_blocks=blocks, num_host_blocks=100)
    engine = new_engine(policy, config)
    asked = [Request(SHARED, 8, logprobs=3), *(Request(p, 8, logprobs=3) for p in branches())]
    expected = [cold(engine, request).scored for request in asked]
    for repeat in range(3):
        for request, want in zip(asked, expected, strict=True):
            (got,) = ask(engine, request)
            assert got.scored == want
            if repeat:
                assert got.outcome.cached_tokens == usable(len(request.tokens))
    counts = engine._store.index.counts
    assert counts.promotions > 10 and counts.demotions > 10 and not counts.evictions


@pytest.mark.slow
def test_snapshots_share_pages_of_levels():
    policy = "balance-stream:sinks=2,window=6,levels=4,block=4"
    engine = new_engine(policy, PrefixConfig(num_blocks=8, where="every=1"), max_len=512)
    index, pages, long = engine._store.index, engine._store._device.pages, SHARED + SHARED
    asked = [Request(long[:size], 4, logprobs=2) for size in range(60, 400, 60)]
    rng = np.random.default_rng(5)
    asked += [Request(tuple(rng.integers(0, VOCAB, 90).tolist()), 4, logprobs=2) for _ in range(4)]
    expected = [cold(engine, request).scored for request in asked]
    for _ in range(2):  # the second time with reused entries and pages
        assert engine.reset_prefix_cache() and pages.taken == 0
        for _ in range(2):
            shared = 0
            for request, want in zip(asked, expected, strict=True):
                (got,) = ask(engine, request)
                assert got.scored == want
                shared = max(shared, 3 * len(index) - pages.taken)
            assert shared > 4, "pages shared with other snapshots"
        (again,) = ask(engine, asked[-1])
        assert again.outcome.cached_tokens == usable(90)


@pytest.mark.parametrize(
    "fields", [{"where": "nonsense"}, {"memory": 0}, {"num_blocks": 0}, {"host_memory": None}]
)
def test_invalid_settings_raise(unchecked, fields):
    with pytest.raises(UserError, match=next(iter(fields))):
        PrefixConfig(**fields)


@pytest.mark.parametrize("policy", ["full", "streaming:sinks=4,window=12"])
def test_prefixes_take_no_more_than_their_memory(policy):
    memory = 300_000
    engine = new_engine(policy, PrefixConfig(memory=memory))
    count, used = engine.metrics()["prefix_entries"], engine.bytes["prefixes"]
    assert count > 1 and used <= memory < used + used / count
    with pytest.raises(UserError, match=r"one prefix, which takes .*, got 1.0 KiB"):
        new_engine(policy, PrefixConfig(memory=1024))


def test_a_salt_separates_the_random_draws_of_policies():
    policy = "reservoir:sinks=2,window=6,sample=8"
    engine = new_engine(policy, PrefixConfig(num_blocks=64))
    scored = {
        salt: cold(engine, Request(SHARED, 4, logprobs=1, salt=salt)).scored
        for salt in ("a", "b", None)
    }
    assert len(set(map(str, scored.values()))) == 3


def test_a_cancelled_prefill_leaves_its_cached_prefix():
    engine = new_engine(STREAMING, PrefixConfig(num_blocks=64, where="every=1"))
    expected = cold(engine, Request(SHARED, 8, logprobs=3)).scored
    for steps in range(14):
        assert engine.reset_prefix_cache()
        listener = Recorder()
        handle = engine.submit(Request(SHARED, 8, logprobs=3), listener)
        for _ in range(steps):
            engine.step()
        engine.cancel(handle)
        finish(engine)
        assert listener.outcome.reason == "cancelled"
        (again,) = ask(engine, Request(SHARED, 8, logprobs=3))
        assert again.scored == expected
        assert again.outcome.cached_tokens == min(steps * CHUNK, usable(200))


def test_echo_does_not_use_the_prefix_cache():
    engine = new_engine(STREAMING, PrefixConfig(num_blocks=64))
    ask(engine, Request(SHARED, 1))
    (listener,) = ask(engine, Request(SHARED, 1, logprobs=1, echo=True))
    assert len(listener.echoed) == len(SHARED) and listener.outcome.cached_tokens == 0
    assert all(scored.logprob is not None for scored in listener.echoed[1:])


def test_root_hashes_differ_between_settings():
    """Another model, spec, chunk, seed, salt or policy has its own prefixes."""
    streaming, wider_sinks = "streaming:sinks=2,window=14", "streaming:sinks=3,window=13"
    wide = dataclasses.replace(SPEC, encoding=rotary(HEAD_DIM, 101.0))
    half = dataclasses.replace(SPEC, dtype="bfloat16")
    roots = [
        model_root(plain(streaming), 16, 0, None),
        model_root(plain(streaming), 16, 0, "a"),
        model_root(plain(streaming), 16, 1, None),
        model_root(plain(streaming), 32, 0, None),
        model_root(plain(streaming, seed=1), 16, 0, None),
        model_root(plain(wider_sinks), 16, 0, None),
        model_root(plain(f"0={streaming};1={wider_sinks}"), 16, 0, None),
        model_root(dataclasses.replace(plain(streaming), spec=wide), 16, 0, None),
        model_root(dataclasses.replace(plain(streaming), spec=half), 16, 0, None),
    ]
    assert len(set(roots)) == len(roots)
    assert model_root(plain(streaming), 16, 0, None) == roots[0]


@pytest.mark.parametrize(
    "num_chunks, cached", [(0, 64), (8, 48)], ids=["free entries", "entries of a third owner"]
)
def test_a_prefill_takes_no_share_of_another_owner(num_chunks, cached):
    """While a long prompt is prefilled, a short one of another owner gets entries too.

    In the second case, 12 entries become 6 of the long prompt, 3 of the third owner and 3.
    """
    engine = new_engine("full", PrefixConfig(num_blocks=12), max_len=512, max_per_owner=2)
    if num_chunks:
        ask(engine, Request(SHARED[: num_chunks * CHUNK + 2], 1, owner="c", salt="c"))
    engine.submit(Request(SHARED * 2, 1, owner="a", salt="a"), Recorder())
    for _ in range(4):
        engine.step()
    assert engine.metrics()["prefix_entries"] == 12 and engine._prefills
    short = Request(SHARED[:66], 1, owner="b", salt="b")
    ask(engine, short)
    (again,) = ask(engine, short)
    assert again.outcome.cached_tokens == cached
