"""Tokens of recorded agent sessions that prefix caching saves, by policy and memory.

Every turn of a session sends the whole conversation again; the sessions are interleaved. A full
cache stores pages of one chunk and evicts nothing: it saves every prefix of whole chunks, in memory
that grows with the text. For evicting caches, whole states are stored, up to the number of entries.
Bytes are those of the default model, for the largest number of stored states.
(evals.prefix_caching.engine sends such turns through the engine.)
"""

from __future__ import annotations

from typing import Any

from jaxkv.evals.lib.run import DEFAULT, Measure, Run, flag, run
from jaxkv.evals.prefix_caching import traces
from jaxkv.evals.prefix_caching.engine import FILES, TRACES
from jaxkv.evals.prefix_caching.traces import RecordedRequest
from jaxkv.models import Llm
from jaxkv.policy_spec import by_layer, state_bytes
from jaxkv.serve.prefix import PrefixIndex, root_hash

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
    """Saved tokens with this many states of an evicting cache, and their bytes."""
    layers = by_layer(policy, llm.config.layers)
    index = PrefixIndex(CHUNK, [entries])
    saved = 0
    for turn in turns:
        lease = index.hold(index.hash_prompt(turn.keys, root_hash()))
        index.start(lease)
        index.release(lease)
        saved += lease.start
        for boundary in lease.save:
            index.publish(index.claim(lease.prompt, boundary))
    return {"saved": saved, "bytes": index.tiers[0].taken * state_bytes(layers, llm.spec, 1)}


MEASURE = Measure("agents", measure, FLAGS, DEFAULT, data=lambda options: [options.trace])

if __name__ == "__main__":
    run(MEASURE)
