"""Recorded requests, and their replay through a prefix index, one after another.

A request is admitted, published and released before the next one. A trace is a list of prompts; a
replay measures the fraction of their blocks that an index finds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxkv.errors import UserError
from jaxkv.evals.prefix_caching.simulator import Simulator
from jaxkv.serve.prefix import PrefixIndex, root_hash

MOONCAKE_BLOCK = 512  # tokens per id of its traces
# Block hit rates of the reference with LRU eviction.
MOONCAKE = {1_000: 0.0445, 10_000: 0.2116, 30_000: 0.3257, None: 0.3664}
ENTRIES = (64, 256, 1024, 4096, None)
SNAPSHOTS = {  # token hit rates of the reference, by entries
    "every=1": (0.040, 0.043, 0.046, 0.097, 0.373),
    "every=16+last": (0.044, 0.067, 0.228, 0.349, 0.362),
    "last": (0.048, 0.133, 0.281, 0.344, 0.350),
    "last+branch": (0.046, 0.108, 0.276, 0.352, 0.359),
}


class RecordedRequest(NamedTuple):
    """One prompt. keys: its tokens, or ids of `piece` tokens each; the last may have fewer."""

    keys: Sequence[int] | np.ndarray
    tokens: int
    piece: int = 1


class Trace(NamedTuple):
    """kind: the publisher's format. requests: the prompts in order."""

    kind: str
    requests: list[RecordedRequest]


def read(path: Path) -> Trace:
    """A trace of Mooncake, or of recorded agents.

    Raises UserError for a file that cannot be read or has another format.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            file.seek(0)
            for field, kind, parse in (("hash_ids", "mooncake", _mooncake),
                                       ("messages", "trajectories", _trajectories)):  # fmt: skip
                if f'"{field}"' in first:
                    return _nonempty(kind, parse(map(json.loads, file)))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check it") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is broken: {type(error).__name__} {error}; download it again"
        ) from None
    raise UserError(f"a trace must have hash_ids or messages, got {path}; give one that has")


def _nonempty(kind: str, requests: Iterable[RecordedRequest]) -> Trace:
    trace = Trace(kind, list(requests))
    if not trace.requests:
        raise ValueError("it holds no prompt")
    return trace


def _mooncake(rows: Iterable[dict[str, Any]]) -> Iterator[RecordedRequest]:
    for row in rows:
        ids, tokens = row["hash_ids"], row["input_length"]
        if tokens < 1 or -(-tokens // MOONCAKE_BLOCK) != len(ids):
            raise ValueError(
                f"input_length must have an id for each {MOONCAKE_BLOCK} tokens, got "
                f"{tokens!r:.60} with {len(ids)}"
            )
        yield RecordedRequest(ids, tokens, MOONCAKE_BLOCK)


def _trajectories(rows: Iterable[dict[str, Any]]) -> Iterator[RecordedRequest]:
    """Interleaved sessions, one turn of each at a time; every turn repeats all turns before it.

    Messages are encoded one by one, because a chat template puts special tokens between them.
    """
    from jaxkv.models.loading.llm import DEFAULT
    from jaxkv.models.loading.tokenizer import read_tokenizer

    tokenizer = read_tokenizer(DEFAULT)
    sessions = []
    for row in rows:
        prompt: list[int] = []
        turns = []
        for message in row["messages"]:
            if message["role"] == "assistant" and prompt:
                turns.append(len(prompt))
            line = f"{message['role']}\n{message['content']}\n"
            prompt += tokenizer.encode(line, bos=False, start=not prompt)
        sessions.append((np.array(prompt), turns))
    for turn in range(max((len(turns) for _, turns in sessions), default=0)):
        for prompt, turns in sessions:
            if turn < len(turns):
                yield RecordedRequest(prompt[: turns[turn]], turns[turn])


def replay(trace: Trace, capacity: int | None) -> dict[str, float]:
    """The hit rates of an index with this capacity in blocks (None: unlimited), a key per block."""
    index = Simulator(1, capacity, "full")
    name, hit_tokens = root_hash(), 0
    for request in trace.requests:
        table = index.admit(index.hash_prompt(request.keys, name))
        index.publish(table)
        index.release(table)
        hit_tokens += min(table.cached * request.piece, request.tokens)
    return {
        "hit_rate_blocks": index.blocks_hit / index.blocks,
        "hit_rate_tokens": hit_tokens / sum(request.tokens for request in trace.requests),
    }


def replay_snapshots(trace: Trace, where: str, entries: int | None) -> float:
    """The share of cached tokens if states are stored by the rule `where`.

    trace: one of Mooncake, by its ids. A request copies the state it resumes from before it stores
    its own states, so that the used state may be evicted for them.
    """
    index = PrefixIndex(1, [entries], where=where)
    name, hit = root_hash(), 0
    for request in trace.requests:
        lease = index.hold(index.hash_prompt(request.keys, name))
        index.start(lease)
        index.release(lease)
        hit += lease.start * request.piece
        for boundary in lease.save:
            snapshot = index.claim(lease.prompt, boundary)
            if snapshot is not None:
                index.publish(snapshot)
    return hit / sum(request.tokens for request in trace.requests)
