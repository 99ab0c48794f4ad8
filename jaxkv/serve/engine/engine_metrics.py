"""Counters of an engine since its creation."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from jaxkv.serve.engine.request import Outcome
from jaxkv.serve.prefix.counts import Counts

EDGES = tuple(4**power for power in range(11))  # tokens of a step: bounds of the histogram
DISK = ("entries", "bytes", "entries_waiting", "hits", "writes", "failures", "evictions", "lost")
SECONDS = (1.0, 60.0)  # least and most time after which a client should retry


@dataclass
class EngineMetrics:
    """Counters of one engine.

    prompt_tokens: tokens in the prompts of started requests.
    generated_tokens: tokens in answers.
    step_tokens: prefilled and decoded tokens of all steps.
    sizes: steps by the number of EDGES that their tokens exceed.
    seconds: time from the start to the end of an answer, summed over all answers.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    step_tokens: int = 0
    sizes: list[int] = field(default_factory=lambda: [0] * (len(EDGES) + 1))
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Count a finished answer."""
        if outcome.queue_seconds is not None:
            self.prompt_tokens += outcome.computed_tokens + outcome.cached_tokens
            self.seconds += outcome.total_seconds - outcome.queue_seconds

    def add_step(self, tokens: int) -> None:
        """Count one step of the engine."""
        self.step_tokens += tokens
        self.sizes[bisect_left(EDGES, tokens)] += 1

    def export(self) -> dict[str, Any]:
        """The counters by name. step_sizes: steps of at most each edge's tokens, cumulative."""
        edges = [*map(str, EDGES), "+Inf"]
        return {
            "generation_tokens": self.generated_tokens, "step_tokens": self.step_tokens,
            "step_sizes": list(zip(edges, accumulate(self.sizes), strict=True)),
        }  # fmt: skip

    def estimate_wait(self, tokens: int, max_batch: int) -> float:
        """Estimate the seconds until `tokens` waiting prompt tokens are served."""
        seconds_per_token = self.seconds / max(1, self.prompt_tokens) / max_batch
        return min(max(SECONDS[0], tokens * seconds_per_token), SECONDS[1])


def prefix_metrics(
    counts: Counts, capacity: int = 0, stored: int = 0, in_use: int = 0, host_capacity: int = 0,
    host_stored: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """The metrics of a prefix store; without arguments, those of none.

    An entry is a block or a snapshot. in_use: entries that requests use.
    """
    return {
        "prefix_queries": counts.lookups.tokens, "prefix_hits": counts.lookups.tokens_hit,
        "prefix_entries": capacity, "prefix_entries_stored": stored,
        "prefix_entries_in_use": in_use,
        "host_entries": host_capacity, "host_entries_stored": host_stored,
        "misses": dict(counts.lookups.missed), "evictions": counts.evictions,
        "demotions": counts.demotions, "promotions": counts.promotions,
        **{f"disk_{name}": 0 for name in DISK},
    }  # fmt: skip
