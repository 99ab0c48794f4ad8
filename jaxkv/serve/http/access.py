"""Who may use a server: API keys, the salts that give each its own prefix cache, and host names.

A web page of any site can send requests to the user's machine. With DNS rebinding it may even read
the answers: the name of its site then resolves to 127.0.0.1. The Host header still has that name.
So a server without API keys serves only its own host names and their web pages.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NoReturn
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxkv.errors import UserError
from jaxkv.serve.http.errors import APIError, ErrorResponse, shown

OPEN = {"/health"}  # for liveness probes, which have no key
METRICS = "/metrics"
SCHEME = "Bearer "
NAME, UNNAMED = re.compile(r"[A-Za-z0-9._-]{1,64}"), "unnamed"
SETTING = re.compile(r"([a-z_]+)=[^=]+")  # no salt in base64, which may end with =
OPTION, COUNT = re.compile(r"(name|requests|tokens)=(.*)"), re.compile(r"[1-9][0-9]{0,8}")
LOCAL = {"localhost", "127.0.0.1", "::1"}
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^][:/@?#\s]+)(?::\d*)?")


@dataclass(frozen=True)
class Tenant:
    """The owner of an API key. digest: hash of the key. scope: of its prefix cache; None for all.

    name: label in the log and the metrics, where the key must not be; empty without keys. limits:
    requests and tokens a minute; a noun that is absent has none.
    """

    digest: bytes = b""
    scope: str | None = None
    name: str = ""
    limits: Mapping[str, int] = field(default_factory=dict, hash=False)

    def salt(self, salt: str | None) -> str | None:
        """The engine's salt for a request with this salt or None.

        It includes the tenant's scope, so naming another tenant's salt gives no access.
        """
        return salt if self.scope is None else json.dumps([self.scope, salt])


ANYONE = Tenant()


def parse_api_keys(content: str, where: str, salts: bool = True) -> tuple[Tenant, ...]:
    """Parse lines of KEY, perhaps a SALT, and perhaps name=NAME, requests=N and tokens=N.

    Keys with equal salts share prefixes; others share none. Usage is counted by name. N: a minute.
    A word that begins with # begins a comment. where: the name of the file in errors, which never
    quote a key.
    salts: False accepts keys only. Raises UserError for a bad line and for no keys.
    """
    tenants: dict[bytes, Tenant] = {}
    for number, line in enumerate(content.splitlines(), 1):
        words = list(takewhile(lambda word: not word.startswith("#"), line.split()))
        if not words:
            continue
        options = _options(words, f"{where}, line {number}") if salts else {}
        if salts and (match := next(filter(None, map(SETTING.fullmatch, words[1:])), None)):
            rule = "a setting must be name, requests or tokens, all after the salt"
            raise UserError(f"{where}, line {number}: {rule}, got {match[1]}=; correct the line")
        if len(words) > 1 + salts or not words[0].isascii():
            rule = "an ASCII key, perhaps a salt, name=NAME, requests=N and tokens=N"
            rule = rule if salts else "one ASCII key"
            got = f"{len(words)} words" if len(words) > 1 + salts else "another character"
            raise UserError(f"{where}, line {number}: must be {rule}, got {got}; correct the line")
        digest = hashlib.sha256(words[0].encode()).digest()
        if digest in tenants:
            raise UserError(f"{where}, line {number}: the key is a duplicate; remove it")
        scope = f"salt {words[1]}" if len(words) == 2 else f"key {digest.hex()}"
        name = options.pop("name", UNNAMED)
        tenants[digest] = Tenant(digest, scope, name, {k: int(v) for k, v in options.items()})
    for tenant in tenants.values():
        if hashlib.sha256(tenant.name.encode()).digest() in tenants:
            raise UserError(f"{where}: a name must not be a key, because the log shows it; rename")
    if not tenants:
        raise UserError(f"{where}: must have at least one key, got none; write one per line")
    return tuple(tenants.values())


def _options(words: list[str], where: str) -> dict[str, str]:
    """The options at the end of a line, which are removed from its words."""
    options: dict[str, str] = {}
    while len(words) > 1 and (match := OPTION.fullmatch(words[-1])):
        words.pop()
        name, value = match.groups()
        rule = "1 to 64 letters, digits, dots, dashes and underscores"
        valid = NAME.fullmatch(value)
        if name != "name":
            rule = "a whole number from 1 to 999999999"
            valid = COUNT.fullmatch(value)
        if name in options or not valid:
            got = "" if name == "name" else f", got {shown(value)}"  # a name may be a key
            problem = "be given once" if name in options else f"be {rule}{got}"
            raise UserError(f"{where}: {name}= must {problem}; correct the line")
        options[name] = value
    return options


class ApiKeys:
    """The accepted API keys. They may be replaced while the server runs.

    A key that stays keeps its prefixes, because the salts of requests depend on the key alone.
    tenants: the owners of keys; without any, no key is needed. admins: the owners of keys for
    `/metrics`, which shows every owner's prefix hits.
    """

    def __init__(self, tenants: Sequence[Tenant] = (), admins: Sequence[Tenant] = ()) -> None:
        self.tenants, self.admins = tuple(tenants), tuple(admins)

    def find(self, authorization: str) -> Tenant:
        """The tenant of this header's key. Raises APIError."""
        if not self.tenants:
            return ANYONE
        digest = _digest(authorization)
        return _find(self.tenants, digest) or _refuse("this API key is unknown; check it")

    def check_admin(self, authorization: str) -> None:
        """Raise APIError unless this header has an admin key. Without API keys none is needed."""
        if not self.tenants:
            return
        digest = _digest(authorization)
        if _find(self.admins, digest):
            return
        if _find(self.tenants, digest):
            message = "needs an admin key, because it shows the prefix hits of every API key"
            raise APIError(403, f"{METRICS} {message}; see --admin-key-file", "admin_key_required")
        _refuse("this admin key is unknown; check it")


