"""Answers that a tokenizer's `response_template` divides into thoughts, content and calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxkv.serve.http.protocols import ResponseParserProtocol
from jaxkv.serve.http.tools import DECODER, Call, Content, Part, Thought, call_id, call_text

# The fields of messages in transformers' templates. Others, such as the role, are not shown.
SHOWN = {
    "content": Content, "reasoning_content": Thought, "reasoning": Thought, "thinking": Thought
}  # fmt: skip
CALLS = "tool_calls"
ParserEvent = Mapping[str, Any]


FAILURES = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # of a text


class TemplateParser:
    """Divides the text of one answer, with the interface of `AnswerParser`.

    parser: a new one of this answer. template: that it reads. names: of the tools. several: it may
    call more than one; otherwise further calls are left out.
    A call of another tool, or one that the template cannot read, is content without its marks, and
    so is all that follows the latter. A call that the limit of tokens cuts is left out.
    """

    def __init__(
        self,
        parser: ResponseParserProtocol,
        template: Mapping[str, Any],
        names: frozenset[str],
        several: bool = True,
    ) -> None:
        self._parser, self._names, self._several = parser, names, several
        fields = template["fields"].items()
        self._joins = {name: field.get("join") or "" for name, field in fields}
        self._body = ""  # of the open region, not shown yet
        self._shown: set[str] = set()  # fields that have shown a text
        self._in_call, self._begun, self._broken, self._calls = False, False, False, 0
        self._in_thought = False
        for event in parser.initial_events:  # what the prompt wrote is not of the answer
            self._begun = bool(event.get("text", "").strip())
            is_open = event["type"] != "region_close"
            self._in_call = event["field"] == CALLS and is_open
            self._in_thought = SHOWN.get(event["field"]) is Thought and is_open

    @property
    def thinking(self) -> bool:
        """Whether the answer is within a thought."""
        return self._in_thought

    @property
    def undecided(self) -> bool:
        """Whether the last characters may begin a mark; marks of templates are single tokens."""
        return False

    @property
    def called(self) -> bool:
        """Whether the answer has called a tool."""
        return self._calls > 0

    def push(self, text: str, last: bool = False, cut: bool = False) -> list[Part]:
        """The parts that are certain with more of the text. last: nothing follows.

        cut: the limit of tokens ended the answer. The parser gets single characters, so that the
        parts before a failure do not depend on the pieces in which the text comes.
        """
        parts: list[Part] = []
        for number, character in enumerate(text):
            if self._broken:
                parts.append(Content(text[number:]))
                break
            self._try(parts, lambda character=character: self._parser.feed(character))
        if last and not self._broken and not (cut and self._in_call):
            self._try(parts, lambda: self._parser.finalize()[1])
        return parts

    def _try(self, parts: list[Part], events: Callable[[], Sequence[ParserEvent]]) -> None:
        try:
            for event in events():
                self._add(parts, event)
        except FAILURES:
            self._broken = True
            if self._body:
                parts.append(Content(self._body))

    def _add(self, parts: list[Part], event: ParserEvent) -> None:
        kind, field = event["type"], event["field"]
        self._in_thought = SHOWN.get(field) is Thought and kind != "region_close"
        if kind == "region_open":
            self._body, self._begun, self._in_call = "", False, field == CALLS
        elif kind == "region_chunk":
            self._body += event["text"]
            if field in SHOWN and not event["dirty"]:
                self._show_text(parts, field)
        elif kind == "region_close":
            if field == CALLS:
                self._call(parts, event["value"])
            elif field in SHOWN and self._body.strip() and not self._begun:
                value = event["value"]
                text = value if isinstance(value, str) else json.dumps(value)
                parts.append(SHOWN[field](text))
            self._body, self._in_call = "", False

    def _show_text(self, parts: list[Part], field: str) -> None:
        """Show the open region but for the white space around it."""
        body = self._body if self._begun else self._body.lstrip()
        text = body.rstrip()
        if not text:
            return
        if not self._begun and field in self._shown:
            text = self._joins.get(field, "") + text
        parts.append(SHOWN[field](text))
        self._body, self._begun = body[len(body.rstrip()) :], True
        self._shown.add(field)

    def _call(self, parts: list[Part], value: Any) -> None:
        """Add the calls of a region, or its text if one of them is no call of a tool."""
        calls = [read_call(call) for call in (value if isinstance(value, list) else [value])]
        if not all(call is not None and call[0] in self._names for call in calls):
            parts.append(Content(self._body))
            return
        for name, arguments in calls if self._several else calls[: 1 - self._calls]:
            parts.append(Call(self._calls, call_id(), name, arguments))
            self._calls += 1


def read_call(value: Any) -> tuple[str, str] | None:
    """Name and arguments of a call in OpenAI's form, with or without its type; None for others."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", {})
    try:
        return call_text(function["name"], DECODER.decode(arguments)
                         if isinstance(arguments, str) else arguments)  # fmt: skip
    except (ValueError, RecursionError):
        return None
