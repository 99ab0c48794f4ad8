"""Answers that a tokenizer's `response_template` divides into thoughts, content and calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.serve.http.protocols import ResponseParserProtocol
from jaxkv.serve.http.tools import Call, Content, Part, Thought, call_id

# The fields of messages in transformers' templates. Others, such as the role, are not shown.
SHOWN = {
    "content": Content, "reasoning_content": Thought, "reasoning": Thought, "thinking": Thought
}  # fmt: skip
CALLS = "tool_calls"


class TemplateParser:
    """Divides the text of one answer, with the interface of `AnswerParser`.

    parser: a new one of this answer. template: that it reads. names: of the tools.
    A call of another tool, or one that the template cannot read, is content without its marks, and
    so is all that follows the latter. A call that is cut is left out.
    """

    def __init__(
        self,
        parser: ResponseParserProtocol,
        template: Mapping[str, Any],
        names: frozenset[str],
    ) -> None:
        self._parser, self._names = parser, names
        self._joins = {name: field.get("join", "") for name, field in template["fields"].items()}
        self._field, self._body = "", ""  # the open region, and its text that is not shown yet
        self._shown: set[str] = set()  # fields that have shown a text
        self._begun, self._broken, self._calls = False, False, 0
        for event in parser.initial_events:  # what the prompt wrote is not of the answer
            self._field = event["field"] if event["type"] != "region_close" else ""
            self._begun = bool(event.get("text", "").strip())

    @property
    def called(self) -> bool:
        """Whether the answer has called a tool."""
        return self._calls > 0

    def push(self, text: str, last: bool = False) -> list[Part]:
        """The parts that are certain with more of the text. last: nothing follows."""
        parts: list[Part] = []
        if self._broken:
            return [Content(text)] if text else parts
        try:
            self._add(parts, self._parser.feed(text))
        except ValueError:
            self._broken = True
            return [*parts, Content(self._body + text)]
        if last:
            try:
                self._add(parts, self._parser.finalize()[1])
            except ValueError:  # of a call that is cut
                return parts
        return parts

    def _add(self, parts: list[Part], events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            name, field = event["type"], event["field"]
            if name == "region_open":
                self._field, self._body, self._begun = field, "", False
            elif name == "region_chunk":
                self._body += event["text"]
                if field in SHOWN and not event["dirty"]:
                    self._show_text(parts, field)
            elif name == "region_close":
                if field == CALLS:
                    self._call(parts, event["value"])
                elif field in SHOWN and self._body.strip() and not self._begun:
                    value = event["value"]
                    text = value if isinstance(value, str) else json.dumps(value)
                    parts.append(SHOWN[field](text))
                self._field, self._body = "", ""

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
        """Add the calls of a region."""
        for call in value if isinstance(value, list) else [value]:
            function = call.get("function", call) if isinstance(call, dict) else {}
            name, arguments = function.get("name"), function.get("arguments", {})
            if isinstance(arguments, str):
                arguments = _decoded(arguments)
            if name not in self._names or not isinstance(arguments, dict):
                parts.append(Content(self._body))
                return
            text = json.dumps(arguments, ensure_ascii=False)
            parts.append(Call(self._calls, call_id(), name, text))
            self._calls += 1


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