def _digest(authorization: str) -> bytes:
    """The digest of a header's key. Raises APIError if there is none."""
    key = authorization[len(SCHEME) :].strip()
    if authorization[: len(SCHEME)].lower() != SCHEME.lower() or not key:
        _refuse("an API key is required; send the header Authorization: Bearer KEY")
    return hashlib.sha256(key.encode()).digest()


def _find(tenants: Sequence[Tenant], digest: bytes) -> Tenant | None:
    """The tenant with this digest, compared in constant time."""
    matches = [tenant for tenant in tenants if hmac.compare_digest(tenant.digest, digest)]
    return matches[0] if matches else None


def _refuse(message: str) -> NoReturn:
    error = APIError(401, message, "invalid_api_key")
    error.headers["www-authenticate"] = "Bearer"
    raise error


class CheckMiddleware:
    """Middleware: answers with the APIError that `check` raises, without reading the body."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], None]) -> None:
        self._app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except APIError as error:
                await ErrorResponse(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def check_key(keys: ApiKeys, scope: Scope) -> None:
    """Put the tenant into `state`. Raises APIError for an unknown key."""
    if scope["path"] not in {*OPEN, METRICS}:  # METRICS needs an admin key
        authorization = Headers(scope=scope).get("authorization", "")
        scope["state"]["tenant"] = keys.find(authorization)


def check_host(keys: ApiKeys, host: str, origins: Collection[str], scope: Scope) -> None:
    """Raise APIError for another Host, or another Origin than that host.

    host: the configured name. origins: web pages of other sites that may use the server; `*` is
    all. With API keys nothing is refused, because no other site knows a key.
    """
    if scope["path"] in OPEN or keys.tenants:
        return
    headers = Headers(scope=scope)
    sent = headers.get("host", "")
    # DNS rebinding needs a name, so the address of this connection is safe.
    local = (scope.get("server") or ("localhost",))[0].removeprefix("::ffff:").partition("%")[0]
    if hostname(sent) not in LOCAL | {host.lower(), local}:
        message = "a server without API keys answers requests to localhost or its --host, got Host "
        message += f"{shown(sent)}; start it with --api-key-file"
        raise APIError(421, message, "unknown_host")
    origin = headers.get("origin")
    if origin is None or not {origin, "*"}.isdisjoint(origins):
        return
    if not is_origin(origin.lower()) or urlsplit(origin).netloc.lower() != sent.lower():
        message = f"web pages of {shown(origin)} may not use this server; add it to "
        raise APIError(403, f"{message}--allowed-origins", "unknown_origin")


def hostname(host: str) -> str:
    """The name in a Host header, without the port and the brackets; empty if it is invalid."""
    match = HOST.fullmatch(host.lower())
    return match[1].strip("[]") if match else ""


def is_origin(text: str) -> bool:
    """Whether a text is what a browser sends as Origin: a scheme, a host and perhaps a port."""
    try:
        parts = urlsplit(text)
        return text == f"{parts.scheme}://{parts.netloc}".lower() and bool(hostname(parts.netloc))
    except ValueError:
        return False


class ConcurrencyLimit:
    """Limits the answers at a time: `max_total` of all clients, `max_per_key` per API key."""

    def __init__(self, max_total: int, max_per_key: int | None) -> None:
        self._max_total, self._max_per_key = max_total, max_per_key
        self._inside: Counter[bytes] = Counter()

    def check(self, tenant: Tenant, count: int = 1) -> None:
        """Raise APIError if `count` more answers are too many."""
        inside, limit = self._inside, math.inf if self._max_per_key is None else self._max_per_key
        if inside[tenant.digest] + count > limit:
            message = f"a key may have {self._max_per_key} answers at a time; wait until one ends"
            raise APIError(429, message, "rate_limit_exceeded", retry=1.0)
        if inside.total() + count > self._max_total:
            message = f"at most {self._max_total} answers at a time; try again soon"
            raise APIError(503, message, "too_many_answers", retry=1.0)

    @contextlib.contextmanager
    def enter(self, tenant: Tenant, count: int = 1) -> Iterator[None]:
        """Count `count` more answers inside the context. Raises APIError if that is too many."""
        self.check(tenant, count)
        self._inside[tenant.digest] += count
        try:
            yield
        finally:
            self._inside[tenant.digest] -= count
