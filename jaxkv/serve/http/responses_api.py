"""OpenAI's Responses API without stored state, in terms of the chat route.

`chat_body` translates a request, and a `ResponseItems` makes the items and events of its answer.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxkv.serve.http.checks import (
    check_keys,
    check_known,
    check_members,
    equal,
    invalid,
    long_text,
    mapping,
    one_of,
    valid_unicode,
)
from jaxkv.serve.http.errors import APIError, shown
from jaxkv.serve.http.messages import tool_list
from jaxkv.serve.http.responses import Json
from jaxkv.serve.http.tools import Call, Content, Part, Thought

# Fields that a chat has too, with the same meaning.
SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "metadata", "user",
        "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "seed",
        "top_k", "min_p", "repetition_penalty", "cache_salt", "chat_template_kwargs",
        "logit_bias", "stop_token_ids", "ignore_eos", "min_tokens")  # fmt: skip
# Fields of responses that are stored or made by a provider, with the values without effect.
NOTHING: dict[str, tuple[Any, ...]] = {
    "store": (False,), "background": (False,), "truncation": ("disabled",), "top_logprobs": (0,),
    "previous_response_id": (), "conversation": (), "prompt": (), "max_tool_calls": (),
    "moderation": (), "image": (), "context_management": (), "access_programs": (),
    "background_options": (), "prompt_cache_options": (),
}  # fmt: skip
TRANSLATED = ("input", "instructions", "max_output_tokens", "text", "tools", "tool_choice",
              "reasoning", "include", "stream_options")  # fmt: skip
STATELESS = ("previous_response_id", "conversation", "store", "background")
INCLUDED = ("reasoning.encrypted_content",)  # of which these models have nothing

# The members of each item of an input; `phase` and a summary change no answer.
ITEMS = {
    "message": {"type", "id", "status", "role", "content", "phase"},
    "function_call": {"type", "id", "status", "call_id", "name", "arguments"},
    "function_call_output": {"type", "id", "status", "call_id", "output"},
    "reasoning": {"type", "id", "status", "summary", "content"},
}


class MessagePlace(NamedTuple):
    """Where a message of the chat comes from: a name in the request, and names of its calls."""

    name: str
    calls: list[str]


def chat_body(body: Mapping[str, Any]) -> tuple[Json, list[MessagePlace]]:
    """The body of a chat that asks for the same, and where each of its messages comes from.

    Raises APIError for what is not supported.
    """
    check_known(body, {*SAME, *NOTHING, *TRANSLATED})
    for name, value in body.items():
        accepted = NOTHING.get(name)
        if accepted is None or value is None:
            continue
        if not any(equal(value, known) for known in accepted):
            remedy = "leave it out"
            if name in STATELESS:
                remedy = "this server stores no responses; send the whole conversation as input"
            raise APIError(
                400, f"{name} is not supported, got {shown(value)}; {remedy}", param=name
            )
    chat = {name: body[name] for name in SAME if body.get(name) is not None}
    chat["messages"], places = _messages(body)
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    for item in _listed("include", body.get("include")):
        if item not in INCLUDED:
            raise invalid("include", f"a list of {', '.join(INCLUDED)}", item)
    reasoning = _mapped("reasoning", body.get("reasoning"))
    check_keys("reasoning", reasoning, {"effort", "summary", "generate_summary"})
    for name in ("summary", "generate_summary"):  # thoughts are sent as they are
        if reasoning.get(name) is not None:
            one_of("auto", "concise", "detailed")(f"reasoning.{name}", reasoning[name])
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    tools = tool_list("tools", _listed("tools", body.get("tools")))
    if tools:
        chat["tools"] = [_tool(f"tools[{n}]", tool) for n, tool in enumerate(tools)]
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = _tool_choice(body["tool_choice"])
    options = _mapped("text", body.get("text"))
    check_keys("text", options, {"format", "verbosity"})
    if options.get("verbosity") is not None:
        one_of("low", "medium", "high")("text.verbosity", options["verbosity"])
    stream = _mapped("stream_options", body.get("stream_options"))
    check_keys("stream_options", stream, {"include_obfuscation"})
    if stream.get("include_obfuscation") is not None and stream["include_obfuscation"] is not False:
        raise invalid("stream_options.include_obfuscation", "false", stream["include_obfuscation"])
    _check_metadata(_mapped("metadata", body.get("metadata")))
    if options.get("format") is not None:
        chat["response_format"] = _format(options["format"])
    return chat, places


def _listed(name: str, value: Any) -> list[Any]:
    if value is not None and type(value) is not list:
        raise invalid(name, "a list", value)
    return value or []


def _mapped(name: str, value: Any) -> Json:
    return {} if value is None else mapping(name, value)


def _check_metadata(metadata: Json) -> None:
    """Raise APIError beyond the sizes of OpenAI's API: a response repeats its metadata."""
    rule = "at most 16 texts of 512 characters, with names of at most 64"
    if len(metadata) > 16:
        raise invalid("metadata", rule, metadata)
    for name, value in metadata.items():
        if type(value) is not str or len(value) > 512 or len(name) > 64:
            raise invalid("metadata", rule, value)
        valid_unicode("metadata", name + value)


