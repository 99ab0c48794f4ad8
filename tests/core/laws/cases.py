"""The policies that tests/core/laws checks, one line each."""

import functools
from typing import Any, NamedTuple

import numpy as np

from jaxkv.contract import Chunk, Policy, Spec
from jaxkv.policies import (
    H2O,
    Balance,
    BalanceStream,
    ExpectedAttention,
    Full,
    KeyDiff,
    MagicPIG,
    Oracle,
    PyramidKV,
    Quest,
    Reservoir,
    SnapKV,
    Stratified,
    Streaming,
    TopK,
    TopP,
    Uniform,
    VAttention,
    Window,
)
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
    so many tokens. drawn: the positions of tokens decide its draws. whole: `finish_prefill` evicts
    no token.
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
    whole: bool = False

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
WALK = {"theta": THETA, "scale": SCALE, "key_scale": 0.1, "c": 0.25}
by_pairs = functools.partial(oracle.by_pairs, **WALK)
by_walk = functools.partial(oracle.by_walk, **WALK)
published = functools.partial(oracle.as_published, **WALK)
sparse = functools.partial(oracle.sparse_attention, theta=THETA, scale=SCALE)
S45 = {"policy": Streaming(4, 5), "capacity": 9, "rule": oracle.streaming(4, 5), "exact": 4}

