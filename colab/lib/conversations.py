"""The same conversations with and without prefix caching, and the first requests of a trace.

mooncake_first.jsonl has the first requests of FAST25-release/traces/conversation_trace.jsonl of
kvcache-ai/Mooncake, commit 3b5a594133958449a1feaf1c9e0fc1b553e34a28 (Apache-2.0), unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxkv.serve.engine import Collected, Engine, Request, answer
from jaxkv.typing import Float, Integer

TRACE = Path(__file__).with_name("mooncake_first.jsonl")
Talk = Callable[[Engine], list[list[Collected]]]  # replies by turn and user


class Served(NamedTuple):
    """What an engine did. tokens: every generated token of all rounds. prompts, cached, computed:
    tokens of each prompt in the first round. milliseconds: from a free slot to the first token.
    bytes: memory of the prefix cache."""

    tokens: list[list[int]]
    prompts: Integer[np.ndarray, "turns users"]
    cached: Integer[np.ndarray, "turns users"]
    computed: Integer[np.ndarray, "turns users"]
    milliseconds: Float[np.ndarray, "rounds turns users"]
    bytes: int


def serve(engines: Mapping[str, Engine], talk: Talk, rounds: int) -> dict[str, Served]:
    """The same conversations with each engine, alternately; each round has no prefixes at first."""
    rounds_of: dict[str, list[list[list[Collected]]]] = {name: [] for name in engines}
    for engine in engines.values():  # the first run compiles
        answer(engine, [Request((1, 2, 3), 2)])
    for number in range(rounds):
        for name in list(engines)[:: 1 if number % 2 else -1]:
            engines[name].reset_prefix_cache()
            rounds_of[name].append(talk(engines[name]))
    return {name: summary(rounds_of[name], engines[name].bytes["prefixes"]) for name in engines}


def summary(rounds: list[list[list[Collected]]], size: int) -> Served:
    """The replies of all rounds as arrays. size: bytes of the prefix cache."""
    outcomes = np.array([[[reply.outcome for reply in turn] for turn in turns] for turns in rounds])
    prompts, cached, computed = (
        np.vectorize(lambda outcome, name=name: getattr(outcome, name))(outcomes[0])
        for name in ("prompt_tokens", "cached_tokens", "computed_tokens")
    )
    seconds = np.vectorize(lambda outcome: outcome.first_token_seconds - outcome.queue_seconds)
    tokens = [reply.tokens for turns in rounds for turn in turns for reply in turn]
    return Served(tokens, prompts, cached, computed, 1e3 * seconds(outcomes), size)
