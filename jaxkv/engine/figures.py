"""What an engine has counted since it began."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from jaxkv.engine.request import Outcome

NO_STORE = {  # what is told where no prefixes are kept
    "prefix_queries": 0, "prefix_hits": 0, "snapshot_slots": 0, "snapshot_slots_used": 0,
    "misses": {}, "evictions": 0,
}  # fmt: skip
SECONDS = (1.0, 60.0)  # a client is told to wait between these


@dataclass
class Figures:
    """prompts, written: tokens that were asked for, and new ones. turns, turned: turns of the
    engine, and the tokens read and written in them. ended: answers by reason. seconds: that
    answers took from where they began."""

    prompts: int = 0
    written: int = 0
    turns: int = 0
    turned: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Count an answer that is over."""
        self.ended[outcome.reason] += 1
        self.prompts += outcome.prompt_tokens
        if outcome.begun is not None:
            self.seconds += outcome.ended - outcome.begun

    def seconds_for(self, tokens: int, slots: int) -> float:
        """About how long so many tokens of prompts will wait, by what was seen so far."""
        each = self.seconds / max(1, self.prompts) / slots
        return min(max(SECONDS[0], tokens * each), SECONDS[1])
