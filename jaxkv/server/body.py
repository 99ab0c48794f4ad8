"""Read the body of a request within limits, and parse it as strict JSON."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from jaxkv.server.faults import Fault, shown


class Gone(Exception):
    """The client has disconnected."""


async def read(scope: Scope, receive: Receive, most: int, seconds: float) -> bytes:
    """Read the whole body.

    most: bytes, whatever the header claims. seconds: for the whole body.
    Raises Fault for a body that is too large, too slow, compressed or not declared as JSON, and
    Gone if the client disconnects.
    """
    headers = Headers(scope=scope)
    # A browser asks for permission before it sends JSON to another site, and gets none here. So a
    # web page cannot use a server on the user's machine. DNS rebinding still can: API keys prevent
    # that.
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Fault(415, f"content-type must be application/json, got {shown(kind)}; set it")
    packed = headers.get("content-encoding", "identity").strip().lower()
    if packed != "identity":
        raise Fault(415, f"a body must not be compressed, got {shown(packed)}; send it as it is")
    if int(headers.get("content-length", 0)) > most:
        raise _too_large(most)
    try:
        async with asyncio.timeout(seconds):
            return await _collect(receive, most)
    except TimeoutError:
        fault = Fault(408, f"the body must come within {seconds:g} s; send it again, faster")
        fault.headers["connection"] = "close"
        raise fault from None


async def _collect(receive: Receive, most: int) -> bytes:
    parts = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        parts += message.get("body", b"")
        if len(parts) > most:
            raise _too_large(most)
        if not message.get("more_body", False):
            return bytes(parts)


def _too_large(most: int) -> Fault:
    return Fault(413, f"a body may have at most {most} bytes; send fewer or shorter prompts")


def parse(raw: bytes) -> dict[str, Any]:
    """Parse the JSON object in a body.

    Raises Fault for anything else, and for duplicate names, NaN and numbers of thousands of digits.
    """
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_object, parse_constant=_refuse)
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
    made = dict(pairs)
    if len(made) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise Fault(400, f"{shown(twice)} is given twice; give it once", param=twice[:60])
    return made


def _refuse(constant: str) -> Any:
    raise Fault(400, f"the body must be JSON, which has no {constant}; give a number")