def _format(value: Any) -> Any:
    if type(value) is not dict or value.get("type") != "json_schema":
        return value
    if type(value.get("schema")) is not dict:
        raise invalid("text.format", "an object with a schema", value)
    return _nested(value)


def _nested(value: Json) -> Json:
    """An object in the form of a chat, which has its members in one that is named by its type."""
    return {
        "type": value["type"],
        value["type"]: {name: member for name, member in value.items() if name != "type"},
    }


def _tool(name: str, value: Any) -> Json:
    if type(value) is not dict or value.get("type") != "function":
        raise invalid(name, "an object of type function, the only tools of this server", value)
    return _nested(value)


def _tool_choice(value: Any) -> Any:
    if type(value) is not dict or value.get("type") != "allowed_tools":
        return _chosen(value)
    if type(value.get("tools")) is list:
        value = value | {"tools": [*map(_chosen, value["tools"])]}
    return _nested(value)


def _chosen(value: Any) -> Any:
    """The choice of a tool in the form of a chat."""
    return _nested(value) if type(value) is dict and value.get("type") == "function" else value


def _messages(body: Mapping[str, Any]) -> tuple[list[Json], list[MessagePlace]]:
    """The messages of a chat, instructions and the items of the input, and their places."""
    messages: list[Json] = []
    places: list[MessagePlace] = []
    if body.get("instructions") is not None:
        instructions = long_text("instructions", body["instructions"])
        messages.append({"role": "system", "content": instructions})
        places.append(MessagePlace("instructions", []))
    value = body.get("input")
    if type(value) is str:
        return [*messages, {"role": "user", "content": value}], [*places, MessagePlace("input", [])]
    if type(value) is not list or not value:
        raise invalid("input", "a text, or a list of at least one item", value)
    thought = ""  # which comes before the item that it led to
    for number, item in enumerate(value):
        name = f"input[{number}]"
        kind = mapping(name, item).get("type")
        kind = "message" if kind is None else one_of(*ITEMS)(f"{name}.type", kind)
        check_members(name, item, ITEMS[kind])
        if kind == "reasoning":
            for part in _listed(f"{name}.content", item.get("content")):
                content = mapping(f"{name}.content", part).get("text")
                thought += long_text(f"{name}.content.text", content)
            continue
        if kind == "function_call_output":
            output = _content(f"{name}.output", item.get("output"))
            call = item.get("call_id")
            messages.append({"role": "tool", "tool_call_id": call, "content": output})
            places.append(MessagePlace(name, []))
            continue
        if kind == "message":
            content = _content(f"{name}.content", item.get("content"))
            messages.append({"role": item.get("role"), "content": content})
            places.append(MessagePlace(name, []))
        else:
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant" or thought:
                messages.append({"role": "assistant", "content": ""})
                places.append(MessagePlace(name, []))
            messages[-1].setdefault("tool_calls", []).append(call)
            places[-1].calls.append(name)
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        thought = ""
    return messages, places


def _content(name: str, value: Any) -> Any:
    """A text, or parts of texts in the form of a chat."""
    if type(value) is not list:
        return value
    kinds = ("input_text", "output_text", "text")
    parts = []
    for part in value:
        one_of(*kinds)(f"{name}.type", mapping(name, part).get("type"))
        parts.append({"type": "text", "text": part.get("text")})
    return parts


def settings_of(body: Mapping[str, Any]) -> Json:
    """What a response says of its request, but for the sampling that applied."""
    return {
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None} | _present(body.get("reasoning")),
        "store": False,
        "text": {"format": {"type": "text"}} | _present(body.get("text")),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "truncation": "disabled",
    }


