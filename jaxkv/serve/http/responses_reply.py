"""The reply of the Responses API, whole or as a stream of its events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxkv.serve.http.completions import Reply, encoded
from jaxkv.serve.http.errors import APIError
from jaxkv.serve.http.responses import Delta, Event, Finish, Json
from jaxkv.serve.http.responses_api import ResponseItems


@dataclass(frozen=True)
class ResponsesReply(Reply):
    """The reply to one request of the Responses API, which has one answer."""

    last = b""  # its streams end with the response, and not with a mark

    def error(self, error: APIError) -> bytes:
        """The event of an error in a stream."""
        fields = {"code": error.code, "message": str(error), "param": error.param}
        return server_event(self.items.event("error", **fields))

    @cached_property
    def items(self) -> ResponseItems:
        """The output so far."""
        return ResponseItems(self.id, self.model.language.name, self.request.settings)

    def _content(self, events: Sequence[Sequence[Delta | Finish]]) -> bytes:
        (answer,), (divider,) = events, self._dividers()
        for event in answer:
            self.items.add(divider.push(event))
        counts = self._usage(answer[-1:], divider.thought_tokens)
        return encoded(self.items.end(answer[-1].reason, counts)[-1]["response"])

    async def _send_events(self, first: Event | None) -> None:
        (divider,) = self._dividers()
        await self._send(self.items.begin())
        event = await self._next() if first is None else self.checked(first)
        await self._send(self.items.add(divider.push(event)))
        while not isinstance(event, Finish):
            event = await self._next()
            await self._send(self.items.add(divider.push(event)))
        counts = self._usage([event], divider.thought_tokens)
        await self._send(self.items.end(event.reason, counts))

    async def _send(self, events: Sequence[Json]) -> None:
        if events:
            await self.writer.write(b"".join(map(server_event, events)))

    def _usage(self, finishes: Sequence[Finish], thought_tokens: int = 0) -> Json:
        usage = super()._usage(finishes)
        details = usage.get("prompt_tokens_details", {"cached_tokens": 0})
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": details | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thought_tokens},
            "total_tokens": usage["total_tokens"],
        }


def server_event(event: Json) -> bytes:
    """A server-sent event with its type as its name."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encoded(event))
