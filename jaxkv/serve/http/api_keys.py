"""API keys, and the salts that give each its own prefix cache."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NoReturn

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxkv.errors import UserError
from jaxkv.serve.http.faults import Fault

OPEN = {"/health"}  # for liveness probes, which have no key
METRICS = "/metrics"
SCHEME = "Bearer "
NAMED, NAME, UNNAMED = "name=", re.compile(r"[A-Za-z0-9._-]{1,64}"), "unnamed"


@dataclass(frozen=True)
class Tenant:
    """The owner of an API key. digest: hash of the key. scope: of its prefix cache; None for all.

    name: label in the log and the metrics, where the key must not be; empty without keys.
    """

    digest: bytes = b""
    scope: str | None = None
    name: str = ""

    def salt(self, salt: str | None) -> str | None:
        """The engine's salt for a request with this salt or None.

        It includes the tenant's scope, so naming another tenant's salt gives no access.
        """
        return salt if self.scope is None else json.dumps([self.scope, salt])


ANYONE = Tenant()


def parse_api_keys(content: str, where: str, salts: bool = True) -> tuple[Tenant, ...]:
    """Parse lines of KEY, perhaps a SALT, and perhaps name=NAME, in this order.

    Keys with equal salts share prefixes; others share none. Usage is counted by name. A word that
    begins with # begins a comment. where: the name of the file in errors, which never quote a key.
    salts: False accepts keys only. Raises UserError for a bad line and for no keys.
    """
    tenants: dict[bytes, Tenant] = {}
    for number, line in enumerate(content.splitlines(), 1):
        words = list(takewhile(lambda word: not word.startswith("#"), line.split()))
        if not words:
            continue
        name = UNNAMED
        if salts and len(words) > 1 and words[-1].startswith(NAMED):
            name = words.pop().removeprefix(NAMED)
            if not NAME.fullmatch(name):
                rule = "1 to 64 letters, digits, dots, dashes and underscores"
                raise UserError(f"{where}, line {number}: a name must be {rule}; correct the line")
        if len(words) > 1 + salts or not words[0].isascii():
            rule = f"an ASCII key, perhaps a salt and {NAMED}NAME" if salts else "one ASCII key"
            got = f"{len(words)} words" if len(words) > 1 + salts else "another character"
            raise UserError(f"{where}, line {number}: must be {rule}, got {got}; correct the line")
        digest = hashlib.sha256(words[0].encode()).digest()
        if digest in tenants:
            raise UserError(f"{where}, line {number}: the key is a duplicate; remove it")
        scope = f"salt {words[1]}" if len(words) == 2 else f"key {digest.hex()}"
        tenants[digest] = Tenant(digest, scope, name)
    for tenant in tenants.values():
        if hashlib.sha256(tenant.name.encode()).digest() in tenants:
            raise UserError(f"{where}: a name must not be a key, because the log shows it; rename")
    if not tenants:
        raise UserError(f"{where}: must have at least one key, got none; write one per line")
    return tuple(tenants.values())


class ApiKeys:
    """The accepted API keys. They may be replaced while the server runs.

    A key that stays keeps its prefixes, because the salts of requests depend on the key alone.
    tenants: the owners of keys; without any, no key is needed. admins: the owners of keys for
    `/metrics`, which shows every owner's prefix hits.
    """

    def __init__(self, tenants: Sequence[Tenant] = (), admins: Sequence[Tenant] = ()) -> None:
        self.tenants, self.admins = tuple(tenants), tuple(admins)

    def find(self, authorization: str) -> Tenant:
        """The tenant of this header's key. Raises Fault."""
        if not self.tenants:
            return ANYONE
        digest = _digest(authorization)
        return _find(self.tenants, digest) or _refuse("this API key is unknown; check it")

    def check_admin(self, authorization: str) -> None:
        """Raise Fault unless this header has an admin key. Without API keys none is needed."""
        if not self.tenants:
            return
        digest = _digest(authorization)
        if _find(self.admins, digest):
            return
        if _find(self.tenants, digest):
            message = "needs an admin key, because it shows the prefix hits of every API key"
            raise Fault(403, f"{METRICS} {message}; see --admin-key-file", "admin_key_required")
        _refuse("this admin key is unknown; check it")


def _digest(authorization: str) -> bytes:
    """The digest of a header's key. Raises Fault if there is none."""
    key = authorization[len(SCHEME) :].strip()
    if authorization[: len(SCHEME)].lower() != SCHEME.lower() or not key:
        _refuse("an API key is required; send the header Authorization: Bearer KEY")
    return hashlib.sha256(key.encode()).digest()


def _find(tenants: Sequence[Tenant], digest: bytes) -> Tenant | None:
    """The tenant with this digest, compared in constant time."""
    matches = [tenant for tenant in tenants if hmac.compare_digest(tenant.digest, digest)]
    return matches[0] if matches else None


def _refuse(message: str) -> NoReturn:
    fault = Fault(401, message, "invalid_api_key")
    fault.headers["www-authenticate"] = "Bearer"
    raise fault


class APIKeyMiddleware:
    """Middleware: puts the tenant into `state`, or answers 401 without reading the body."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The route of METRICS asks for an admin key.
        if scope["type"] == "http" and scope["path"] not in {*OPEN, METRICS}:
            try:
                authorization = Headers(scope=scope).get("authorization", "")
                scope["state"]["tenant"] = self._keys.find(authorization)
            except Fault as fault:
                await fault.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class ConcurrencyLimit:
    """Limits the answers at a time: `max_total` of all clients, `max_per_key` per API key."""

    def __init__(self, max_total: int, max_per_key: int | None) -> None:
        self._max_total, self._max_per_key = max_total, max_per_key
        self._inside: Counter[bytes] = Counter()

    def check(self, tenant: Tenant, count: int = 1) -> None:
        """Raise Fault if `count` more answers are too many."""
        inside, limit = self._inside, math.inf if self._max_per_key is None else self._max_per_key
        if inside[tenant.digest] + count > limit:
            message = f"a key may have {self._max_per_key} answers at a time; wait until one ends"
            raise Fault(429, message, "rate_limit_exceeded", retry=1.0)
        if inside.total() + count > self._max_total:
            message = f"at most {self._max_total} answers at a time; try again soon"
            raise Fault(503, message, "too_many_answers", retry=1.0)

    @contextlib.contextmanager
    def enter(self, tenant: Tenant, count: int = 1) -> Iterator[None]:
        """Count `count` more answers inside the context. Raises Fault if that is too many."""
        self.check(tenant, count)
        self._inside[tenant.digest] += count
        try:
            yield
        finally:
            self._inside[tenant.digest] -= count