def _present(members: Json | None) -> Json:
    return {name: value for name, value in (members or {}).items() if value is not None}


class ResponseItems:
    """The output of one response: its items so far, and the events that clients of a stream get.

    id, model: of the response. settings: what it says of its request.
    """

    def __init__(self, id: str, model: str, settings: Json) -> None:
        self._head = {"id": id, "object": "response", "created_at": int(time.time()),
                      "model": model, "error": None, "incomplete_details": None}  # fmt: skip
        self._settings, self._number = settings, 0
        self.items: list[Json] = []
        self._open: type | None = None  # the kind of part of the last item, while it is not done

    def begin(self) -> list[Json]:
        """The events before the first item."""
        response = self._response("in_progress", None)
        return [
            self.event(f"response.{name}", response=response) for name in ("created", "in_progress")
        ]

    def add(self, parts: Sequence[Part]) -> list[Json]:
        """The events of more parts of the answer."""
        return [event for part in parts for event in self._add(part)]

    def end(self, reason: str, usage: Json) -> list[Json]:
        """The last events. reason: of the engine."""
        events = [*self._close("incomplete" if reason == "length" else "completed")]
        if not self.items:  # a response has an item, also an empty one
            events += [*self._add(Content("")), *self._close()]
        response = self.response(reason, usage)
        return [*events, self.event(f"response.{response['status']}", response=response)]

    def response(self, reason: str, usage: Json) -> Json:
        """The whole response."""
        status = "incomplete" if reason == "length" else "completed"
        response = self._response(status, usage)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _response(self, status: str, usage: Json | None) -> Json:
        head = self._head | {"status": status, "output": list(self.items), "usage": usage}
        return head | self._settings

    def event(self, kind: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1} | fields

    def _add(self, part: Part) -> Iterator[Json]:
        if type(part) is not self._open:
            yield from self._close()
            yield from self._begin_item(part)
        item, place = self.items[-1], self._place()
        if isinstance(part, Call):
            item["arguments"] = part.arguments
            name = "response.function_call_arguments"
            yield self.event(f"{name}.delta", **place, delta=part.arguments)
            yield self.event(f"{name}.done", **place, arguments=part.arguments, name=part.name)
            yield from self._close()
            return
        item["content"][0]["text"] += part.text
        name = "response.reasoning_text" if isinstance(part, Thought) else "response.output_text"
        scores = {} if isinstance(part, Thought) else {"logprobs": []}
        yield self.event(f"{name}.delta", **place, content_index=0, delta=part.text, **scores)

    def _begin_item(self, part: Part) -> Iterator[Json]:
        code = secrets.token_hex(12)
        if isinstance(part, Call):
            item = {"type": "function_call", "id": f"fc_{code}", "call_id": part.id}
            item |= {"name": part.name, "arguments": ""}
        elif isinstance(part, Thought):
            item = {"type": "reasoning", "id": f"rs_{code}", "summary": [], "content": []}
        else:
            item = {"type": "message", "id": f"msg_{code}", "role": "assistant", "content": []}
        item["status"] = "in_progress"
        self.items.append(item)
        self._open = type(part)
        yield self.event(
            "response.output_item.added", output_index=len(self.items) - 1, item=dict(item)
        )
        if not isinstance(part, Call):
            content = {"type": "reasoning_text", "text": ""}
            if isinstance(part, Content):
                content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"] = [content]
            yield self.event("response.content_part.added", **self._place(), content_index=0,
                              part=dict(content))  # fmt: skip

    def _close(self, status: str = "completed") -> Iterator[Json]:
        """The events that end the last item."""
        if self._open is None:
            return
        item, place = self.items[-1], self._place()
        if self._open is not Call:
            (content,) = item["content"]
            kind = "reasoning_text" if self._open is Thought else "output_text"
            scores = {} if self._open is Thought else {"logprobs": []}
            place |= {"content_index": 0}
            yield self.event(f"response.{kind}.done", **place, text=content["text"], **scores)
            yield self.event("response.content_part.done", **place, part=dict(content))
        item["status"], self._open = status, None
        yield self.event(
            "response.output_item.done", output_index=len(self.items) - 1, item=dict(item)
        )

    def _place(self) -> Json:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
