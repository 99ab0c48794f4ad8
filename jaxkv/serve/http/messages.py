"""The messages of a conversation, and the tools that an answer may call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxkv.serve.http.body import check_structure
from jaxkv.serve.http.checks import (
    MAX_COUNT,
    MAX_SCHEMA_LEVELS,
    check_keys,
    check_members,
    check_of,
    flag,
    invalid,
    long_text,
    one_of,
    text,
    text_up_to,
    valid_unicode,
    variables,
)
from jaxkv.serve.http.errors import APIError
from jaxkv.serve.http.tools import DECODER

MAX_MESSAGES, MAX_TOOLS = 2**13, 128
ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}


def messages(name: str, value: Any) -> list[dict[str, Any]]:
    """Role and content of each message; parts of a content are joined."""
    if type(value) is not list or not 1 <= len(value) <= MAX_MESSAGES:
        raise invalid(name, f"a list of 1 to {MAX_MESSAGES} messages", value)
    return [_message(f"{name}[{at}]", message) for at, message in enumerate(value)]


def _message(name: str, value: Any) -> dict[str, Any]:
    if type(value) is not dict or "role" not in value:
        raise invalid(name, 'an object with "role" and "content"', value)
    role = one_of(*ROLES)(f"{name}.role", value["role"])
    calls = value.get("tool_calls") or []
    known = {"role", "content", "name"} | {
        "assistant": {"tool_calls", "reasoning_content"}, "tool": {"tool_call_id"}
    }.get(role, set())  # fmt: skip
    check_members(name, value, known)
    content = value.get("content")
    if content is None and not calls:
        raise invalid(f"{name}.content", "a text, or a list of parts of type text", content)
    message = {"role": ROLES[role], "content": _content(f"{name}.content", content or "")}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if value.get(key) not in (None, ""):
            place = f"{name}.{key}"
            message[key] = valid_unicode(place, text_up_to(MAX_COUNT)(place, value[key]))
    if role == "tool" and "tool_call_id" not in message:
        raise invalid(f"{name}.tool_call_id", "the id of a tool call", None)
    if calls:
        message["tool_calls"] = _tool_calls(f"{name}.tool_calls", calls)
    return message


def _content(name: str, content: Any) -> str:
    parts = [{"type": "text", "text": content}] if type(content) is str else content
    if type(parts) is not list or not all(map(_is_text_part, parts)):
        raise invalid(name, "a text, or a list of parts of type text", content)
    return valid_unicode(name, "".join(part["text"] for part in parts))


def _tool_calls(name: str, value: Any) -> list[dict[str, Any]]:
    """The calls of an assistant, with their arguments as objects, which templates write as JSON."""
    if type(value) is not list:
        raise invalid(name, "a list of tool calls", value)
    calls = []
    for at, call in enumerate(value):
        place = f"{name}[{at}]"
        function = call.get("function") if type(call) is dict else None
        if type(function) is not dict or call.get("type", "function") != "function":
            raise invalid(place, "an object of type function with a function", call)
        arguments = function.get("arguments")
        arguments = "{}" if arguments in (None, "") else arguments
        if type(arguments) is str:
            check_structure(arguments.encode("utf-8", "replace"), f"{place}.function.arguments")
        try:
            parsed = DECODER.decode(arguments) if type(arguments) is str else arguments
        except (ValueError, RecursionError):
            parsed = None
        if type(parsed) is not dict:
            raise invalid(f"{place}.function.arguments", "an object as JSON", arguments)
        variables(f"{place}.function.arguments", parsed)
        named = {"name": tool_name(f"{place}.function.name", function.get("name"))}
        entry = {"type": "function", "function": named | {"arguments": parsed}}
        if call.get("id"):
            entry["id"] = text(f"{place}.id", call["id"])
        calls.append(entry)
    return calls


TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
tool_name = check_of(
    "a name of 1 to 64 letters, digits, _, . and -",
    lambda value: type(value) is str and TOOL_NAME.fullmatch(value) is not None,
)


tool_list = check_of(
    f"a list of at most {MAX_TOOLS} tools",
    lambda value: type(value) is list and len(value) <= MAX_TOOLS,
)


def tools(name: str, value: Any) -> list[dict[str, Any]]:
    """The functions that an answer may call, as in OpenAI's API."""
    tool_list(name, value)
    parsed = [_tool(f"{name}[{at}]", tool) for at, tool in enumerate(value)]
    names = [tool["function"]["name"] for tool in parsed]
    twice = next((text for text in names if names.count(text) > 1), None)
    if twice is not None:
        raise APIError(400, f"{name} has {twice!r} twice; rename or remove one", param=name)
    return parsed


