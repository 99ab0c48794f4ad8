"""What an engine has counted since it began."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from jaxkv.engine.request import Outcome
from jaxkv.prefix.counts import Counts

EDGES = tuple(4**power for power in range(11))  # tokens of a turn, for the histogram of its sizes
SECONDS = (1.0, 60.0)  # a client is told to wait between these


@dataclass
class Figures:
    """prompts, written: tokens of prompts that were taken up, and new ones. turned: tokens read and
    written in all turns of the engine. sizes: turns by how many of EDGES their tokens exceed.
    seconds: that answers took from where they began."""

    prompts: int = 0
    written: int = 0
    turned: int = 0
    sizes: list[int] = field(default_factory=lambda: [0] * (len(EDGES) + 1))
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Count an answer that is over."""
        if outcome.begun is not None:
            self.prompts += outcome.read_tokens + outcome.cached_tokens
            self.seconds += outcome.ended - outcome.begun

    def turn(self, tokens: int) -> None:
        """Count a turn of the engine."""
        self.turned += tokens
        self.sizes[bisect_left(EDGES, tokens)] += 1

    def told(self) -> dict[str, Any]:
        """step_sizes: of each edge the turns of no more tokens than that, and at last all."""
        edges = [*map(str, EDGES), "+Inf"]
        return {
            "generation_tokens": self.written, "preemptions": 0, "step_tokens": self.turned,
            "step_sizes": list(zip(edges, accumulate(self.sizes), strict=True)),
        }  # fmt: skip

    def seconds_for(self, tokens: int, slots: int) -> float:
        """About how long so many tokens of prompts will wait, by what was seen so far."""
        each = self.seconds / max(1, self.prompts) / slots
        return min(max(SECONDS[0], tokens * each), SECONDS[1])


def of_prefixes(
    counts: Counts, slots: int = 0, used: int = 0, held: int = 0, host_slots: int = 0,
    host_used: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """What is told of prefixes, and where none are kept. held: of those used, what is read now."""
    return {
        "prefix_queries": counts.first.tokens, "prefix_hits": counts.first.tokens_hit,
        "snapshot_slots": slots, "snapshot_slots_used": used, "snapshot_slots_held": held,
        "host_slots": host_slots, "host_slots_used": host_used, "misses": dict(counts.first.missed),
        "evictions": counts.evictions, "demotions": counts.demotions,
        "promotions": counts.promotions,
    }  # fmt: skip
