"""Tool calls and thoughts in the text of an answer, in the forms that chat templates teach models.

`tool_form` finds the form of a template, and an `AnswerParser` divides a text into thoughts,
content and calls as it comes.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxkv.serve.engine.request import is_unicode

Tool = Mapping[str, Any]


class ToolForm(NamedTuple):
    """How a model writes calls. mark: a text in its chat template.

    begin, end: around each call, or, without an end, before the calls. arguments: the name of the
    member that has them. listed: a list of calls follows. bare: an answer that begins with an
    object is a call, without `begin`. named: the name stands before the object of the arguments.
    """

    mark: str
    begin: str
    end: str = ""
    arguments: str = "arguments"
    listed: bool = False
    bare: bool = False
    named: bool = False


ARGUMENTS, CALL_ID = "[ARGS]", "[CALL_ID]"
# Of Hermes, Qwen and SmolLM3; of Mistral, newer and older; of Llama 3.
HERMES, NAMED, LISTED, BARE = FORMS = (
    ToolForm("<tool_call>", "<tool_call>", "</tool_call>"),
    ToolForm(ARGUMENTS, "[TOOL_CALLS]", named=True),
    ToolForm("[TOOL_CALLS]", "[TOOL_CALLS]", listed=True),
    ToolForm('"parameters":', "<|python_tag|>", arguments="parameters", bare=True),
)
# Marks of templates whose calls have another form between the marks of Hermes: Qwen3-Coder, GLM.
FOREIGN = ("<function=", "<arg_key>")
# The marks around thoughts.
THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def tool_form(template: str | None) -> ToolForm | None:
    """The form that a chat template shows; None if it shows none, or one that is not known."""
    if template is None or any(mark in template for mark in FOREIGN):
        return None
    return next((form for form in FORMS if form.mark in template), None)


def thought_marks(template: str | None) -> tuple[str, str] | None:
    """The marks around thoughts that a chat template shows; None if it shows none."""
    return next((marks for marks in THOUGHTS if template and marks[0] in template), None)


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


def call_id() -> str:
    """The id of a new call: 9 letters and digits, because Mistral's templates refuse others."""
    return secrets.token_hex(5)[:9]


class BraceCounter:
    """Tells when the objects of a JSON text may be complete, without parsing it again."""

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False

    def push(self, text: str) -> bool:
        """Whether an object may end within more of the text."""
        ended = False
        for character in text:
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._quoted = True
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                ended = ended or self._depth <= 0
        return ended


class AnswerParser:
    """Divides the text of one answer into thoughts, content and calls.

    form: of its calls; None if it has no tools. marks: around its thoughts; None if it has none.
    thinking: the prompt has begun a thought already. names: of the tools; empty for any. several:
    it may call more than one; otherwise further calls are left out.
    The parts do not depend on the pieces in which the text comes. White space around thoughts and
    calls belongs to neither. What is no call of a tool stays content, as the model wrote it. A call
    that the limit of tokens cuts is left out, and so is a mark at the end with nothing after it.
    """

    def __init__(
        self,
        form: ToolForm | None,
        marks: tuple[str, str] | None = None,
        thinking: bool = False,
        names: frozenset[str] = frozenset(),
        several: bool = True,
    ) -> None:
        self._form, self._marks, self._thinking, self._names = form, marks, thinking, names
        self._several = several
        self._in_call, self._begun = False, False  # content or a call has begun
        self._marked = False  # the call has begun with its mark
        # White space: the next is dropped; held back; dropped before the last mark.
        self._trims, self._space, self._dropped = thinking, "", ""
        self._pending, self._calls = "", 0
        self._braces, self._counted = BraceCounter(), 0  # of the call; its characters so far

    @property
    def thinking(self) -> bool:
        """Whether the answer is within a thought."""
        return self._thinking

    @property
    def undecided(self) -> bool:
        """Whether the last characters may begin a mark."""
        return bool(self._pending)

    @property
    def called(self) -> bool:
        """Whether the answer has called a tool."""
        return self._calls > 0

    def push(self, text: str, last: bool = False, cut: bool = False) -> list[Part]:
        """The parts that are certain with more of the text. last: nothing follows.

        cut: the limit of tokens ended the answer.
        """
        self._pending += text
        parts: list[Part] = []
        while self._step(parts, last, cut):
            pass
        if last and self._space and not self._trims:
            parts.append(Content(self._space))
        return parts

    def _step(self, parts: list[Part], last: bool, cut: bool) -> bool:
        """Add the parts up to the next mark. Returns whether it has come."""
        if self._in_call:
            return self._call(parts, last, cut)
        if self._thinking:
            text, closed = self._until(self._marks[1], last, cut)
            self._add(parts, Thought, text)
            if closed:
                self._mark()
                self._thinking = False
            return closed
        if not self._begun:
            start, opening = self._pending.lstrip(), self._marks[0] if self._marks else ""
            if opening and start.startswith(opening):
                self._mark()
                self._pending = start.removeprefix(opening)
                self._thinking = True
                return True
            if not last and (not start or opening.startswith(start)):
                return False
            if self._form is not None and self._form.bare and start.startswith("{"):
                self._in_call, self._marked = True, False
                return True
        if self._form is None:
            text, self._pending, marked = self._pending, "", False
        else:
            text, marked = self._until(self._form.begin, last, cut)
        self._add(parts, Content, text)
        self._begun = self._begun or bool(text.strip())
        if marked:
            self._mark()
            self._in_call = self._marked = True
        return marked

    def _until(self, mark: str, last: bool, cut: bool) -> tuple[str, bool]:
        """The text before a mark, which is removed with it; what may begin the mark stays.

        What may begin it at the limit of tokens is left out.
        """
        before, marked, after = self._pending.partition(mark)
        if marked:
            self._pending = after
            return before, True
        end = len(before) - (0 if last and not cut else _overlap(before, mark))
        self._pending = "" if last else before[end:]
        return before[:end], False

    def _mark(self) -> None:
        """Drop the white space around a mark."""
        self._dropped, self._space, self._trims = self._space, "", True

    def _add(self, parts: list[Part], kind: type, text: str) -> None:
        if self._trims:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            parts.append(kind(self._space + body))
            self._space, self._trims = "", False
        self._space += text[len(body) :]

    def _call(self, parts: list[Part], last: bool, cut: bool) -> bool:
        """Add the calls that are complete. Returns whether the call has ended."""
        form, body = self._form, self._pending
        if not last and not self._may_end():
            return False
        try:
            read = _calls_in if form.bare or form.listed else _first_call
            calls, self._pending = read(body, form)
            if self._names and not self._names.issuperset(name for name, _ in calls):
                raise _NoCall
        except (_Incomplete, _NoCall) as error:
            calls = []
            if isinstance(error, _Incomplete) and not last:
                return False
            begun = self._marked or _begins_call(body)
            if isinstance(error, _Incomplete) and begun and (cut or not body.strip()):
                self._pending = ""
            else:
                self._pending = self._add_call_as_text(parts, body)
        self._in_call, self._begun = False, True
        self._braces, self._counted = BraceCounter(), 0
        for name, arguments in calls if self._several else calls[: 1 - self._calls]:
            parts.append(Call(self._calls, call_id(), name, arguments))
            self._calls += 1
        if calls:
            self._mark()
        return True

    def _may_end(self) -> bool:
        """Whether a call may be complete with what has come since it was last read."""
        form, start = self._form, self._counted
        if form.bare or form.listed:
            return False
        self._counted = len(self._pending)
        if self._braces.push(self._pending[start:]):
            return True
        # Of a call whose quotes do not match.
        return bool(form.end) and f"}}{form.end}" in self._pending[max(0, start - len(form.end)) :]

    def _add_call_as_text(self, parts: list[Part], body: str) -> str:
        """Add what is no call as content. Returns the text after it."""
        form, text, rest = self._form, body, ""
        if form.end and form.end in body:
            text, _, rest = body.partition(form.end)
            text += form.end
        self._trims = False
        self._add(parts, Content, self._dropped + form.begin * self._marked + text)
        return rest


