"""Who may ask, and what each may share: API keys, and the salts that keep callers apart."""

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

OPEN = {"/health"}  # asked by what watches over the process, which has no key
SCHEME = "Bearer "


@dataclass(frozen=True)
class Tenant:
    """One who asks. digest: of its key; scope: what it shares prefixes within, None for all."""

    digest: bytes = b""
    scope: str | None = None

    def salt(self, own: str | None) -> str | None:
        """The engine's salt for a request that names one of its own, or none.

        Its own is told apart within the tenant's: naming the salt of another gains nothing.
        """
        return own if self.scope is None else json.dumps([self.scope, own])


ANYONE = Tenant()


def read_keys(content: str, where: str) -> tuple[Tenant, ...]:
    """A key a line, behind it the salt that it shares with others; without one it shares nothing.

    A word that begins with # begins a comment. where: as errors name it; they never quote a key.
    Raises UserError.
    """
    tenants: dict[bytes, Tenant] = {}
    for number, line in enumerate(content.splitlines(), 1):
        words = list(takewhile(lambda word: not word.startswith("#"), line.split()))
        if not words:
            continue
        if len(words) > 2 or not words[0].isascii():
            raise UserError(
                f"{where}, line {number}: must be an ASCII key and at most one salt behind it, got "
                f"{len(words)} words; correct the line"
            )
        digest = hashlib.sha256(words[0].encode()).digest()
        if digest in tenants:
            raise UserError(f"{where}, line {number}: the key is there already; take it out")
        scope = f"salt {words[1]}" if len(words) == 2 else f"key {digest.hex()}"
        tenants[digest] = Tenant(digest, scope)
    if not tenants:
        raise UserError(f"{where}: must hold at least one key, got none; write one a line")
    return tuple(tenants.values())


def find(tenants: Sequence[Tenant], authorization: str) -> Tenant:
    """Whose key this header holds, in a time that tells nothing of the keys. Raises Fault."""
    if not tenants:
        return ANYONE
    given = authorization[len(SCHEME) :].strip()
    if authorization[: len(SCHEME)].lower() != SCHEME.lower() or not given:
        fault = Fault(401, "an API key is needed; send the header Authorization: Bearer KEY",
                      "invalid_api_key")  # fmt: skip
    else:
        digest = hashlib.sha256(given.encode()).digest()
        found = [one for one in tenants if hmac.compare_digest(one.digest, digest)]
        if found:
            return found[0]
        fault = Fault(401, "this API key is not known here; check it", "invalid_api_key")
    fault.headers["www-authenticate"] = "Bearer"
    raise fault


class Guard:
    """Lets a request through with its tenant in `state`, or answers 401 and reads none of it."""

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


class Door:
    """Counts the answers that are in hand: most of all callers, each of one of them."""

    def __init__(self, most: int, each: int | None) -> None:
        self._most, self._each = most, each
        self._inside: Counter[bytes] = Counter()

    @contextlib.contextmanager
    def enter(self, tenant: Tenant, count: int = 1) -> Iterator[None]:
        """Inside, so many answers more. Raises Fault where that is too many."""
        inside, each = self._inside, math.inf if self._each is None else self._each
        if inside[tenant.digest] + count > each:
            message = f"a key may have {self._each} answers at a time; wait for one of them"
            raise Fault(429, message, "rate_limit_exceeded", retry=1.0)
        if inside.total() + count > self._most:
            raise Fault(503, f"{self._most} answers may be in hand; try again soon", retry=1.0)
        inside[tenant.digest] += count
        try:
            yield
        finally:
            inside[tenant.digest] -= count
