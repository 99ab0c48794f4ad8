"""Compares policies on one text: state size, speed, and loss by position.

The picture is StreamingLLM's Figure 3: full attention fails beyond the trained context, and a plain
window fails once it evicts the first tokens; sinks with a window do not fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from jaxkv.contract import Policy
from jaxkv.models import palette, pictures, recompute
from jaxkv.models.llm import Llm
from jaxkv.models.score import Score, check_scorable, gather, score
from jaxkv.policy_spec import format_policy, state_bytes
from jaxkv.state import memory

BUDGET = 256  # cached tokens of the default policies
# Shows progress while a policy runs: takes its name, yields a function of the tokens done.
WatchPolicy = Callable[[str], AbstractContextManager[Callable[[int], None]]]


def defaults(context: int) -> list[str]:
    """Full attention, and a window and a streaming cache with the same KV budget."""
    budget = min(BUDGET, context)
    return ["full", f"window:window={budget}", f"streaming:sinks=4,window={budget - 4}"]


def compare(
    llm: Llm,
    tokens: Sequence[int],
    policies: Sequence[str],
    chunk: int | None,
    seed: int,
    watch: WatchPolicy,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Score]:
    """The score of every policy; raises UserError before the first run if any cannot run.

    stopped: asked after every chunk whether to end there: the policy in progress then has the score
    of the beginning of the text, and later ones have none.
    """
    for policy in policies:
        if recompute.window_of(policy) is None:
            check_scorable(llm.policies(policy))
            needed = state_bytes(llm.policies(policy), llm.spec, 1, len(tokens))
            memory.check(needed, f"the cache of {policy} for {len(tokens)} tokens")
    scores = {}
    for policy in policies:
        if scores and stopped():
            break
        with watch(policy) as progress:
            if window := recompute.window_of(policy):
                parts = recompute.losses(llm, tokens, window)
                losses, seconds, compiling = gather(parts, progress, stopped)
                scores[policy] = Score(losses, 0, seconds, compiling)
            else:
                scores[policy] = score(llm, tokens, policy, chunk, seed, progress, stopped)
    return scores


def result(
    llm: Llm, policy: str, found: Score, block: int, own: Policy | None = None
) -> dict[str, Any]:
    """The entry of one policy in compare.json; own: a policy value that has no string."""
    is_recompute = recompute.window_of(policy) is not None
    return {
        "policy": policy,
        "policy_string": policy if is_recompute else format_policy(llm.policies(own or policy)),
        "perplexity": found.perplexity,
        "loss": found.loss,
        "predictions": len(found.losses),
        "state_bytes": found.state_bytes,
        "chunk": found.chunk,
        "seconds": found.seconds,
        "compile_seconds": found.compile_seconds,
        "tokens_per_second": len(found.losses) / max(found.seconds, 1e-9),
        "blocks": found.blocks(block),
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as a text table, with the predictions where policies have read unequally far."""
    rows = [["policy", "perplexity", "loss", "state", "tokens/s", "seconds", "compiling"]]
    rows += [
        [
            row["policy"],
            f"{row['perplexity']:.4f}",
            f"{row['loss']:.4f}",
            _state(row),
            f"{row['tokens_per_second']:.0f}",
            f"{row['seconds']:.1f}",
            f"{row['compile_seconds']:.1f}",
        ]
        for row in results
    ]
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
        loc="outside upper left", frameon=False, fontsize=8, title="policy   perplexity, state",
        title_fontsize=8, alignment="left", ncols=columns,
    )  # fmt: skip
    return pictures.finish(figure, caption, dpi)
