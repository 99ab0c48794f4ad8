"""Tool calls and thoughts in the text of an answer, in the forms that chat templates teach models.

`tool_form` finds the form of a template, `call_grammar` makes an answer call a tool, and an
`AnswerParser` divides a text into thoughts, content and calls as it comes.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Tool = Mapping[str, Any]


class ToolForm(NamedTuple):
    """How a model writes calls. mark: a text in its chat template.

    begin, end: around the calls of an answer, `end` perhaps empty: then calls end with the answer.
    arguments: the name of the member that has them. listed: a list of calls is inside.
    bare: an answer that begins with an object is a call, without `begin`.
    """

    mark: str
    begin: str
    end: str
    arguments: str = "arguments"
    listed: bool = False
    bare: bool = False


# Of Hermes, Qwen and SmolLM3; of Mistral; of Llama 3.
FORMS = (
    ToolForm("<tool_call>", "<tool_call>", "</tool_call>"),
    ToolForm("[TOOL_CALLS]", "[TOOL_CALLS]", "", listed=True),
    ToolForm('"parameters":', "<|python_tag|>", "", "parameters", bare=True),
)
THOUGHT = ("<think>", "</think>")


def tool_form(template: str | None) -> ToolForm | None:
    """The form that a chat template shows; None if it shows none."""
    return next((form for form in FORMS if template and form.mark in template), None)


def call_grammar(form: ToolForm, tools: Sequence[Tool], several: bool) -> str:
    """A grammar, in Lark's form, of answers that call one of the tools, or perhaps several."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                form.arguments: tool["function"]["parameters"],
            },
            "required": ["name", form.arguments],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    layout = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    schema = json.dumps({"anyOf": calls, "x-guidance": layout})
    begin, end = json.dumps(form.begin), json.dumps(form.end)
    if form.bare:
        start = "call"
    elif form.listed:
        more = '(", " call)*' if several else ""
        start = f'{begin} "[" call {more} "]"'
    else:
        call = f'{begin} "\\n" call "\\n" {end}'
        start = f'{call} ("\\n" {call})*' if several else call
    return f"start: {start}\ncall: %json {schema}\n"


class Thought(NamedTuple):
    """A part of the reasoning before an answer."""

    text: str


class Content(NamedTuple):
    """A part of the text of an answer."""

    text: str


class Call(NamedTuple):
    """A complete call. number: of the call in its answer, from 0. arguments: JSON."""

    number: int
    id: str
    name: str
    arguments: str


Part = Thought | Content | Call


class AnswerParser:
    """Divides the text of one answer into thoughts, content and calls.

    form: of its calls; None if it has no tools. thinks: whether thoughts between THOUGHT are told
    apart. thinking: the prompt has begun a thought already.
    The parts do not depend on the pieces in which the text comes. White space around thoughts and
    calls belongs to neither. A call that is no JSON, or cut, stays content, as the model wrote it.
    """

    def __init__(self, form: ToolForm | None, thinks: bool = False, thinking: bool = False) -> None:
        self._form, self._thinks, self._thinking = form, thinks, thinking
        self._in_call, self._begun = False, False  # after `begin`; content or a call has begun
        self._trims, self._space = thinking, ""  # white space: the next is dropped; held back
        self._pending, self._calls = "", 0

    @property
    def called(self) -> bool:
        """Whether the answer has called a tool."""
        return self._calls > 0

    def push(self, text: str, last: bool = False) -> list[Part]:
        """The parts that are certain with more of the text. last: nothing follows."""
        self._pending += text
        parts: list[Part] = []
        while self._step(parts, last):
            pass
        if last and self._space and not self._trims:
            parts.append(Content(self._space))
        return parts

    def _step(self, parts: list[Part], last: bool) -> bool:
        """Add the parts up to the next mark. Returns whether it has come."""
        if self._in_call:
            return self._call(parts, last)
        if self._thinking:
            text, closed = self._until(THOUGHT[1], last)
            self._add(parts, Thought, text)
            if closed:
                self._mark()
                self._thinking = False
            return closed
        if not self._begun:
            start = self._pending.lstrip()
            if self._thinks and start.startswith(THOUGHT[0]):
                self._mark()
                self._pending = start.removeprefix(THOUGHT[0])
                self._thinking, self._thinks = True, False
                return True
            if not last and (not start or (self._thinks and THOUGHT[0].startswith(start))):
                return False
            if self._form is not None and self._form.bare and start.startswith("{"):
                self._in_call = True
                return True
        if self._form is None:
            text, self._pending, marked = self._pending, "", False
        else:
            text, marked = self._until(self._form.begin, last)
        self._add(parts, Content, text)
        self._begun = self._begun or bool(text.strip())
        if marked:
            self._mark()
            self._in_call = True
        return marked

    def _until(self, mark: str, last: bool) -> tuple[str, bool]:
        """The text before a mark, which is removed with it; what may begin the mark stays."""
        before, marked, after = self._pending.partition(mark)
        if marked:
            self._pending = after
            return before, True
        cut = len(before) - (0 if last else _overlap(before, mark))
        self._pending = before[cut:]
        return before[:cut], False

    def _mark(self) -> None:
        """Drop the white space around a mark."""
        self._space, self._trims = "", True

    def _add(self, parts: list[Part], kind: type, text: str) -> None:
        if self._trims:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            parts.append(kind(self._space + body))
            self._space, self._trims = "", False
        self._space += text[len(body) :]

    def _call(self, parts: list[Part], last: bool) -> bool:
        """Add the calls that are complete. Returns whether more of the text follows them."""
        form, body, closed = self._form, self._pending, False
        self._pending = self._pending if not last else ""
        if form.end and form.end in body:
            body, _, self._pending = body.partition(form.end)
            closed = True
        elif not last:
            return False
        self._in_call, self._begun = False, True
        calls = _calls_in(body, form)
        if calls is None:
            bare = form.bare and body.lstrip().startswith("{")
            self._trims = False
            whole = f"{'' if bare else form.begin}{body}{form.end if closed else ''}"
            self._add(parts, Content, whole)
            return True
        for name, arguments in calls:
            parts.append(Call(self._calls, f"call_{secrets.token_hex(12)}", name, arguments))
            self._calls += 1
        self._mark()
        return True


def _calls_in(text: str, form: ToolForm) -> list[tuple[str, str]] | None:
    """Name and arguments of each call; None unless all are valid."""
    values, decoder, rest = [], json.JSONDecoder(), text.strip()
    try:
        while rest:
            value, end = decoder.raw_decode(rest)
            values += value if form.listed and isinstance(value, list) else [value]
            rest = rest[end:].lstrip(" \n;")
    except (ValueError, RecursionError):
        return None
    calls = []
    for value in values:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get(form.arguments, value.get("arguments", {}))
        if not isinstance(arguments, dict):
            return None
        calls.append((value["name"], json.dumps(arguments, ensure_ascii=False)))
    return calls or None


def _overlap(text: str, mark: str) -> int:
    """The number of last characters of a text that may begin a mark."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)
