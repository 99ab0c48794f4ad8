"""API keys, and the salts that give each its own prefix cache."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxkv.errors import UserError
from jaxkv.server.faults import Fault

OPEN = {"/health"}  # for liveness probes, which have no key
SCHEME = "Bearer "


@dataclass(frozen=True)
class Tenant:
    """The owner of an API key. digest: of the key. scope: of its prefix cache; None for all."""

    digest: bytes = b""
    scope: str | None = None

    def salt(self, own: str | None) -> str | None:
        """The engine's salt for a request with salt `own` or None.

        It includes the tenant's scope, so naming another tenant's salt gives no access.
        """
        return own if self.scope is None else json.dumps([self.scope, own])


ANYONE = Tenant()


def parse_api_keys(content: str, where: str) -> tuple[Tenant, ...]:
    """Parse lines of KEY or KEY SALT. Keys with equal salts share prefixes; others share none.

    A word that begins with # begins a comment. where: the file's name in errors, which never quote
    a key. Raises UserError for a bad line and for no keys.
    """
    tenants: dict[bytes, Tenant] = {}
    for number, line in enumerate(content.splitlines(), 1):
        words = list(takewhile(lambda word: not word.startswith("#"), line.split()))
        if not words:
            continue
        if len(words) > 2 or not words[0].isascii():
            raise UserError(
                f"{where}, line {number}: must be an ASCII key and at most one salt, got "
                f"{len(words)} words; correct the line"
            )
        digest = hashlib.sha256(words[0].encode()).digest()
        if digest in tenants:
            raise UserError(f"{where}, line {number}: the key is a duplicate; remove it")
        scope = f"salt {words[1]}" if len(words) == 2 else f"key {digest.hex()}"
        tenants[digest] = Tenant(digest, scope)
    if not tenants:
        raise UserError(f"{where}: must have at least one key, got none; write one per line")
    return tuple(tenants.values())


def find(tenants: Sequence[Tenant], authorization: str) -> Tenant:
    """The tenant of this header's key, compared in constant time. Raises Fault."""
    if not tenants:
        return ANYONE
    given = authorization[len(SCHEME) :].strip()
    if authorization[: len(SCHEME)].lower() != SCHEME.lower() or not given:
        fault = Fault(401, "an API key is required; send the header Authorization: Bearer KEY",
                      "invalid_api_key")  # fmt: skip
    else:
        digest = hashlib.sha256(given.encode()).digest()
        found = [one for one in tenants if hmac.compare_digest(one.digest, digest)]
        if found:
            return found[0]
        fault = Fault(401, "this API key is unknown; check it", "invalid_api_key")
    fault.headers["www-authenticate"] = "Bearer"
    raise fault


class APIKeyMiddleware:
    """Middleware: puts the tenant into `state`, or answers 401 without reading the body."""

    def __init__(self, app: ASGIApp, tenants: Sequence[Tenant]) -> None:
        self._app, self._tenants = app, tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            try:
                given = Headers(scope=scope).get("authorization", "")
                scope["state"]["tenant"] = find(self._tenants, given)
            except Fault as fault:
                await fault.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class ConcurrencyLimit:
    """Limits the answers at a time: `most` in total, `each` per API key."""

    def __init__(self, most: int, each: int | None) -> None:
        self._most, self._each = most, each
        self._inside: Counter[bytes] = Counter()

    def check(self, tenant: Tenant, count: int = 1) -> None:
        """Raise Fault if `count` more answers are too many."""
        inside, each = self._inside, math.inf if self._each is None else self._each
        if inside[tenant.digest] + count > each:
            message = f"a key may have {self._each} answers at a time; wait until one ends"
            raise Fault(429, message, "rate_limit_exceeded", retry=1.0)
        if inside.total() + count > self._most:
            raise Fault(503, f"at most {self._most} answers at a time; try again soon", retry=1.0)

    @contextlib.contextmanager
    def enter(self, tenant: Tenant, count: int = 1) -> Iterator[None]:
        """Count `count` more answers inside the context. Raises Fault if that is too many."""
        self.check(tenant, count)
        self._inside[tenant.digest] += count
        try:
            yield
        finally:
            self._inside[tenant.digest] -= count
