"""Limits of requests and tokens a minute, by API key."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxkv.serve.http.access import Tenant
from jaxkv.serve.http.errors import APIError


@dataclass
class Bucket:
    """What an API key may still use. It fills at `per_minute`, up to as much.

    left: at the time `at`; below 0 after a request that took more than was left.
    """

    per_minute: int
    left: float
    at: float

    def fill(self, now: float) -> float:
        """What is left now."""
        gain = (now - self.at) * self.per_minute / 60
        self.left, self.at = min(self.per_minute, self.left + gain), now
        return self.left


@dataclass
class RateLimits:
    """Counts what each API key uses, and refuses what is beyond its limits.

    A request counts when it is accepted, its prompt too; new tokens count at the end of their
    answer. So a key may exceed its tokens by what runs, and waits for longer then.
    clock: seconds.
    """

    clock: Callable[[], float] = time.monotonic
    _buckets: dict[tuple[bytes, str], Bucket] = field(default_factory=dict)

    def check(self, tenant: Tenant) -> None:
        """Raise APIError unless the key may send a request now."""
        for noun in ("requests", "tokens"):
            bucket = self._bucket(tenant, noun)
            if bucket is not None and bucket.fill(self.clock()) < 1:
                message = f"this API key may use {bucket.per_minute} {noun} a minute; wait"
                seconds = (1 - bucket.left) * 60 / bucket.per_minute
                raise APIError(429, message, "rate_limit_exceeded", retry=seconds)

    def use(self, tenant: Tenant, requests: int = 0, tokens: int = 0) -> None:
        """Count requests and tokens."""
        for noun, count in (("requests", requests), ("tokens", tokens)):
            bucket = self._bucket(tenant, noun)
            if bucket is not None:
                bucket.fill(self.clock())
                bucket.left -= count

    def _bucket(self, tenant: Tenant, noun: str) -> Bucket | None:
        """The bucket of a key; None without a limit. A limit that changed begins again."""
        per_minute = tenant.limits.get(noun)
        if per_minute is None:
            return None
        key = tenant.digest, noun
        bucket = self._buckets.get(key)
        if bucket is None or bucket.per_minute != per_minute:
            bucket = self._buckets[key] = Bucket(per_minute, per_minute, self.clock())
        return bucket
