"""Read the body of a request within limits, and parse it as strict JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from jaxkv.serve.http.body_parsers import SHORT
from jaxkv.serve.http.faults import Fault, shown
from jaxkv.serve.http.long_json import lift_ids


class Gone(Exception):
    """The client has disconnected."""


class Bodies:
    """Reads the bodies of requests. Bodies that are still coming are counted apart from answers.

    count: bodies at a time. When another comes, the API key with the most loses its oldest one, so
    clients that send no body cannot lock others out. size: bytes of one, whatever its header
    claims. seconds: limit for the whole body.
    """

    def __init__(self, count: int, size: int, seconds: float) -> None:
        self._count, self._size, self._seconds = count, size, seconds
        self._coming: defaultdict[bytes, dict[asyncio.Timeout, None]] = defaultdict(dict)

    async def read(self, owner: bytes, scope: Scope, receive: Receive) -> bytes:
        """Read the whole body. owner: identifies the API key.

        Raises Fault for a body that is too large, too slow, compressed or not declared as JSON, and
        Gone if the client disconnects.
        """
        _check_headers(Headers(scope=scope), self._size)
        try:
            async with asyncio.timeout(self._seconds) as deadline:
                last = deadline.when()
                with self._counted(owner, deadline):
                    return await _collect(receive, self._size)
        except TimeoutError:
            if deadline.when() == last:
                message = f"the body must come within {self._seconds:g} s; send it again, faster"
                fault = Fault(408, message)
            else:
                message = f"more than {self._count} bodies are coming, and this one was the oldest"
                fault = Fault(503, f"{message}; send it again", "too_many_bodies", retry=1.0)
            fault.headers["connection"] = "close"
            raise fault from None

    @contextlib.contextmanager
    def _counted(self, owner: bytes, deadline: asyncio.Timeout) -> Iterator[None]:
        if sum(map(len, self._coming.values())) >= self._count:
            largest = max(self._coming.values(), key=len)
            oldest = next(iter(largest))
            del largest[oldest]
            if not oldest.expired():
                oldest.reschedule(0.0)
        deadlines = self._coming[owner]
        deadlines[deadline] = None
        try:
            yield
        finally:
            deadlines.pop(deadline, None)
            if not deadlines and self._coming.get(owner) is deadlines:
                del self._coming[owner]


def _check_headers(headers: Headers, max_bytes: int) -> None:
    # A browser asks for permission before it sends JSON to another site, which only
    # --allowed-origins gives.
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Fault(415, f"content-type must be application/json, got {shown(kind)}; set it")
    packed = headers.get("content-encoding", "identity").strip().lower()
    if packed != "identity":
        raise Fault(415, f"a body must not be compressed, got {shown(packed)}; send it as it is")
    if int(headers.get("content-length", 0)) > max_bytes:
        raise _too_large(max_bytes)


async def _collect(receive: Receive, max_bytes: int) -> bytes:
    parts = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        parts += message.get("body", b"")
        if len(parts) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(parts)


def _too_large(max_bytes: int) -> Fault:
    return Fault(413, f"a body may have at most {max_bytes} bytes; send fewer or shorter prompts")


def parse(raw: bytes) -> dict[str, Any]:
    """Parse the JSON object in a body.

    Raises Fault for anything else, and for duplicate names, NaN and numbers of thousands of digits.
    """
    lists: list[list[int]] = []
    if len(raw) > SHORT:
        raw, lists = lift_ids(raw)
    constant = partial(_constant, iter(lists))
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_object, parse_constant=constant)
    except UnicodeDecodeError as error:
        raise Fault(400, f"the body must be UTF-8, byte {error.start} is not; encode it so") from (
            None
        )
    except RecursionError:
        raise Fault(400, "the body is nested too deeply; a request needs five levels") from None
    except json.JSONDecodeError as error:
        raise Fault(
            400, f"the body must be JSON: {error.msg} at character {error.pos}; correct it"
        ) from None
    except ValueError:  # from int(), for thousands of digits
        raise Fault(400, "a number in the body has too many digits; give fewer") from None
    if not isinstance(value, dict):
        raise Fault(400, f"the body must be a JSON object, got {shown(value)}; send {{...}}")
    return value


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise Fault(400, f"{shown(twice)} is given twice; remove the duplicate", param=twice[:60])
    return members


def _constant(lists: Iterator[list[int]], constant: str) -> Any:
    """The next list of ids, for which NaN stands; other constants are refused."""
    if constant == "NaN" and (ids := next(lists, None)) is not None:
        return ids
    raise Fault(400, f"the body must be JSON, which has no {constant}; give a number")
