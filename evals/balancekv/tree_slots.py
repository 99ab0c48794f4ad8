"""Levels and block of `balance-stream`: slots in use, errors of attention, losses, and holes.

The levels of a merge-and-reduce tree fill like the digits of a binary number, so at most times some
of them are empty. Trees of several sizes share equal slots with the window. They are compared with
`streaming` of the same bytes, and some of them at an equal mean number of cached tokens. The error
is that of attention with absolute positions, as in evals/reservoir/attention_error.py, without
weights and with full ones.

Cache-relative positions have a hole while level 0 waits for the token of its newest group. A cache
without holes shows what they change.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv.contract import Policy
from jaxkv.evals.balancekv.contiguous import ContiguousStream
from jaxkv.evals.lib.paired_losses import (
    BIN,
    ByText,
    Case,
    bin_means,
    compare,
    measure_cases,
    record_header,
    texts_of,
)
from jaxkv.evals.lib.parts import Parts
from jaxkv.evals.lib.record import Record, read
from jaxkv.evals.lib.run import SMOLLM2, Measure, Run, flag, run
from jaxkv.evals.lib.state_sizes import sequence_bytes, streaming, streaming_window
from jaxkv.evals.lib.table import over_base, table
from jaxkv.evals.lib.verdict import Statement, above, below, claim, within
from jaxkv.evals.reservoir import attention_error
from jaxkv.evals.reservoir.stream_losses import SKIP, cached_tokens
from jaxkv.models.generation.score import gather
from jaxkv.models.loading.llm import Llm
from jaxkv.policies.merge_reduce import occupancy
from jaxkv.policies.merge_reduce.balance_stream import BalanceStream
from jaxkv.policies.merge_reduce.occupancy import TreeSize
from jaxkv.policies.streaming import Streaming
from jaxkv.policy_spec import parse_policy

SINKS, SLOTS = 4, 256  # per KV head; the window has the slots that the sinks and the tree leave
FIRST = TreeSize(3, 64)  # the others are compared with it at equal tokens
TREES = (FIRST, TreeSize(1, 128), TreeSize(2, 64), TreeSize(7, 32), TreeSize(2, 128))
AT_EQUAL_TOKENS = (TreeSize(1, 128), TreeSize(2, 64))
BASE, FEWER, FULL = "streaming", "streaming, equal tokens", "reservoir"
DOUBLINGS = 4  # of the stream, since the last level was first halved
EXPONENTS = (0.0, 1.0)
HEADS = 32  # whose draws say how often a head has a hole


FLAGS = (
    flag("--tokens", 10_000, "of each text, for losses", minimum=BIN),
    flag("--captured", 2_048, "of each text, for errors"),
    flag("--layers", None, "for errors; default: every sixth", type=int, nargs="+"),
    flag("--seeds", 2, "of the samples, for errors", minimum=1),
)


def measure(run: Run) -> dict[str, Any]:
    """Cached tokens, errors, losses and holes of all trees."""
    llm, record, texts = run.llm, run.record, texts_of(run)
    attention_errors, caches = errors(llm, texts, run.options), cases(llm)
    cached = cached_tokens(caches)
    by_text = measure_cases(llm, texts, caches, BASE, record)
    compared = compare(by_text, list(caches), BASE, SKIP)
    rows = {
        name: row
        | {
            "policy": caches[name].policy,
            "state_bytes": sequence_bytes(llm, caches[name].policy),
            "cached": cached[name],
        }
        for name, row in compared["rows"].items()
    }
    fewer = [FEWER, named(FIRST), *(f"{named(size)}, equal tokens" for size in AT_EQUAL_TOKENS)]
    return record_header(llm, caches, by_text) | {
        "tokens": compared["tokens"],
        "rows": rows,
        "equal_tokens": compare(by_text, fewer, FEWER, SKIP)["rows"],
        "trees": {named(size): about(size) for size in TREES},
        "errors": attention_errors,
        "holes": holes(llm, texts, by_text, record),
    }


def named(size: TreeSize) -> str:
    return f"{size.levels} x {size.block}"


def cases(llm: Llm) -> dict[str, Case]:
    """The trees, at equal slots and at equal tokens, and streaming of both sizes.

    The uniform sample uses all its slots, as no tree does.
    """
    trees = {named(size): tree(size, SLOTS) for size in TREES}
    window = streaming_window(llm, trees.values())
    tokens = SLOTS - FIRST.slots + round(used(FIRST))
    policies = {BASE: streaming(window)} | trees
    for size in AT_EQUAL_TOKENS:
        empty = size.slots - round(used(size))
        policies[f"{named(size)}, equal tokens"] = tree(size, tokens + empty)
    policies[FEWER] = streaming(tokens - SINKS)
    ends = f"sinks={SINKS},window={SLOTS - SINKS - FIRST.slots}"
    policies[FULL] = f"reservoir:{ends},sample={FIRST.slots}"
    return {name: Case(policy) for name, policy in policies.items()}


def tree(size: TreeSize, slots: int) -> str:
    """A balance-stream of `slots` slots per KV head."""
    window = slots - SINKS - size.slots
    return f"balance-stream:sinks={SINKS},window={window},levels={size.levels},block={size.block}"


def about(size: TreeSize) -> dict[str, Any]:
    return {"slots": size.slots, "used": used(size), "share": used(size) / size.slots}


def used(size: TreeSize) -> float:
    """The mean number of cached tokens of a tree, over a doubling of the stream."""
    num_evicted = doubling(size)
    r, group_start = occupancy.group_size_and_start(size, num_evicted)
    # A group that has begun has its token with the share of its tokens that came.
    first = np.asarray(num_evicted - group_start, float) / 2.0 ** np.asarray(r)
    upper_levels = np.asarray(occupancy.filled_per_level(size, num_evicted))[:, 1:]
    return float(np.mean(first + upper_levels.sum(axis=1)))


def doubling(size: TreeSize) -> jax.Array:
    """The numbers of evicted tokens over a doubling of the stream."""
    start = size.before << DOUBLINGS
    return jnp.arange(start, 2 * start, dtype=jnp.uint32)


def errors(
    llm: Llm, texts: Mapping[str, Sequence[int]], options: argparse.Namespace
) -> dict[str, Any]:
    """The error of attention under streaming and under each tree of equal slots."""
    sizes = {named(size): parse_policy(tree(size, SLOTS)) for size in TREES}
    caches: dict[str, Policy] = {BASE: Streaming(SINKS, SLOTS - SINKS, "absolute")}
    for name, policy in sizes.items():
        for exponent in EXPONENTS:
            caches[f"{name}, {exponent:g}"] = BalanceStream(
                policy.sinks, policy.window, policy.levels, policy.block, weighted=True,
                positions="absolute", exponent=exponent,
            )  # fmt: skip
    beginnings = {name: ids[: options.captured] for name, ids in texts.items()}
    layers = attention_error.layers_of(llm, options.layers or range(0, llm.config.layers, 6))
    return attention_error.all_errors(llm, beginnings, layers, range(options.seeds), caches)


def holes(
    llm: Llm, texts: Mapping[str, Sequence[int]], by_text: ByText, record: Record
) -> dict[str, Any]:
    """How often a KV head has a hole and how wide it is, and the loss without holes.

    over_holes: the loss with contiguous positions minus that with holes, of the same tokens.
    """
    policy = parse_policy(tree(FIRST, SLOTS))
    contiguous = ContiguousStream(policy.sinks, policy.window, policy.levels, policy.block)
    parts, name = Parts(record, len(texts)), named(FIRST)
    bins_by_text = {}
    for text, ids in texts.items():
        key = f"{llm.name}, {text}, {len(ids)}, {contiguous}"

        def losses(ids: Sequence[int] = ids) -> np.ndarray:
            return gather(models.losses(llm, ids, contiguous))[0].astype(np.float64)

        without = {"loss": bin_means(parts.part(key, losses)), "commit": parts.commit_of[key]}
        bins_by_text[text] = {"bins": {name: by_text[text]["bins"][name], "contiguous": without}}
    seeds = jax.random.bits(jax.random.key(0), (1, HEADS, 2), jnp.uint32)
    missing = positions_without_token(FIRST, doubling(FIRST), seeds)
    return {
        "widest": int(missing.max()),
        "share": float(np.mean(missing > 0)),
        "by_text": bins_by_text,
        "over_holes": compare(bins_by_text, [name, "contiguous"], name, SKIP)["rows"]["contiguous"],
    }


def positions_without_token(size: TreeSize, num_evicted: jax.Array, rng: jax.Array) -> np.ndarray:
    """By KV head and number of evicted tokens, the positions of the sample that have no token."""
    counted = np.asarray(occupancy.filled_per_level(size, num_evicted)).sum(axis=-1)
    filled = np.asarray(occupancy.filled_slots(size, num_evicted[None], rng))[0]
    return counted - filled.sum(axis=-1)


MEASURE = Measure("tree_slots", measure, FLAGS, model=SMOLLM2, texts=1)
THREE, TWO = named(FIRST), "2 x 64"  # levels x block; the second is the default
CLAIMS = (
    claim("not claimed",
          "At equal bytes, a merge-and-reduce tree of two levels and a longer window cache more "
          "tokens than three levels",
          "tree_slots", above(f"rows/{TWO}/cached", f"rows/{THREE}/cached"), unit="tokens"),
    claim("not claimed", "Two levels and a longer window lose less than three levels",
          "tree_slots",
          below(f"rows/{TWO}/loss_over_base_by_text", f"rows/{THREE}/loss_over_base_by_text")),
    claim("not claimed", "Without holes in the cache-relative positions of a sample, the loss is "
          "lower", "tree_slots", below("holes/over_holes")),
)  # fmt: skip


def trees_table() -> str:
    """Slots, losses and errors of each tree."""
    results = read("tree_slots")["results"]
    rows, equal, errors = results["rows"], results["equal_tokens"], results["errors"]["rows"]
    heads = ("levels x block", "tree's slots in use", "tokens cached", "loss minus streaming's",
             "at equal tokens", "error of attention", "error, weighted")  # fmt: skip
    cached = {name: f"{row['cached']:.0f}" for name, row in rows.items()}
    cells = [
        ("`streaming`", "", cached[BASE], "0", "0", f"{errors[BASE]['error']:.3f}", ""),
        ("`reservoir`", "", cached[FULL], over_base(rows[FULL]), *3 * [""]),
    ]
    for name, size in results["trees"].items():
        equal_tokens = equal.get(name if name == THREE else f"{name}, equal tokens")
        cells.append((
            name, f"{size['used']:.0f} of {size['slots']}", cached[name], over_base(rows[name]),
            over_base(equal_tokens) if equal_tokens else "",
            *(f"{errors[f'{name}, {exponent}']['error']:.3f}" for exponent in (0, 1)),
        ))  # fmt: skip
    return table(heads, cells)


TABLES = {"tree_slots": trees_table}
STATEMENTS = (
    Statement("docs/policies.md", "Positions without holes do not change the loss of "
              "SmolLM2-135M", "tree_slots", [within("holes/over_holes", by=0.001)]),
    Statement("evals/NEGATIVE.md", "lose less than three levels, one or seven", "tree_slots",
              [below(f"rows/{TWO}/loss_over_base_by_text", f"rows/{name}/loss_over_base_by_text")
               for name in (THREE, "1 x 128", "7 x 32")]),
    Statement("evals/NEGATIVE.md", "at an equal number of cached tokens, every tree loses more "
              "than `streaming`", "tree_slots",
              [above("equal_tokens/3 x 64"), above("equal_tokens/1 x 128, equal tokens"),
               above("equal_tokens/2 x 64, equal tokens")]),
)  # fmt: skip

if __name__ == "__main__":
    run(MEASURE)