def _function(name: str, value: Any, accepted: set[str]) -> dict[str, Any]:
    """The function of a tool. accepted: its members."""
    function = value.get("function") if type(value) is dict else None
    if type(function) is not dict or value.get("type") != "function":
        raise invalid(name, "an object of type function with a function", value)
    check_keys(name, value, {"type", "function"})
    check_keys(f"{name}.function", function, accepted)
    return function


def _tool(name: str, value: Any) -> dict[str, Any]:
    function = _function(name, value, {"name", "description", "parameters", "strict"})
    parsed = {"name": tool_name(f"{name}.function.name", function.get("name"))}
    if function.get("description") is not None:
        place = f"{name}.function.description"
        parsed["description"] = valid_unicode(place, long_text(place, function["description"]))
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    place = f"{name}.function.parameters"
    parsed["parameters"] = variables(place, parameters, MAX_SCHEMA_LEVELS)
    if parameters.get("type", "object") not in ("object", ["object"]):
        raise invalid(f"{place}.type", "object, as arguments are one", parameters["type"])
    if function.get("strict") is not None:
        flag(f"{name}.function.strict", function["strict"])
    return {"type": "function", "function": parsed}


class ToolChoice(NamedTuple):
    """Which tools an answer calls.

    mode: none, auto or required. names: of those that it may call; None for all. single: it calls
    one.
    """

    mode: str
    names: tuple[str, ...] | None = None
    single: bool = False

    def among(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The tools that an answer may call."""
        names = () if self.mode == "none" else self.names
        return [tool for tool in tools if names is None or tool["function"]["name"] in names]


def tool_choice(name: str, value: Any) -> ToolChoice:
    """A choice of OpenAI's API: a mode, a function, or a mode with some of the tools."""
    if type(value) is not dict:
        return ToolChoice(one_of("none", "auto", "required")(name, value))
    kind = value.get("type")
    choice = value.get(kind) if kind in ("function", "allowed_tools") else None
    if type(choice) is not dict:
        rule = "none, auto, required, or an object of type function or allowed_tools"
        raise invalid(name, rule, value)
    if kind == "function":
        return ToolChoice("required", (_chosen_name(name, value),), single=True)
    check_keys(name, value, {"type", kind})
    place = f"{name}.allowed_tools"
    check_keys(place, choice, {"mode", "tools"})
    mode = one_of("auto", "required")(f"{place}.mode", choice.get("mode"))
    tools = choice.get("tools")
    if type(tools) is not list or not 1 <= len(tools) <= MAX_TOOLS:
        raise invalid(f"{place}.tools", f"a list of 1 to {MAX_TOOLS} tools", tools)
    names = [_chosen_name(f"{place}.tools[{at}]", tool) for at, tool in enumerate(tools)]
    return ToolChoice(mode, tuple(names))


def _chosen_name(name: str, value: Any) -> str:
    function = _function(name, value, {"name"})
    return tool_name(f"{name}.function.name", function.get("name"))


def _is_text_part(part: Any) -> bool:
    return (
        type(part) is dict
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and type(part["text"]) is str
    )
