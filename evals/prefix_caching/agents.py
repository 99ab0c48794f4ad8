"""Tokens of recorded agent sessions that prefix caching saves, by policy and memory.

Every turn of a session sends the whole conversation again; the sessions are interleaved. A full
cache stores pages of one chunk and evicts nothing: it saves every prefix of whole chunks, in memory
that grows with the text. For evicting caches, whole states are stored, up to the number of entries.
Bytes are those of the default model, for the largest number of stored states; `distinct` counts
shared pages once, although the engine reserves memory for each.
(evals.prefix_caching.engine sends such turns through the engine.)
"""

from __future__ import annotations

from typing import Any

import jax

import jaxkv
from jaxkv.evals.lib.run import DEFAULT, Measure, Run, flag, run
from jaxkv.evals.prefix_caching import traces
from jaxkv.evals.prefix_caching.engine import FILES, TRACES
from jaxkv.evals.prefix_caching.traces import RecordedRequest
from jaxkv.models import Llm
from jaxkv.policy_spec import by_layer, state_bytes
from jaxkv.serve.engine import pool
from jaxkv.serve.engine.tiers import page_ids
from jaxkv.serve.prefix import PrefixIndex, root_hash
from jaxkv.state import batch

TRACE = TRACES / FILES["sessions"]
POLICIES = (
    "streaming:sinks=4,window=252",
    "reservoir:sinks=4,window=126,sample=126",
    "balance-stream:sinks=4,window=124,levels=3,block=64",
)
ENTRIES = (4, 8, 16, 32, 64, 128, 512)
CHUNK = 128


FLAGS = (flag("--trace", TRACE, "recorded sessions"),)


def measure(run: Run) -> dict[str, Any]:
    """Saved tokens and bytes, for an index of each kind; of few turns if --quick is given."""
    llm, turns = run.llm, traces.read(run.options.trace).requests
    turns = turns[:40] if run.options.quick else turns
    full = PrefixIndex(CHUNK, [None], linked=True)
    for turn in turns:
        lease = full.hold(full.hash_prompt(turn.keys, root_hash()))
        full.start(lease)
        for boundary in lease.save:
            if (block := full.claim(lease.prompt, boundary, lease)) is not None:
                full.publish(block, lease)
        full.release(lease)
    saved, tokens = full.counts.tokens_hit, sum(turn.tokens for turn in turns)
    policies = by_layer("full:start=128", llm.config.layers)
    results: dict[str, Any] = {
        "turns": len(turns), "tokens": tokens, "chunk": CHUNK,
        "longest": max(turn.tokens for turn in turns),
        "full": {
            "saved": saved, "share": saved / tokens,
            "bytes": len(full) * state_bytes(policies, llm.spec, 1, CHUNK),
        },
        "policies": {policy: {"entries": {}} for policy in POLICIES},
    }  # fmt: skip
    for policy, entries in ((policy, entries) for policy in POLICIES for entries in ENTRIES):
        snapshot_results = snapshots(llm, policy, turns, entries)
        results["policies"][policy]["entries"][entries] = snapshot_results | {
            "of_full": snapshot_results["saved"] / saved
        }
    return results


def snapshots(llm: Llm, policy: str, turns: list[RecordedRequest], entries: int) -> dict[str, Any]:
    """Saved tokens with this many states of an evicting cache, and the peak of their bytes."""
    layers = by_layer(policy, llm.config.layers)
    index = PrefixIndex(CHUNK, [entries])
    device = index.tiers[0]
    record, page = bytes_of(llm, layers)
    rewritten = pool.pages_of(layers[0]) if pool.snapshot_layout(layers).max_pages else None
    named: dict[int, set] = {}
    peak_bytes = saved = pages = 0
    for turn in turns:
        lease = index.hold(index.hash_prompt(turn.keys, root_hash()))
        index.start(lease)
        index.release(lease)
        saved += lease.start
        for boundary in lease.save:
            snapshot = index.claim(lease.prompt, boundary)
            index.publish(snapshot)
            named[snapshot.index] = set(page_ids(rewritten, CHUNK, lease.prompt, boundary))
        held = len(set().union(*named.values()))
        if device.taken * record + held * page > peak_bytes:
            peak_bytes, pages = device.taken * record + held * page, held
    state_size = state_bytes(layers, llm.spec, 1)
    return {
        "saved": saved,
        "bytes": device.taken * state_size,
        "distinct": peak_bytes,
        "pages": pages,
    }


def bytes_of(llm: Llm, layers: tuple[jaxkv.Policy, ...]) -> tuple[int, int]:
    """Bytes of a state without pages, and of one page, in all layers."""
    states = jax.eval_shape(
        lambda: tuple(layer.init(llm.spec, 1, jax.random.key(0)) for layer in layers)
    )
    stored = jax.eval_shape(lambda: pool.empty(pool.snapshot_layout(layers), states, 1, 1))
    return batch.nbytes(stored.records), batch.nbytes(stored.pages)


MEASURE = Measure("agents", measure, FLAGS, DEFAULT, data=lambda options: [options.trace])

if __name__ == "__main__":
    run(MEASURE)
