"""Lookup statistics of a prefix index: tokens found, and the reason for each token missed."""

from __future__ import annotations

from dataclasses import dataclass, field

# Why a prompt token was missed. Each token has one reason: the last in this order that applies.
MISS_REASONS = (
    "cold",  # no equal prefix was seen, or its block has grown since
    "tail",  # it belongs to no full block or chunk, and partial ones are not stored
    "no_snapshot",  # its prefix was seen, but no state was stored there
    "evicted",  # it was cached before
    "collision",  # another prefix has the same hash
    "last_token",  # it is cached, but the last token must be computed to get logits
)


@dataclass(slots=True)
class Lookups:
    """Totals over all lookups.

    blocks: all blocks that the prompts touch. full_blocks: the blocks that they fill. missed:
    missed tokens by reason; with tokens_hit they add up to tokens.
    """

    tokens: int = 0
    tokens_hit: int = 0
    blocks: int = 0
    blocks_hit: int = 0
    full_blocks: int = 0
    full_blocks_hit: int = 0
    requests: int = 0
    requests_hit: int = 0
    missed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MISS_REASONS, 0))

    def add(self, tokens: int, hit: int, block: int, missed: dict[str, int]) -> None:
        """Count one prompt of `tokens` tokens, of which the first `hit` were cached."""
        self.tokens += tokens
        self.tokens_hit += hit
        self.blocks += -(-tokens // block)
        self.blocks_hit += -(-hit // block)
        self.full_blocks += tokens // block
        self.full_blocks_hit += hit // block
        self.requests += 1
        self.requests_hit += hit > 0
        for reason, count in missed.items():
            self.missed[reason] += count


@dataclass(slots=True)
class Counts:
    """Statistics of an index since its creation.

    lookups: one lookup for each admitted request. evictions: blocks or snapshots that were lost.
    duplicates: blocks that two requests computed at the same time. demotions, promotions: blocks
    or snapshots moved to the host's memory, and back.
    """

    lookups: Lookups = field(default_factory=Lookups)
    evictions: int = 0
    duplicates: int = 0
    demotions: int = 0
    promotions: int = 0
