"""The policies that tests/core/laws checks, an entry each."""

import functools
from typing import Any, NamedTuple

import numpy as np

from jaxkv.contract import Chunk, Policy, Spec
from jaxkv.policies import (
    H2O,
    RKV,
    TOVA,
    Balance,
    BalanceStream,
    ExpectedAttention,
    Full,
    KeyDiff,
    Loki,
    MagicPIG,
    Oracle,
    PyramidKV,
    Quest,
    Reservoir,
    Retrieval,
    SnapKV,
    Stratified,
    Streaming,
    TopK,
    TopP,
    TriAttention,
    Uniform,
    VaSE,
    VAttention,
    Window,
)
from jaxkv.policies.prompt_compression.head_shares import LayerBudgets
from jaxkv.rotary import Alibi, NoPosition, Rotary, rotary
from jaxkv.testing.subject import Subject, draw_tokens
from tests.core import oracle

THETA, KV_HEADS, HEAD_DIM, SCALE = 100.0, 2, 8, 8**-0.5
ROTARY, ALIBI, NONE = rotary(HEAD_DIM, THETA), Alibi.of(4), NoPosition()
SCALED = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8, "beta_slow": 1}
YARN = rotary(HEAD_DIM, THETA, {"kind": "yarn", **SCALED})
# The oracle's argument for each rotation.
ROTATIONS = {ROTARY: THETA, YARN: oracle.yarn(HEAD_DIM, THETA, *SCALED.values())}


class Case(NamedTuple):
    """A policy, its settings and its oracle.

    capacity: the policy evicts none of its first `capacity` tokens. rule: the meaning of the policy
    (core/oracle). exact: how many first tokens are never evicted. chunks: sizes of chunks, the
    first of them 1; () for the usual five. relative: positions count inside the cache.
    longest: tokens of a sequence. unbiased: the estimate is called unbiased, and law 12 asks after
    so many tokens. drawn: the positions of tokens decide its draws. lossless: `finish_prefill`
    evicts no token.
    """

    name: str
    policy: Policy
    capacity: int
    rule: Any
    exact: int = 0
    chunks: tuple[int, ...] = ()
    relative: bool = False
    encoding: Rotary | Alibi | NoPosition = ROTARY
    group: int = 2
    softcap: float | None = None
    dtype: str = "float32"
    incoming: str = "float32"
    longest: int = 0
    unbiased: tuple[int, ...] = ()
    drawn: bool = False
    lossless: bool = False

    @property
    def spec(self) -> Spec:
        return Spec(KV_HEADS, HEAD_DIM, SCALE, self.encoding, self.softcap, self.dtype, self.group)

    @property
    def positions(self) -> dict[str, Any]:
        """The encoding, for the oracle."""
        slopes = self.encoding.slopes if self.encoding == ALIBI else None
        return {"theta": ROTATIONS.get(self.encoding), "slopes": slopes}

    @property
    def in_int8(self) -> bool:
        return getattr(self.policy, "storage", "float") == "int8"

    @property
    def window(self) -> int:
        """How many newest tokens are never evicted."""
        return getattr(self.policy, "window", 0)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.chunks or (1, 3, 7, self.capacity, 2 * self.capacity + 1)

    @property
    def places(self) -> int:
        return self.longest or 3 * self.capacity + 2

    @property
    def tolerance(self) -> float:
        return 3e-2 if "bfloat16" in (self.dtype, self.incoming) else 5e-6


FEW = (1, 7)
NORMAL_90 = 1.2815515655446004  # nine tenths of a normal distribution lie below
ROTATED = {"theta": THETA, "scale": SCALE}
WALK = {**ROTATED, "key_scale": 0.1, "c": 0.25}
by_pairs = functools.partial(oracle.by_pairs, **WALK)
by_walk = functools.partial(oracle.by_walk, **WALK)
published = functools.partial(oracle.as_published, **WALK)
sparse = functools.partial(oracle.sparse_attention, **ROTATED)
S45 = {"policy": Streaming(4, 5), "capacity": 9, "rule": oracle.streaming(4, 5), "exact": 4}

