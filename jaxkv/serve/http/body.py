"""Read the body of a request within limits, and parse it as strict JSON in a thread.

Python's JSON parser lets no other thread run until it ends. Meanwhile every stream waits: half a
second for a list of four million numbers. So members, lists and objects are counted before parsing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar
from weakref import WeakValueDictionary

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from jaxkv.serve.http.errors import APIError, shown

T = TypeVar("T")
SHORT = 2**16  # bytes: tokenizing so many takes less than a tenth of a second
MEMBERS = 2**18  # commas, colons and opening brackets: parsed in less than a tenth of a second
# Pieces of a body, matched in less than a millisecond each, outside and inside of texts.
OUTSIDE = re.compile(rb'[^"]{1,65536}+|"')
INSIDE = re.compile(rb'(?:[^"\\]|\\.){1,65536}+|"', re.DOTALL)
STRUCTURE = (b",", b":", b"[", b"{")


class BodyReader:
    """Reads the bodies of requests. Bodies that are still coming are counted apart from answers.

    max_bodies: bodies at a time. When another comes, the API key with the most loses its oldest
    one, so clients that send no body cannot lock others out. max_bytes: of one, whatever its header
    claims. seconds: limit for the whole body.
    """

    def __init__(self, max_bodies: int, max_bytes: int, seconds: float) -> None:
        self._max_bodies, self._max_bytes, self._seconds = max_bodies, max_bytes, seconds
        self._coming: defaultdict[bytes, dict[asyncio.Timeout, None]] = defaultdict(dict)

    async def read(self, owner: bytes, scope: Scope, receive: Receive) -> bytes:
        """Read the whole body. owner: identifies the API key.

        Raises APIError for a body that is too large, too slow, compressed or not declared as JSON,
        and ClientDisconnect if the client disconnects.
        """
        _check_headers(Headers(scope=scope), self._max_bytes)
        try:
            async with asyncio.timeout(self._seconds) as deadline:
                last = deadline.when()
                with self._counted(owner, deadline):
                    return await _collect(receive, self._max_bytes)
        except TimeoutError:
            if deadline.when() == last:
                message = f"the body must come within {self._seconds:g} s; send it again, faster"
                error = APIError(408, message)
            else:
                message = f"more than {self._max_bodies} bodies are coming, and this one was the "
                message += "oldest; send it again"
                error = APIError(503, message, "too_many_bodies", retry=1.0)
            error.headers["connection"] = "close"
            raise error from None

    @contextlib.contextmanager
    def _counted(self, owner: bytes, deadline: asyncio.Timeout) -> Iterator[None]:
        if sum(map(len, self._coming.values())) >= self._max_bodies:
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
        raise APIError(415, f"content-type must be application/json, got {shown(kind)}; set it")
    packed = headers.get("content-encoding", "identity").strip().lower()
    if packed != "identity":
        raise APIError(415, f"a body must not be compressed, got {shown(packed)}; send it as it is")
    if int(headers.get("content-length", 0)) > max_bytes:
        raise _too_large(max_bytes)


async def _collect(receive: Receive, max_bytes: int) -> bytes:
    parts = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts += message.get("body", b"")
        if len(parts) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(parts)


def _too_large(max_bytes: int) -> APIError:
    message = f"a body may have at most {max_bytes} bytes; send fewer or shorter prompts"
    return APIError(413, message)


class ParserThreads:
    """Two threads that parse and tokenize: one for bodies up to SHORT, one for longer ones.

    Two, because each may use a hundred times the memory of its body. An API key has at most one
    body in the queue of a thread. So keys take turns, and one with many bodies does not delay
    others.
    """

    def __init__(self) -> None:
        self._threads = [ThreadPoolExecutor(1, f"jaxkv-parse-{kind}") for kind in ("short", "long")]
        self._turns: WeakValueDictionary[tuple[bool, bytes], asyncio.Lock] = WeakValueDictionary()

    async def run(self, owner: bytes, size: int, parse: Callable[..., T], *arguments: object) -> T:
        """`parse(*arguments)` in a thread. owner: identifies the API key. size: of the body."""
        is_long = size > SHORT
        turn = self._turns.setdefault((is_long, owner), asyncio.Lock())
        async with turn:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads[is_long], parse, *arguments)


def parse(raw: bytes) -> dict[str, Any]:
    """Parse the JSON object in a body.

    Raises APIError for anything else, and for duplicate names, NaN and numbers of thousands of
    digits.
    """
    check_structure(raw)
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        message = f"the body must be UTF-8, byte {error.start} is not; encode it so"
        raise APIError(400, message) from None
    except RecursionError:
        raise APIError(400, "the body is nested too deeply; a request needs five levels") from None
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        message = f"the body must be JSON: {reason} at character {error.pos}; correct it"
        raise APIError(400, message) from None
    except ValueError:  # from int(), for thousands of digits
        raise APIError(400, "a number in the body has too many digits; give fewer") from None
    if not isinstance(value, dict):
        raise APIError(400, f"the body must be a JSON object, got {shown(value)}; send {{...}}")
    return value


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        message = f"{shown(twice)} is given twice; remove the duplicate"
        raise APIError(400, message, param=twice[:60])
    return members


def _refuse_constant(constant: str) -> NoReturn:
    raise APIError(400, f"the body must be JSON, which has no {constant}; give a number")


def check_structure(raw: bytes, place: str | None = None) -> None:
    """Raise APIError for JSON with more than MEMBERS outside of texts.

    place: of a text that is JSON; None for the body.
    """
    if sum(map(raw.count, STRUCTURE)) <= MEMBERS:
        return
    members = position = 0
    inside = False  # a text
    while members <= MEMBERS and (match := (INSIDE if inside else OUTSIDE).match(raw, position)):
        piece, position = match[0], match.end()
        inside ^= piece == b'"'
        members += 0 if inside else sum(map(piece.count, STRUCTURE))
    if members > MEMBERS:
        message = f"{place or 'a body'} may have {MEMBERS} members of lists and objects, got more"
        raise APIError(400, f"{message}; send several requests", param=place)