CASES = [
    Case("full", Full(max=29, start=29), 29, oracle.full(), longest=29, chunks=(1, 3, 7, 29)),
    Case("full-int8", Full(max=29, start=29, storage="int8"), 29, oracle.full(), longest=29,
         chunks=FEW),
    Case("full-growing", Full(max=24, start=7), 24, oracle.full(), longest=24, chunks=FEW),
    Case("window-1", Window(1), 1, oracle.window(1), chunks=(1, 3), longest=7),
    Case("window-5", Window(5), 5, oracle.window(5)),
    Case("window-12", Window(12), 12, oracle.window(12), chunks=(1, 5, 7)),
    Case("streaming-0-5", Streaming(0, 5), 5, oracle.streaming(0, 5), relative=True, chunks=FEW),
    Case("streaming-1-1", Streaming(1, 1), 2, oracle.streaming(1, 1), 1, (1, 3, 5), relative=True),
    Case("streaming-4-1", Streaming(4, 1), 5, oracle.streaming(4, 1), 4, FEW, relative=True),
    Case("streaming-4-5", **S45, relative=True),
    Case("streaming-1-12", Streaming(1, 12), 13, oracle.streaming(1, 12), 1, FEW, relative=True),
    Case("streaming-9-4", Streaming(9, 4), 13, oracle.streaming(9, 4), 9, (1, 3, 4), relative=True),
    Case("absolute-4-5", Streaming(4, 5, "absolute"), 9, oracle.streaming(4, 5), 4),
    Case("alibi", **S45, relative=True, encoding=ALIBI, chunks=(1, 3, 19)),
    Case("alibi-absolute", Streaming(1, 5, "absolute"), 6, oracle.streaming(1, 5), 1, FEW,
         encoding=ALIBI),
    Case("no-position", **S45, encoding=NONE, chunks=FEW),
    Case("softcap", **S45, relative=True, softcap=2.0, chunks=FEW),
    Case("one-query-head-each", **S45, relative=True, group=1, chunks=FEW),
    Case("bfloat16", **S45, relative=True, chunks=(1, 3, 19), dtype="bfloat16",
         incoming="bfloat16"),
    Case("streaming-int8", Streaming(4, 5, storage="int8"), 9, oracle.streaming(4, 5), 4,
         relative=True),
    Case("window-int8", Window(5, "int8"), 5, oracle.window(5), chunks=FEW, encoding=ALIBI),
    Case("bfloat16-cache", **S45, relative=True, dtype="bfloat16", chunks=FEW),
    Case("reservoir", Reservoir(2, 4, 3, weighted=True, positions="absolute"), 9,
         oracle.reservoir(2, 4, 3), 2, unbiased=(17,), drawn=True),
    Case("reservoir-cache-relative", Reservoir(2, 4, 3), 9,
         oracle.reservoir(2, 4, 3, weighted=0), 2, relative=True, drawn=True),
    Case("reservoir-int8", Reservoir(2, 4, 3, storage="int8"), 9,
         oracle.reservoir(2, 4, 3, weighted=0), 2, (1, 7, 19), relative=True, drawn=True),
    Case("reservoir-absolute-int8", Reservoir(2, 4, 3, positions="absolute", storage="int8"), 9,
         oracle.reservoir(2, 4, 3, weighted=0), 2, FEW, drawn=True),
    Case("reservoir-geometric", Reservoir(1, 5, 2, "geometric", positions="absolute"), 8,
         oracle.reservoir(1, 5, 2, "geometric", False), 1, FEW, drawn=True),
    Case("reservoir-softcap", Reservoir(1, 5, 3, weighted=True, exponent=0.25), 9,
         oracle.reservoir(1, 5, 3, weighted=0.25), 1, FEW, relative=True, softcap=2.0, group=1,
         drawn=True),
    Case("reservoir-alibi", Reservoir(0, 3, 4), 7,
         oracle.reservoir(0, 3, 4, weighted=0), 0, FEW, relative=True, encoding=ALIBI,
         drawn=True),
    Case("reservoir-yarn", Reservoir(1, 4, 3, weighted=True), 8, oracle.reservoir(1, 4, 3), 1, FEW,
         relative=True, encoding=YARN, drawn=True),
    # After 45 tokens the first level has one of four.
    Case("balance-stream", BalanceStream(2, 4, 3, 4, weighted=True, positions="absolute"), 9,
         oracle.merge_and_reduce(2, 4, 3, 4, by_pairs()), 2,
         (1, 3, 7, 40), longest=60, unbiased=(17, 45)),
    Case("balance-stream-walk",
         BalanceStream(0, 2, 2, 8, "walk", weighted=True, positions="absolute"), 9,
         oracle.merge_and_reduce(0, 2, 2, 8, by_walk()), 0,
         FEW, longest=60),
    Case("balance-stream-cache-relative", BalanceStream(1, 3, 4, 4), 7,
         oracle.merge_and_reduce(1, 3, 4, 4, by_pairs(cache_relative=True), weighted=0), 1,
         FEW, relative=True, longest=90),
    Case("balance-stream-softcap", BalanceStream(1, 3, 3, 4, weighted=True, exponent=0.5), 7,
         oracle.merge_and_reduce(1, 3, 3, 4, by_pairs(cache_relative=True), weighted=0.5), 1,
         FEW, relative=True, longest=60, softcap=2.0, group=1),
    Case("balance-stream-yarn", BalanceStream(1, 3, 2, 4, weighted=True), 7,
         oracle.merge_and_reduce(1, 3, 2, 4, by_pairs(theta=ROTATIONS[YARN], cache_relative=True)),
         1, FEW, relative=True, longest=30, encoding=YARN),
    Case("balance-stream-bfloat16", BalanceStream(2, 4, 2, 8, "coin", weighted=True), 13,
         oracle.merge_and_reduce(2, 4, 2, 8, oracle.by_coin), 2, FEW, relative=True, longest=40,
         dtype="bfloat16", incoming="bfloat16"),
    Case("balance-stream-int8", BalanceStream(1, 3, 4, 4, storage="int8"), 7,
         oracle.merge_and_reduce(1, 3, 4, 4, by_pairs(cache_relative=True), weighted=0), 1,
         FEW, relative=True, longest=90),
    Case("stratified-int8",
         Stratified(1, 3, 4, weighted=True, positions="absolute", storage="int8"), 7,
         oracle.merge_and_reduce(1, 3, 1, 4, oracle.by_coin), 1, FEW, longest=60),
    Case("stratified", Stratified(1, 3, 4, weighted=True, positions="absolute"), 7,
         oracle.merge_and_reduce(1, 3, 1, 4, oracle.by_coin), 1, (1, 7, 30), longest=60,
         unbiased=(17,)),
    Case("stratified-alibi", Stratified(1, 3, 8), 11,
         oracle.merge_and_reduce(1, 3, 1, 8, oracle.by_coin, weighted=0), 1, FEW, relative=True,
         encoding=ALIBI, longest=50),
    Case("balance", Balance(2, 3, 2, 8, start=64), 8,
         oracle.compressed(2, 3, 2, oracle.in_blocks(2, 8, by_pairs())), 2, (1, 7), longest=60,
         unbiased=(17,)),
    Case("balance-int8", Balance(2, 3, 2, 8, start=64, storage="int8"), 8,
         oracle.compressed(2, 3, 2, oracle.in_blocks(2, 8, by_pairs())), 2, FEW, longest=60),
    Case("balance-bfloat16", Balance(2, 3, 1, 8, "coin", start=64), 6,
         oracle.compressed(2, 3, 1, oracle.in_blocks(1, 8, oracle.by_coin)), 2, FEW, longest=40,
         dtype="bfloat16", incoming="bfloat16"),
    Case("balance-walk", Balance(0, 2, 2, 8, "walk", start=8), 5,
         oracle.compressed(0, 2, 2, oracle.in_blocks(2, 8, by_walk())), 0, FEW, longest=50),
    Case("balance-published", Balance(1, 2, 2, 8, "walk", weights="published", start=64), 6,
         oracle.compressed(1, 2, 2, published(2, 8)), 1, FEW, longest=40),
    Case("uniform", Uniform(1, 3, 2, start=16), 7,
         oracle.compressed(1, 3, 2, oracle.at_random(2)), 1, FEW, longest=40, unbiased=(17,)),
    Case("h2o", H2O(5, 3), 8, oracle.heavy_hitters(5, 3, THETA, SCALE), 0, (1, 7), longest=40),
    Case("h2o-int8", H2O(5, 3, "int8"), 8, oracle.heavy_hitters(5, 3, THETA, SCALE), 0, (1, 7),
         longest=40),
    Case("snapkv-int8", SnapKV(9, 3, 3, start=16, storage="int8"), 9,
         oracle.compressed(0, 3, 0, oracle.most_attended(9, 3, 3, "max", THETA, SCALE)), 0, FEW,
         longest=36),
    Case("expected-attention-int8", ExpectedAttention(9, 2, 6, start=16, storage="int8"), 9,
         oracle.compressed(2, 0, 0, oracle.most_expected(9, 2, 6, THETA, SCALE)), 2, FEW,
         longest=36),
    Case("keydiff-int8", KeyDiff(9, start=16, storage="int8"), 9,
         oracle.compressed(0, 0, 0, oracle.least_alike(9, THETA)), 0, FEW, longest=36),
    Case("snapkv", SnapKV(9, 3, 3, start=16), 9,
         oracle.compressed(0, 3, 0, oracle.most_attended(9, 3, 3, "max", THETA, SCALE)), 0, FEW,
         longest=36),
    Case("pyramidkv", PyramidKV(9, 3, 3, "mean", 2, 16, 1, 3), 9,
         oracle.compressed(0, 3, 0, oracle.most_attended(9, 3, 3, "mean", THETA, SCALE)), 0, FEW,
         longest=36),
    Case("expected-attention", ExpectedAttention(9, 2, 6, start=16), 9,
         oracle.compressed(2, 0, 0, oracle.most_expected(9, 2, 6, THETA, SCALE)), 2, FEW,
         longest=36),
    Case("expected-attention-alibi", ExpectedAttention(8, 0, 5, epsilon=0.01, start=16), 8,
         oracle.compressed(0, 0, 0, oracle.most_expected(8, 0, 5, None, SCALE, 0.01)), 0, FEW,
         longest=36, encoding=ALIBI),
    Case("keydiff", KeyDiff(9, start=16), 9,
         oracle.compressed(0, 0, 0, oracle.least_alike(9, THETA)), 0, FEW, longest=36),
    # New tables are made after 35 tokens, and after 75. Codes of rotated keys depend on the first
    # position.
    Case("magicpig", MagicPIG(2, 5, 2, 3, tail=35, start=8), 5,
         sparse(2, 3, oracle.in_buckets(2, 5), theta=None), 2, (1, 7), longest=84, encoding=NONE,
         drawn=True, whole=True),
    Case("magicpig-rotary", MagicPIG(2, 5, 2, 3, tail=35, start=8), 5,
         sparse(2, 3, oracle.in_buckets(2, 5)), 2, (1, 7), longest=60, unbiased=(17,), drawn=True,
         whole=True),
    Case("magicpig-overflowing", MagicPIG(1, 3, 1, 3, False, 1, 5, hash_generated=False, start=64),
         4, sparse(1, 3, oracle.in_buckets(1, 3, 1, False, 5), generated=False), 1, FEW, longest=40,
         unbiased=(17,), drawn=True, whole=True),
    # Every key is found, or the rounding of a key would choose others.
    Case("magicpig-bfloat16", MagicPIG(1, 200, 2, 3, u_floor=1e-4, start=64), 5,
         sparse(2, 3, oracle.in_buckets(1, 200, floor=1e-4)), 2, FEW, longest=30, drawn=True,
         whole=True, dtype="bfloat16", incoming="bfloat16"),
    Case("magicpig-alibi", MagicPIG(2, 4, 0, 3, budget=6, start=64), 3,
         sparse(0, 3, oracle.in_buckets(2, 4, budget=6), theta=None), 0, FEW, longest=36,
         encoding=ALIBI, drawn=True, whole=True),
    Case("topk", TopK(0.3, 2, 3, 32), 5, sparse(2, 3, oracle.of_largest(0.3)), 2, FEW, longest=32,
         whole=True),
    Case("topp", TopP(0.7, 1, 3, 64), 4, sparse(1, 3, oracle.of_mass(0.7), theta=None), 1, FEW,
         longest=30, encoding=ALIBI, whole=True),
    Case("oracle", Oracle(0.3, 2, 3, 64), 5, sparse(2, 3, oracle.by_weight(0.3), softcap=2.0), 2,
         FEW, longest=32, softcap=2.0, group=1, drawn=True, whole=True),
    # The largest channel of a rotated key depends on the first position.
    Case("quest", Quest(0.3, 4, 1, 2, 3, 64), 5,
         sparse(2, 3, oracle.of_pages(0.3, 4, 1), theta=None), 2, FEW, longest=40, encoding=NONE,
         whole=True),
    Case("quest-rotary", Quest(0.2, 3, 2, 0, 2, 64), 2, sparse(0, 2, oracle.of_pages(0.2, 3, 2)), 0,
         FEW, longest=30, whole=True),
    Case("vattention", VAttention(0.1, 0.2, 0.3, 0.2, "two", 2, 3, 64), 5,
         sparse(2, 3, oracle.verified(0.1, 0.2, 0.3, 1.2815515655446004)), 2, FEW, longest=40,
         drawn=True, whole=True),
]  # fmt: skip
# Other settings of a policy: only laws 4, 5 and 15 are checked, in CI.
VARIANTS = {
    *("full-growing", "window-12", "streaming-1-1", "streaming-4-1", "streaming-1-12"),
    *("streaming-9-4", "alibi-absolute", "no-position", "bfloat16-cache", "reservoir-softcap"),
    *("reservoir-geometric", "reservoir-alibi", "balance-stream-walk", "balance-stream-softcap"),
    *("window-int8", "reservoir-absolute-int8", "stratified-int8", "keydiff-int8"),
    "expected-attention-int8",
    *("stratified-alibi", "balance-stream-bfloat16", "balance-bfloat16", "balance-walk"),
    *("balance-published", "reservoir-yarn", "balance-stream-yarn"),
    *("quest-rotary", "expected-attention-alibi"),
    *("magicpig-rotary", "magicpig-overflowing", "magicpig-bfloat16", "magicpig-alibi"),
}
# Policies whose storage another policy shares: checked in CI.
SELDOM = VARIANTS | {
    *("balance-stream", "stratified", "uniform", "pyramidkv", "keydiff"),
    *("topp", "oracle", "quest", "vattention", "magicpig"),
    *("reservoir-int8", "balance-stream-int8", "full-int8", "balance-int8", "h2o-int8"),
    "snapkv-int8",
}
# Of those, the policies that every run compares with the oracle; CI also compares the variants.
COMPARED = {
    *("balance-stream", "stratified", "uniform", "keydiff"),
    *("topp", "oracle", "quest", "vattention", "magicpig", "reservoir-int8", "snapkv-int8"),
}


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