# Each policy once, and caches in int8 with a storage of their own: all laws are checked.
CASES = [
    Case("full", policy=Full(max=29, start=29),
         rule=oracle.full(), capacity=29, longest=29, chunks=(1, 3, 7, 29)),
    Case("full-int8", policy=Full(max=29, start=29, storage="int8"),
         rule=oracle.full(), capacity=29, longest=29, chunks=FEW),
    Case("window-5", policy=Window(window=5),
         rule=oracle.window(size=5), capacity=5),
    Case("streaming-4-5", **S45, relative=True),
    Case("bfloat16", **S45, relative=True, chunks=(1, 3, 19), dtype="bfloat16",
         incoming="bfloat16"),
    Case("streaming-int8", policy=Streaming(sinks=4, window=5, storage="int8"),
         rule=oracle.streaming(sinks=4, size=5), capacity=9, exact=4, relative=True),
    Case("reservoir-cache-relative", policy=Reservoir(sinks=2, window=4, sample=3),
         rule=oracle.reservoir(sinks=2, size=4, sample=3, weighted=0),
         capacity=9, exact=2, relative=True, drawn=True),
    Case("balance-stream-cache-relative", policy=BalanceStream(sinks=1, window=3, levels=4,
         block=4),
         rule=oracle.merge_and_reduce(sinks=1, size=3, levels=4, slots=4,
              choose=by_pairs(cache_relative=True), weighted=0),
         capacity=7, exact=1, chunks=FEW, relative=True, longest=90),
    Case("stratified", policy=Stratified(sinks=1, window=3, sample=4, weighted=True,
         positions="absolute"),
         rule=oracle.merge_and_reduce(sinks=1, size=3, levels=1, slots=4, choose=oracle.by_coin),
         capacity=7, exact=1, chunks=(1, 7, 30), longest=60, unbiased=(17,)),
    Case("balance", policy=Balance(sinks=2, window=3, rounds=2, block=8, start=64),
         rule=oracle.compressed(sinks=2, size=3, rounds=2, choose=oracle.in_blocks(rounds=2,
              block=8, choose=by_pairs())),
         capacity=8, exact=2, chunks=(1, 7), longest=60, unbiased=(17,)),
    Case("uniform", policy=Uniform(sinks=1, window=3, rounds=2, start=16),
         rule=oracle.compressed(sinks=1, size=3, rounds=2, choose=oracle.at_random(rounds=2)),
         capacity=7, exact=1, chunks=FEW, longest=40, unbiased=(17,)),
    Case("h2o", policy=H2O(heavy=5, window=3),
         rule=oracle.heavy_hitters(heavy=5, size=3, **ROTATED),
         capacity=8, chunks=(1, 7), longest=40),
    Case("snapkv", policy=SnapKV(capacity=9, window=3, kernel=3, start=16),
         rule=oracle.compressed(sinks=0, size=3, rounds=0, choose=oracle.most_attended(capacity=9,
              size=3, kernel=3, pool="max", **ROTATED)), capacity=9, chunks=FEW, longest=36),
    Case("snapkv-int8", policy=SnapKV(capacity=9, window=3, kernel=3, start=16, storage="int8"),
         rule=oracle.compressed(sinks=0, size=3, rounds=0, choose=oracle.most_attended(capacity=9,
              size=3, kernel=3, pool="max", **ROTATED)), capacity=9, chunks=FEW, longest=36),
    Case("pyramidkv", policy=PyramidKV(capacity=9, window=3, kernel=3, pool="mean", beta=2,
         start=16, layer=1, layers=3),
         rule=oracle.compressed(sinks=0, size=3, rounds=0, choose=oracle.most_attended(capacity=9,
              size=3, kernel=3, pool="mean", **ROTATED)), capacity=9, chunks=FEW, longest=36),
    Case("expected-attention", policy=ExpectedAttention(capacity=9, sinks=2, future=6, start=16),
         rule=oracle.compressed(sinks=2, size=0, rounds=0, choose=oracle.most_expected(capacity=9,
              sinks=2, future=6, **ROTATED)), capacity=9, exact=2, chunks=FEW, longest=36),
    Case("keydiff", policy=KeyDiff(capacity=9, start=16),
         rule=oracle.compressed(sinks=0, size=0, rounds=0, choose=oracle.least_alike(capacity=9,
              theta=THETA)), capacity=9, chunks=FEW, longest=36),
    Case("retrieval", policy=Retrieval(capacity=15, sinks=2, window=3, start=16),
         rule=oracle.compressed(sinks=2, size=3, rounds=0, choose=oracle.best_of_competing(
              capacity=15, ends=5)), capacity=15, exact=2, chunks=FEW, longest=52),
    # With `every`, token number capacity + every is the first that evicts others.
    Case("tova", policy=TOVA(capacity=9, every=2),
         rule=oracle.repeated(capacity=9, every=2, sinks=0, size=0,
              choose=oracle.attended_by_newest(capacity=9, **ROTATED, relative=True)),
         capacity=10, relative=True, chunks=FEW),
    Case("rkv", policy=RKV(capacity=9, window=3, kernel=3, mix=0.3, every=4),
         rule=oracle.repeated(capacity=9, every=4, sinks=0, size=3,
              choose=oracle.attended_without_like(capacity=9, size=3, kernel=3, mix=0.3,
                   threshold=0.5, **ROTATED, relative=True)), capacity=12, relative=True),
    Case("vase", policy=VaSE(capacity=12, sinks=1, window=3, kernel=3, every=4),
         rule=oracle.repeated(capacity=12, every=4, sinks=0, size=3,
              choose=oracle.large_and_drawn(capacity=12, sinks=1, size=3, large=3, kernel=3,
                   **ROTATED, relative=True)), capacity=15, relative=True, chunks=FEW, drawn=True),
    Case("triattention", policy=TriAttention(capacity=9, furthest=20, every=4),
         rule=oracle.repeated(capacity=9, every=4, sinks=0, size=0,
              choose=oracle.attended_by_centres(capacity=9, furthest=20, theta=THETA,
                   relative=True)), capacity=12, relative=True),
    Case("snapkv-every", policy=SnapKV(capacity=9, window=3, kernel=3, every=5, storage="int8"),
         rule=oracle.repeated(capacity=9, every=5, sinks=0, size=3, choose=oracle.most_attended(
              capacity=9, size=3, kernel=3, pool="max", **ROTATED, relative=True)),
         capacity=13, relative=True, chunks=FEW),
    Case("retrieval-every", policy=Retrieval(capacity=15, sinks=2, window=3, every=4),
         rule=oracle.repeated_of_layer(capacity=15, every=4, sinks=2, size=3),
         capacity=18, exact=2, relative=True, chunks=FEW),
    Case("retrieval-calibrated", policy=Retrieval(capacity=12, sinks=2, window=3, start=16,
         budgets="calibrated", calibration="a file", layer_budgets=LayerBudgets.of((4, 10))),
         rule=oracle.compressed(sinks=2, size=3, rounds=0, choose=oracle.least_alike_of_heads(
              (4, 10))), capacity=9, exact=2, chunks=FEW, longest=36),
    # New tables are made after 35 tokens, and after 75. Codes of rotated keys depend on the first
    # position.
    Case("magicpig", policy=MagicPIG(K=2, L=5, sinks=2, window=3, tail=35, start=8),
         rule=sparse(sinks=2, size=3, choose=oracle.in_buckets(bits=2, tables=5), theta=None),
         capacity=5, exact=2, chunks=(1, 7), longest=84, encoding=NONE, drawn=True, lossless=True),
    Case("topk", policy=TopK(share=0.3, sinks=2, window=3, start=32),
         rule=sparse(sinks=2, size=3, choose=oracle.of_largest(share=0.3)),
         capacity=5, exact=2, chunks=FEW, longest=32, lossless=True),
    Case("topp", policy=TopP(mass=0.7, sinks=1, window=3, start=64),
         rule=sparse(sinks=1, size=3, choose=oracle.of_mass(mass=0.7), theta=None),
         capacity=4, exact=1, chunks=FEW, longest=30, encoding=ALIBI, lossless=True),
    Case("oracle", policy=Oracle(share=0.3, sinks=2, window=3, start=64),
         rule=sparse(sinks=2, size=3, choose=oracle.by_weight(share=0.3), softcap=2.0),
         capacity=5, exact=2, chunks=FEW, longest=32, softcap=2.0, group=1, drawn=True,
         lossless=True),
    # The largest channel of a rotated key depends on the first position.
    Case("quest", policy=Quest(share=0.3, page=4, fewest=1, sinks=2, window=3, start=64),
         rule=sparse(sinks=2, size=3, choose=oracle.of_pages(share=0.3, page=4, fewest=1),
              theta=None),
         capacity=5, exact=2, chunks=FEW, longest=40, encoding=NONE, lossless=True),
    Case("loki", policy=Loki(share=0.3, dimensions=0.4, sinks=2, window=3, start=32),
         rule=sparse(sinks=2, size=3, choose=oracle.in_components(share=0.3, dimensions=3)),
         capacity=5, exact=2, chunks=FEW, longest=32, lossless=True),
    Case("vattention", policy=VAttention(top=0.1, base=0.2, epsilon=0.3, delta=0.2, sides="two",
         sinks=2, window=3, start=64),
         rule=sparse(sinks=2, size=3, choose=oracle.verified(top=0.1, base=0.2, epsilon=0.3,
              quantile=NORMAL_90)),
         capacity=5, exact=2, chunks=FEW, longest=40, drawn=True, lossless=True),
]  # fmt: skip
# Other settings: only what depends on them is checked, laws 4, 5, 12, 15 and 17.
VARIANTS = [
    Case("keydiff-every", policy=KeyDiff(capacity=9, every=4),
         rule=oracle.repeated(capacity=9, every=4, sinks=0, size=0, choose=oracle.least_alike(
              capacity=9, theta=THETA)), capacity=12, relative=True),
    Case("full-growing", policy=Full(max=24, start=7),
         rule=oracle.full(), capacity=24, longest=24, chunks=FEW),
    Case("keydiff-unrotated", policy=KeyDiff(capacity=9, start=16, keys="unrotated"),
         rule=oracle.compressed(sinks=0, size=0, rounds=0, choose=oracle.least_alike(capacity=9,
              theta=None)), capacity=9, chunks=FEW, longest=36),
    Case("tova-every-1", policy=TOVA(capacity=9, positions="absolute", storage="int8"),
         rule=oracle.repeated(capacity=9, every=1, sinks=0, size=0,
              choose=oracle.attended_by_newest(capacity=9, **ROTATED)), capacity=9, chunks=FEW),
    Case("triattention-prompt", policy=TriAttention(capacity=9, every=None, start=16),
         rule=oracle.compressed(sinks=0, size=0, rounds=0, choose=oracle.attended_by_centres(
              capacity=9, furthest=65536, theta=ROTATIONS[YARN])),
         capacity=9, chunks=FEW, longest=36, encoding=YARN),
    Case("triattention-window", policy=TriAttention(capacity=12, window=3, furthest=20, every=4),
         rule=oracle.repeated(capacity=12, every=4, sinks=0, size=3,
              choose=oracle.attended_by_centres(capacity=9, furthest=20, theta=THETA,
                   relative=True)), capacity=15, relative=True, chunks=FEW),
    Case("tova-prompt", policy=TOVA(capacity=9, every=None, start=16),
         rule=oracle.compressed(sinks=0, size=0, rounds=0, choose=oracle.attended_by_newest(
              capacity=9, **ROTATED)), capacity=9, chunks=FEW, longest=36),
    Case("rkv-prompt", policy=RKV(capacity=9, window=3, kernel=3, every=None, start=16),
         rule=oracle.compressed(sinks=0, size=3, rounds=0, choose=oracle.attended_without_like(
              capacity=9, size=3, kernel=3, mix=0.1, threshold=0.5, **ROTATED)),
         capacity=9, chunks=FEW, longest=36),
    Case("vase-prompt", policy=VaSE(capacity=12, sinks=1, window=3, kernel=3, every=None, start=16),
         rule=oracle.compressed(sinks=0, size=3, rounds=0, choose=oracle.large_and_drawn(
              capacity=12, sinks=1, size=3, large=3, kernel=3, **ROTATED)),
         capacity=12, chunks=FEW, longest=36, drawn=True),
    Case("vase-int8", policy=VaSE(capacity=12, sinks=1, window=3, kernel=3, every=20,
         positions="absolute", storage="int8"),
         rule=oracle.repeated(capacity=12, every=20, sinks=0, size=3, choose=oracle.large_and_drawn(
              capacity=12, sinks=1, size=3, large=3, kernel=3, **ROTATED)),
         capacity=31, chunks=FEW, drawn=True),
    Case("snapkv-adaptive", policy=SnapKV(capacity=9, window=3, kernel=3, budgets="adaptive",
         start=16),
         rule=oracle.compressed(sinks=0, size=3, rounds=0, choose=oracle.best_of_competing(
              capacity=9, ends=3, score=oracle.score_attended(size=3, kernel=3, pool="max",
                   **ROTATED))), capacity=9, chunks=FEW, longest=36),
    Case("keydiff-adaptive", policy=KeyDiff(capacity=9, budgets="adaptive", start=16),
         rule=oracle.compressed(sinks=0, size=0, rounds=0, choose=oracle.best_of_competing(
              capacity=9, ends=0, score=oracle.unlike(THETA))), capacity=9, chunks=FEW, longest=36),
    Case("triattention-adaptive", policy=TriAttention(capacity=9, furthest=20, every=4,
         budgets="adaptive"),
         rule=oracle.repeated_of_layer(capacity=9, every=4, sinks=0, size=0,
              score=oracle.score_by_centres(furthest=20, theta=THETA, relative=True)),
         capacity=12, relative=True, chunks=FEW),
    Case("rkv-int8", policy=RKV(capacity=9, window=3, kernel=3, threshold=0.2, every=20,
         positions="absolute", storage="int8"),
         rule=oracle.repeated(capacity=9, every=20, sinks=0, size=3,
              choose=oracle.attended_without_like(capacity=9, size=3, kernel=3, mix=0.1,
                   threshold=0.2, **ROTATED)), capacity=28, chunks=FEW),
    Case("triattention-int8", policy=TriAttention(capacity=9, furthest=64, every=11,
         positions="absolute", storage="int8"),
         rule=oracle.repeated(capacity=9, every=11, sinks=0, size=0,
              choose=oracle.attended_by_centres(capacity=9, furthest=64, theta=THETA)),
         capacity=19, chunks=FEW),
    Case("rkv-every-adaptive", policy=RKV(capacity=9, window=3, kernel=3, every=4,
         budgets="adaptive", storage="int8"),
         rule=oracle.repeated_of_layer(capacity=9, every=4, sinks=0, size=3,
              score=oracle.score_without_like(size=3, kernel=3, mix=0.1, threshold=0.5, **ROTATED,
                   relative=True)), capacity=12, relative=True, chunks=FEW),
    Case("keydiff-every-1", policy=KeyDiff(capacity=9, keys="unrotated", every=1,
         positions="absolute"),
         rule=oracle.repeated(capacity=9, every=1, sinks=0, size=0, choose=oracle.least_alike(
              capacity=9, theta=None)), capacity=9, chunks=FEW),
    Case("snapkv-alibi-softcap", policy=SnapKV(capacity=9, window=3, kernel=3, every=5),
         rule=oracle.repeated(capacity=9, every=5, sinks=0, size=3, choose=oracle.most_attended(
              capacity=9, size=3, kernel=3, pool="max", theta=None, scale=SCALE, relative=True,
              softcap=2.0)),
         capacity=13, relative=True, chunks=FEW, encoding=ALIBI, softcap=2.0),
    Case("expected-attention-every", policy=ExpectedAttention(capacity=9, sinks=2, future=6,
         every=3, positions="absolute"),
         rule=oracle.repeated(capacity=9, every=3, sinks=2, size=0, choose=oracle.most_expected(
              capacity=9, sinks=2, future=6, **ROTATED)), capacity=11, exact=2, chunks=FEW),
    Case("retrieval-calibrated-every", policy=Retrieval(capacity=12, sinks=2, window=3, every=4,
         budgets="calibrated", calibration="a file", layer_budgets=LayerBudgets.of((4, 10))),
         rule=oracle.repeated_of_heads(12, (4, 10), every=4, sinks=2, size=3),
         capacity=11, exact=2, relative=True, chunks=FEW, encoding=ALIBI, softcap=2.0),
    Case("window-1", policy=Window(window=1),
         rule=oracle.window(size=1), capacity=1, chunks=(1, 3), longest=7),
    Case("streaming-0-5", policy=Streaming(sinks=0, window=5),
         rule=oracle.streaming(sinks=0, size=5), capacity=5, relative=True, chunks=FEW),
    Case("streaming-1-1", policy=Streaming(sinks=1, window=1),
         rule=oracle.streaming(sinks=1, size=1),
         capacity=2, exact=1, chunks=(1, 3, 5), relative=True),
    Case("streaming-9-4", policy=Streaming(sinks=9, window=4),
         rule=oracle.streaming(sinks=9, size=4),
         capacity=13, exact=9, chunks=(1, 3, 4), relative=True),
    Case("absolute-4-5", policy=Streaming(sinks=4, window=5, positions="absolute"),
         rule=oracle.streaming(sinks=4, size=5), capacity=9, exact=4, chunks=FEW),
    Case("alibi", **S45, relative=True, encoding=ALIBI, chunks=FEW),
    Case("alibi-absolute", policy=Streaming(sinks=1, window=5, positions="absolute"),
         rule=oracle.streaming(sinks=1, size=5), capacity=6, exact=1, chunks=FEW, encoding=ALIBI),
    Case("no-position", **S45, encoding=NONE, chunks=FEW),
    Case("softcap", **S45, relative=True, softcap=2.0, chunks=FEW),
    Case("bfloat16-cache", **S45, relative=True, dtype="bfloat16", chunks=FEW),
    Case("reservoir", policy=Reservoir(sinks=2, window=4, sample=3, weighted=True,
         positions="absolute"),
         rule=oracle.reservoir(sinks=2, size=4, sample=3),
         capacity=9, exact=2, unbiased=(17,), drawn=True),
    Case("reservoir-geometric", policy=Reservoir(sinks=1, window=5, sample=2, scheme="geometric",
         positions="absolute"),
         rule=oracle.reservoir(sinks=1, size=5, sample=2, scheme="geometric", weighted=False),
         capacity=8, exact=1, chunks=FEW, drawn=True),
    Case("reservoir-alibi", policy=Reservoir(sinks=0, window=4, sample=3, weighted=True,
         exponent=0.25),
         rule=oracle.reservoir(sinks=0, size=4, sample=3, weighted=0.25),
         capacity=7, chunks=FEW, relative=True, encoding=ALIBI, softcap=2.0, drawn=True),
    Case("reservoir-yarn", policy=Reservoir(sinks=1, window=4, sample=3, weighted=True),
         rule=oracle.reservoir(sinks=1, size=4, sample=3),
         capacity=8, exact=1, chunks=FEW, relative=True, encoding=YARN, drawn=True),
    # After 45 tokens the first level has one of four.
    Case("balance-stream", policy=BalanceStream(sinks=2, window=4, levels=3, block=4, weighted=True,
         positions="absolute"),
         rule=oracle.merge_and_reduce(sinks=2, size=4, levels=3, slots=4, choose=by_pairs()),
         capacity=9, exact=2, chunks=(1, 3, 7, 40), longest=60, unbiased=(17, 45)),
    Case("balance-stream-walk", policy=BalanceStream(sinks=0, window=2, levels=2, block=8,
         mode="walk", weighted=True, positions="absolute"),
         rule=oracle.merge_and_reduce(sinks=0, size=2, levels=2, slots=8, choose=by_walk()),
         capacity=9, chunks=FEW, longest=60),
    Case("balance-stream-yarn", policy=BalanceStream(sinks=1, window=3, levels=3, block=4,
         weighted=True, exponent=0.5),
         rule=oracle.merge_and_reduce(sinks=1, size=3, levels=3, slots=4,
              choose=by_pairs(theta=ROTATIONS[YARN], cache_relative=True), weighted=0.5),
         capacity=7, exact=1, chunks=FEW, relative=True, encoding=YARN, longest=60, softcap=2.0,
         group=1),
    Case("stratified-alibi", policy=Stratified(sinks=1, window=3, sample=8),
         rule=oracle.merge_and_reduce(sinks=1, size=3, levels=1, slots=8, choose=oracle.by_coin,
              weighted=0),
         capacity=11, exact=1, chunks=FEW, relative=True, encoding=ALIBI, longest=50),
    Case("balance-walk", policy=Balance(sinks=0, window=2, rounds=2, block=8, mode="walk", start=8),
         rule=oracle.compressed(sinks=0, size=2, rounds=2, choose=oracle.in_blocks(rounds=2,
              block=8, choose=by_walk())), capacity=5, chunks=FEW, longest=50),
    Case("balance-published", policy=Balance(sinks=1, window=2, rounds=2, block=8, mode="walk",
         weights="published", start=64),
         rule=oracle.compressed(sinks=1, size=2, rounds=2, choose=published(rounds=2, block=8)),
         capacity=6, exact=1, chunks=FEW, longest=40),
    Case("expected-attention-alibi", policy=ExpectedAttention(capacity=8, sinks=0, future=5,
         epsilon=0.01, start=16),
         rule=oracle.compressed(sinks=0, size=0, rounds=0, choose=oracle.most_expected(capacity=8,
              sinks=0, future=5, theta=None, scale=SCALE, epsilon=0.01)),
         capacity=8, chunks=FEW, longest=36, encoding=ALIBI),
    Case("magicpig-rotary", policy=MagicPIG(K=2, L=5, sinks=2, window=3, tail=35, start=8),
         rule=sparse(sinks=2, size=3, choose=oracle.in_buckets(bits=2, tables=5)),
         capacity=5, exact=2, chunks=(1, 7), longest=60, unbiased=(17,), drawn=True, lossless=True),
    Case("magicpig-overflowing", policy=MagicPIG(K=1, L=3, sinks=1, window=3, center=False,
         budget=5, hash_generated=False, start=64),
         rule=sparse(sinks=1, size=3, choose=oracle.in_buckets(bits=1, tables=3, center=False,
              budget=5), generated=False, theta=None),
         capacity=4, exact=1, chunks=FEW, longest=40, encoding=ALIBI, unbiased=(17,), drawn=True,
         lossless=True),
    # Every key is found, or the rounding of a key would choose others.
    Case("magicpig-bfloat16", policy=MagicPIG(K=1, L=200, sinks=2, window=3, u_floor=1e-4,
         start=64),
         rule=sparse(sinks=2, size=3, choose=oracle.in_buckets(bits=1, tables=200, floor=1e-4)),
         capacity=5, exact=2, chunks=FEW, longest=30, drawn=True, lossless=True, dtype="bfloat16",
         incoming="bfloat16"),
    # Components of keys before rotation, for rotated keys, depend on the first position.
    Case("loki-unrotated", policy=Loki(share=0.2, dimensions=0.2, keys="unrotated", sinks=0,
         window=2, start=64),
         rule=sparse(sinks=0, size=2, choose=oracle.in_components(share=0.2, dimensions=2,
              unrotated=True)),
         capacity=2, chunks=FEW, longest=30, lossless=True),
    Case("quest-rotary", policy=Quest(share=0.2, page=3, fewest=2, sinks=0, window=2, start=64),
         rule=sparse(sinks=0, size=2, choose=oracle.of_pages(share=0.2, page=3, fewest=2)),
         capacity=2, chunks=FEW, longest=30, lossless=True),
]  # fmt: skip

