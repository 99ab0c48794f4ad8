"""How many sinks a model needs: its loss with 0, 1, 2 and 4, and the attention on the first token.

The loss is that of StreamingLLM's caches of one size (section 3.1), counted where all of them have
evicted. The share of the first token is the mean over queries that have at least SKIP keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv.errors import UserError, check_int
from jaxkv.models.loading.llm import Llm
from jaxkv.models.network.uncached import SINK_HEAD, mass_on_first
from jaxkv.models.tools import compare, palette, pictures
from jaxkv.models.tools.layers import quiet_policies
from jaxkv.models.tools.measurement import WatchTask, is_noise, show
from jaxkv.policies import Streaming
from jaxkv.typing import Float32, Int32

COUNTS = (4, 2, 1, 0)
SKIP, STRETCH, STRETCHES = 64, 512, 4  # queries left out, tokens and number of samples
CLOSE = 0.02  # nats per token: a smaller difference is no reason for more sinks


def measure(
    llm: Llm,
    ids: Sequence[int],
    capacity: int,
    seed: int,
    watch: WatchTask,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """The report; fewer rows if it was stopped.

    ids: a text with its BOS in front. capacity: tokens in every cache. Raises UserError for a text
    that no cache evicts from.
    """
    check_int("capacity", capacity, max(COUNTS) + 1)
    if len(ids) < 2 * capacity:
        raise UserError(
            f"sinks are measured on a text of at least two caches, {2 * capacity:,} tokens, got "
            f"{len(ids):,}; give a longer text, a larger --max-tokens or a smaller --capacity"
        )
    text = compare.cut(llm, ids, capacity, None, None)
    policies = [f"streaming:sinks={n},window={capacity - n}" for n in COUNTS]
    by_layer = quiet_policies(llm, policies[0])
    measured = sum(isinstance(policy, Streaming) for policy in by_layer)
    if not measured:
        window = min(filter(None, llm.config.windows))
        raise UserError(
            f"all layers of the model have a window of their own, the shortest of {window:,} "
            f"tokens, and would keep it beside caches of {capacity:,}; give --capacity {window}"
        )
    scores = compare.compare(llm, text, policies, None, seed, watch, stopped)
    block = -(-text.scored // 20)
    over = compare.over_first(scores, block) if scores else {}
    rows = [
        compare.result(llm, policy, score, block, over=over[policy]) | {"sinks": count}
        for count, (policy, score) in zip(COUNTS, scores.items(), strict=False)
    ]
    length = min(STRETCH, len(ids), llm.config.context)
    starts = np.linspace(0, len(ids) - length, STRETCHES).astype(int)
    by_head = first_token(llm, np.asarray([ids[at : at + length] for at in starts], np.int32))
    return {
        "capacity": capacity,
        "layers": measured,
        "tokens": len(ids),
        "rows": rows,
        "needed": needed(rows),
        "first_token_by_layer": by_head.mean(axis=1).tolist(),
        "sink_heads": float((by_head > SINK_HEAD).mean()),
    }


def needed(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The fewest sinks whose loss is close to that of the most; None before all are measured."""
    if len(rows) < len(COUNTS):
        return None
    fits = [
        row["sinks"]
        for row in rows
        if row is rows[0] or is_noise(row["over_first"]) or row["over_first"]["mean"] < CLOSE
    ]
    return min(fits)


def first_token(llm: Llm, stretches: Int32[np.ndarray, "B T"]) -> Float32[np.ndarray, "L N"]:
    """Mean attention on the first token, of queries from SKIP on, or the last half of few."""
    skip = min(SKIP, stretches.shape[1] // 2)
    shares = [
        mass_on_first(llm.config, llm.weights, jnp.asarray(ids[None]), skip) for ids in stretches
    ]
    return np.mean(shares, axis=0)


def table(report: Mapping[str, Any]) -> str:
    """The losses by the number of sinks."""
    lines = [f"{'sinks':>5}  {'perplexity':>10}  {'loss':>7}  over {COUNTS[0]} sinks"]
    for row in report["rows"]:
        over = "-" if row is report["rows"][0] else show(row["over_first"])
        lines.append(f"{row['sinks']:5}  {row['perplexity']:10.4f}  {row['loss']:7.4f}  {over}")
    return "\n".join(lines)


def sentences(report: Mapping[str, Any], name: str) -> list[str]:
    """What follows from the measurements. name: of the model."""
    shares = report["first_token_by_layer"]
    top = int(np.argmax(shares))
    attention = (
        f"The first token gets {np.mean(shares):.0%} of the attention, most in layer {top} "
        f"({shares[top]:.0%}); {report['sink_heads']:.0%} of the heads put more than "
        f"{SINK_HEAD:.0%} there."
    )
    if report["needed"] is None:
        return [attention]
    count, capacity = report["needed"], report["capacity"]
    use = f"streaming:sinks={count},window={capacity - count}"
    needs = f"{name} needs {count} sink{'s' * (count != 1)}: take {use}."
    if report["layers"] < len(shares):
        needs += f" The other {len(shares) - report['layers']} layers keep their own window."
    return [needs, attention]


def draw(report: Mapping[str, Any], caption: str) -> bytes:
    """The loss by position and the share of the first token by layer, as a PNG."""
    figure, (losses, shares) = pictures.begin(9.0, 3.8, columns=2)
    looks = palette.styles([row["policy"] for row in report["rows"]])
    for row, look in zip(report["rows"], looks, strict=True):
        at = [(block["start"] + block["end"] - 1) / 2 for block in row["blocks"]]
        losses.plot(at, [block["loss"] for block in row["blocks"]], label=row["sinks"], **look)
    losses.set(
        xlabel="position in the text (tokens)", ylabel="loss (nats per token; lower is better)"
    )
    losses.legend(title="sinks", frameon=False, fontsize=8)
    layers = range(len(report["first_token_by_layer"]))
    shares.bar(layers, [100 * s for s in report["first_token_by_layer"]], color="#0072b2")
    shares.set(xlabel="layer", ylabel="attention on the first token (%)", ylim=(0, 100))
    return pictures.finish(figure, caption, title="How many sinks the model needs")
