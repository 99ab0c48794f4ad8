"""The baseline "sliding window with re-computation": no cache, every prediction from scratch.

A fresh forward over the last W tokens up to t, at positions 0 to W - 1, predicts token t + 1. The
quality is that of a context of W tokens; the cost is O(T W). Bounded caches are compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import numpy as np

from jaxkv.errors import UserError
from jaxkv.models.generation.score import Score, gather
from jaxkv.models.loading.llm import Llm
from jaxkv.models.network import uncached
from jaxkv.models.network.config import Config
from jaxkv.models.network.cross_entropy import target_losses
from jaxkv.models.network.decoder import Weights
from jaxkv.models.tools.measurement import Stretches, WatchTask
from jaxkv.rotary import Alibi
from jaxkv.typing import Array, Float32, Int32

NAME = "recompute"
TOKENS = 8192  # tokens in one forward; its batch is as many windows as fit


def window_of(policy: str) -> int | None:
    """W where the string is `recompute:window=W`, None for every other policy.

    Raises UserError for a malformed `recompute` string.
    """
    name, _, field = policy.strip().partition(":")
    if name != NAME:
        return None
    key, _, value = field.partition("=")
    if key != "window" or not value.isdecimal() or int(value) < 1:
        raise UserError(
            f"re-computation is written {NAME}:window=W with W of at least 1, got {policy!r}; "
            f"try {NAME}:window=256"
        )
    return int(value)


def check(llm: Llm) -> None:
    """Raise UserError for a model that has no attention without a cache."""
    if any(isinstance(spec.encoding, Alibi) for spec in llm.specs):
        raise UserError(
            f"re-computation has no ALiBi, got a model of the family {llm.config.family}; compare "
            "policies alone"
        )


def measure(
    llm: Llm,
    text: Stretches,
    policy: str,
    window: int,
    watch: WatchTask,
    stopped: Callable[[], bool] = lambda: False,
) -> Score:
    """The score of this baseline, as `measurement.measure` gives those of policies."""
    with watch(policy, text.fed, "tokens") as progress:
        runs = [gather(losses(llm, ids, window), progress, stopped) for ids in text.tokens]
    rows = [of_stretch[text.prompt :] for of_stretch, _, _ in runs]
    rows = np.stack([row for row in rows if len(row) == len(rows[0])])
    seconds, compiling = (sum(run[at] for run in runs) for at in (1, 2))
    return Score(policy, rows, 0, seconds, compiling, None, text.prompt)


def losses(
    llm: Llm, tokens: Sequence[int], window: int, every: int = 1
) -> Iterator[Float32[np.ndarray, " N"]]:
    """Yield the natural-log losses of tokens 1..N-1, batch by batch.

    every: NaN for all but every so-many-th token beyond the first window, to save time.
    """
    ids = np.asarray(llm.checked_ids(tokens), np.int32)
    # The first W predictions see all tokens before them: one forward computes them all.
    window = min(window, len(ids) - 1)
    yield np.asarray(_losses(llm.config, llm.weights, ids[None, : window + 1]))[0]
    if window == len(ids) - 1:
        return
    texts = np.lib.stride_tricks.sliding_window_view(ids[1:], window + 1)
    count, texts = len(texts), texts[every - 1 :: every]
    batch = max(1, TOKENS // window)
    for start in range(0, len(texts), batch):
        windows = texts[start : start + batch]
        padded = np.pad(windows, ((0, min(batch, len(texts)) - len(windows)), (0, 0)))
        computed = np.asarray(_losses(llm.config, llm.weights, padded, 1))[: len(windows), 0]
        with_gaps = np.full((len(windows), every), np.nan, np.float32)
        with_gaps[:, -1] = computed
        yield with_gaps.reshape(-1)
    if count % every:
        yield np.full(count % every, np.nan, np.float32)


@partial(jax.jit, static_argnums=(0, 3))
def _losses(
    config: Config, weights: Weights, texts: Int32[Array, "B T"], last: int = 0
) -> Float32[Array, "B M"]:
    """Losses of tokens 1..T-1 of each text, or of the `last` ones if given."""
    tokens, targets = texts[:, :-1], texts[:, 1:]
    decoder, hidden, _ = uncached.forward(config, weights, tokens)
    return target_losses(decoder.logits(hidden[:, -last:]), targets[:, -last:])
