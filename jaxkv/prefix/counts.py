"""What was looked up in an index, what was found, and why the rest was not."""

from __future__ import annotations

from dataclasses import dataclass, field

# Why a token of a prompt was missed. A token has one reason; of two that apply the later one.
REASONS = (
    "cold",  # nothing like it was seen, or its key is longer by now
    "tail",  # it is in no full block or chunk, and nothing less is kept
    "no_snapshot",  # its prefix was seen, and no state of it was kept
    "evicted",  # it was there
    "collision",  # another prefix has the same key
    "last_token",  # it is there, but something must be computed to go on from
)


@dataclass(slots=True)
class Lookups:
    """How much was asked for and how much of it was there.

    blocks: all that a prompt touches, full_blocks: those it fills. missed: tokens by reason, which
    with tokens_hit add up to tokens.
    """

    tokens: int = 0
    tokens_hit: int = 0
    blocks: int = 0
    blocks_hit: int = 0
    full_blocks: int = 0
    full_blocks_hit: int = 0
    requests: int = 0
    requests_hit: int = 0
    missed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))

    def add(self, tokens: int, hit: int, block: int, missed: dict[str, int]) -> None:
        """One prompt of so many tokens, of which the first `hit` were there."""
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
    """The figures of an index since it was made.

    first: the lookup with which a request was admitted, once a request. resumed: of requests that
    were admitted before, which find what they wrote themselves. evictions: blocks or snapshots
    that were lost. duplicates: blocks that two requests computed at once. demotions, promotions:
    of them those that went to the host, and that came back.
    """

    first: Lookups = field(default_factory=Lookups)
    resumed: Lookups = field(default_factory=Lookups)
    evictions: int = 0
    duplicates: int = 0
    demotions: int = 0
    promotions: int = 0
