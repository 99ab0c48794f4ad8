"""The reply of the Responses API, whole or as a stream of its events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxkv.serve.http.completions import Reply, checked, encoded
from jaxkv.serve.http.errors import APIError
from jaxkv.serve.http.responses import Delta, Event, Finish, Json
from jaxkv.serve.http.responses_api import ResponseItems


@dataclass(frozen=True)
class ResponsesReply(Reply):
    """The reply to one request of the Responses API, which has one answer."""

    last = b""  # its streams end with the response, and not with a mark

    def error(self, error: APIError) -> bytes:
        """The event of an error in a stream."""
        event = {"type": "error", "sequence_number": 0, "code": error.code}
        return server_event(event | {"message": str(error), "param": error.param})

    def _content(self, events: Sequence[Sequence[Delta | Finish]]) -> bytes:
        (answer,) = events
        items = self._items()
        text, cut = "".join(event.text for event in answer), answer[-1].reason == "length"
        items.add(self.request.parser().push(text, True, cut))
        return encoded(items.end(answer[-1].reason, self._usage(answer[-1:]))[-1]["response"])

    async def _send_events(self, first: Event | None) -> None:
        items, parser = self._items(), self.request.parser()
        await self._send(items.begin())
        event = await self._next() if first is None else checked(first)
        while True:
            last = isinstance(event, Finish)
            cut = last and event.reason == "length"
            await self._send(items.add(parser.push(event.text, last, cut)))
            if last:
                break
            event = await self._next()
        await self._send(items.end(event.reason, self._usage([event])))

    def _items(self) -> ResponseItems:
        return ResponseItems(self.id, self.model.language.name, self.request.settings)

    async def _send(self, events: Sequence[Json]) -> None:
        if events:
            await self.writer.write(b"".join(map(server_event, events)))

    def _usage(self, finishes: Sequence[Finish]) -> Json:
        usage = super()._usage(finishes)
        details = usage.get("prompt_tokens_details", {"cached_tokens": 0})
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": details | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }


def server_event(event: Json) -> bytes:
    """A server-sent event with its type as its name."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encoded(event))