# Cases whose chunks are compiled at every size: chunks of other cases are padded to one width.
REAL_WIDTHS = {"streaming-4-5", "balance-stream-cache-relative", "balance"}


@functools.cache
def subject(case: Case) -> Subject:
    """The case for the laws of jaxkv.testing, with its runs, which the laws share."""
    return Subject(
        case.policy, case.capacity, stream(case), case.sizes, case.spec,
        tolerance=case.tolerance, real_widths=case.name in REAL_WIDTHS,
    )  # fmt: skip


def stream(case: Case, start: int = 0, seed: int = 0, count: int | None = None) -> Chunk:
    """Four sequences of random tokens, whose first position is `start`."""
    return draw_tokens(case.spec, count or case.places, seed, start, case.incoming)


def without_padding(tokens: Chunk, sequence: int) -> list[np.ndarray]:
    """The tokens of one sequence without its padding: q, k, v [T,*,H]."""
    return [leaf[sequence][tokens.valid[sequence]] for leaf in tokens[:3]]


@functools.cache
def expected(case: Case, start: int = 0):
    """By the oracle: outs [B,P,N,H] with zeros at padding, and cached[sequence][token][kv head].

    If the cache is in int8, of the tokens as it stores them.
    """
    tokens = stream(case, start)
    outs, cached = np.zeros(tokens.q.shape), []
    rng = getattr(subject(case).init(), "rng", None)
    for sequence in range(4):
        q, k, v = without_padding(tokens, sequence)
        if case.in_int8:
            k, v = oracle.stored_in_int8(k, v, case.exact, case.positions["theta"], start)
        out, kept = oracle.attention(
            q,
            k,
            v,
            case.rule,
            cache_relative=case.relative,
            prompt=int(tokens.valid[sequence, : subject(case).prompt].sum()),
            rngs=None if rng is None else np.asarray(rng)[sequence],
            **case.positions,
            start=start,
            scale=SCALE,
            softcap=case.softcap,
        )
        outs[sequence, tokens.valid[sequence]] = out
        cached.append(kept)
    return outs, cached