class _NoCall(Exception):
    """The text is no call, whatever follows."""


class _Incomplete(Exception):
    """The text is the beginning of a call."""


def _begins_call(text: str) -> bool:
    """Whether the beginning of an object is one of a call, as its first member tells."""
    members = text.lstrip().removeprefix("{").lstrip()
    return '"name"'.startswith(members[: len('"name"')])


def _first_call(text: str, form: ToolForm) -> tuple[list[tuple[str, str]], str]:
    """The first call of a text, and the text after it."""
    text, name = text.lstrip(), None
    if form.named:
        name, mark, text = text.partition(ARGUMENTS)
        name = name.partition(CALL_ID)[0].strip()
        if not mark:
            raise _Incomplete
    text = text.lstrip()
    value, end = _decoded(text, mark=form.end)
    rest = text[end:]
    if form.end:
        after = rest.lstrip()
        if not after.startswith(form.end):
            raise _Incomplete if form.end.startswith(after) else _NoCall
        rest = after.removeprefix(form.end)
    return [_checked({"name": name, form.arguments: value} if form.named else value, form)], rest


def _calls_in(text: str, form: ToolForm) -> tuple[list[tuple[str, str]], str]:
    """All calls of a text, which has nothing else."""
    calls, text = [], text.strip()
    between, at = re.compile(f"[ \\n;]*(?:{re.escape(form.begin)})?"), 0
    while at < len(text):
        value, at = _decoded(text, at)
        values = value if form.listed and isinstance(value, list) else [value]
        calls += [_checked(value, form) for value in values]
        at = between.match(text, at).end()
    if not calls:
        raise _Incomplete
    return calls, ""


def _decoded(text: str, start: int = 0, mark: str = "") -> tuple[Any, int]:
    """The JSON that begins at a character, and where it ends. mark: follows the JSON."""
    try:
        return DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        # A text that ends within the JSON is the beginning of a call.
        quoted = error.msg.startswith("Unterminated string") and not (mark and mark in text)
        cut = quoted or not text[error.pos :].strip()
        raise (_Incomplete if cut else _NoCall) from None
    except (ValueError, RecursionError):
        raise _NoCall from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _checked(value: Any, form: ToolForm) -> tuple[str, str]:
    """Name and arguments of a call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise _NoCall
    name = form.arguments if form.arguments in value else "arguments"
    if form.bare and name not in value:
        raise _NoCall
    call = call_text(value["name"], value.get(name, {}))
    if call is None:
        raise _NoCall
    return call


def call_text(name: str, arguments: Any) -> tuple[str, str] | None:
    """The name and the arguments as JSON; None where they are no object, or cannot be sent.

    JSON may have numbers beyond those of a float, and halves of characters.
    """
    if not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return None
    return (name, text) if is_unicode(name + text) else None


def _overlap(text: str, mark: str) -> int:
    """The number of last characters of a text that may begin a mark."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)
