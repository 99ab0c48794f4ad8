"""Compares policies on one text: state size, speed, and loss by position.

The picture is StreamingLLM's Figure 3: full attention fails beyond the trained context, and a plain
window fails once it evicts the first tokens; sinks with a window do not fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.contract import Policy
from jaxkv.models.generation.score import Score
from jaxkv.models.generation.text import warn_beyond_context
from jaxkv.models.loading.llm import Llm
from jaxkv.models.tools import measurement, palette, pictures, recompute
from jaxkv.models.tools.measurement import Stretches, WatchTask, paired, show
from jaxkv.policy_spec import format_policy
from jaxkv.state import memory

BUDGET = 256  # cached tokens of the default policies


def defaults(context: int) -> list[str]:
    """Full attention, and a window and a streaming cache with the same KV budget."""
    budget = min(BUDGET, context)
    return ["full", f"window:window={budget}", f"streaming:sinks=4,window={budget - 4}"]


def cut(
    llm: Llm, ids: Sequence[int], prompt: int, scored: int | None, stretches: int | None
) -> Stretches:
    """The stretches of a text: by default one, scored up to its end. ids: with a BOS in front."""
    if scored is None and (stretches or 1) == 1:
        scored = max(1, len(ids) - prompt - 1)
    elif scored is None:
        scored = max(1, len(ids) // stretches - prompt - 1)
    return measurement.cut(llm, ids, prompt, scored, stretches, 1)


def compare(
    llm: Llm,
    tokens: Sequence[int] | Stretches,
    policies: Sequence[str],
    chunk: int | None,
    seed: int,
    watch: WatchTask,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Score]:
    """The score of every policy; raises UserError before the first run if any cannot run.

    tokens: one text without a prompt, or stretches. stopped: asked after every chunk whether to end
    there: the policy in progress then has the score of the beginning of the text, and later ones
    have none.
    """
    text = tokens
    if not isinstance(tokens, Stretches):
        text = Stretches(np.asarray([llm.checked_ids(tokens)], np.int32), 0)
    windows = {policy: recompute.window_of(policy) for policy in policies}
    cached = [policy for policy, window in windows.items() if window is None]
    if len(cached) < len(windows):
        recompute.check(llm)
    for policy in cached:
        warn_beyond_context(llm, llm.policies(policy), text.fed)
    measured = []
    if cached:
        measured = measurement.measure(llm, text, cached, seed, watch, stopped, chunk=chunk)
    for policy, window in windows.items():
        if window is not None and not (measured and stopped()):
            measured.append(recompute.measure(llm, text, policy, window, watch, stopped))
    scores = {score.policy: score for score in measured}
    return {policy: scores[policy] for policy in policies if policy in scores}


def over_first(scores: Mapping[str, Score], block: int) -> dict[str, dict[str, Any]]:
    """By policy, its loss minus that of the first, with two standard errors over blocks.

    block: tokens per block of a stretch. Only tokens that both have scored count.
    """
    first = next(iter(scores.values())).by_stretch
    differences = {}
    for policy, score in scores.items():
        rows, columns = np.minimum(score.by_stretch.shape, first.shape)
        over = score.by_stretch[:rows, :columns] - first[:rows, :columns]
        differences[policy] = paired(over, block, np.isfinite(over))
    return differences


def result(
    llm: Llm,
    policy: str,
    score: Score,
    block: int,
    custom: Policy | None = None,
    over: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The entry of one policy in compare.json.

    custom: the policy itself, where no string describes it. over: its entry in `over_first`.
    """
    is_recompute = recompute.window_of(policy) is not None
    return {
        "policy": policy,
        "policy_string": policy if is_recompute else format_policy(llm.policies(custom or policy)),
        "perplexity": score.perplexity,
        "loss": score.loss,
        "predictions": score.predictions,
        "over_first": over,
        "state_bytes": score.state_bytes,
        "chunk": score.chunk,
        "seconds": score.seconds,
        "compile_seconds": score.compile_seconds,
        "tokens_per_second": score.predictions / max(score.seconds, 1e-9),
        "blocks": score.blocks(block),
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as a text table, with the predictions where policies have read unequally far."""
    rows = [
        ["policy", "perplexity", "loss", "over first", "state", "tokens/s", "seconds", "compiling"]
    ]
    rows += [
        [
            row["policy"],
            f"{row['perplexity']:.4f}",
            f"{row['loss']:.4f}",
            "-" if row is results[0] else show(row["over_first"]),
            _state(row),
            f"{row['tokens_per_second']:.0f}",
            f"{row['seconds']:.1f}",
            f"{row['compile_seconds']:.1f}",
        ]
        for row in results
    ]
    if all(row["over_first"] is None for row in results):
        rows = [[*row[:3], *row[4:]] for row in rows]
    if len({row["predictions"] for row in results}) > 1:
        counts = ["predictions", *(str(row["predictions"]) for row in results)]
        rows = [[*row, count] for row, count in zip(rows, counts, strict=True)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    return "\n".join(lines)


def _state(row: dict[str, Any]) -> str:
    return memory.show(row["state_bytes"]) if row["state_bytes"] else "no cache"


def draw(results: Sequence[dict[str, Any]], context: int, caption: str, dpi: int = 150) -> bytes:
    """The loss by position of every policy, as a PNG."""
    columns = 1 if len(results) <= 3 else 2
    height = 3.8 + 0.2 * -(-len(results) // columns)
    figure, axes = pictures.begin(7.5, height)
    looks = palette.styles([row["policy"] for row in results])
    for number, (row, look) in enumerate(zip(results, looks, strict=True)):
        at = [(block["start"] + block["end"] - 1) / 2 for block in row["blocks"]]
        label = f"{row['policy']}   {row['perplexity']:.2f}, {_state(row)}"
        width = 1.4 + 0.9 * min(3, len(results) - 1 - number)  # lines below stay visible
        axes.plot(at, [block["loss"] for block in row["blocks"]], lw=width, label=label, **look)
    end = results[0]["blocks"][-1]["end"]
    if context < end:
        pictures.mark(axes, context, f"trained context, {context}")
    axes.set(
        xlabel="position in the text (tokens)",
        ylabel="loss (nats per token; lower is better)",
        xlim=(0, end),
    )
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    figure.legend(
        loc="outside upper left",
        frameon=False,
        fontsize=8,
        title="policy   perplexity, state",
        title_fontsize=8,
        alignment="left",
        ncols=columns,
    )
    return pictures.finish(figure, caption, dpi)
