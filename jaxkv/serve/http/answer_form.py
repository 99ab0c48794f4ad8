"""The parts of an answer: thoughts, content and calls, and what the answer must obey."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from jaxkv.errors import UserError
from jaxkv.serve.engine.request import MatcherProtocol
from jaxkv.serve.http.errors import APIError
from jaxkv.serve.http.protocols import LanguageProtocol
from jaxkv.serve.http.response_template import TemplateParser
from jaxkv.serve.http.responses import ResponseFormat
from jaxkv.serve.http.tool_grammar import call_rules, grammar_of, object_schema, thought_rules
from jaxkv.serve.http.tools import (
    ARGUMENTS,
    CALL_ID,
    AnswerParser,
    ToolForm,
    thought_marks,
    tool_form,
)

Values = dict[str, Any]
OBJECT = {"type": "object"}


def tool_form_of(values: Values, language: LanguageProtocol) -> ToolForm | None:
    """How the model writes calls of the tools that the request has; None without tools."""
    if not values.get("tools") or values["tool_choice"].mode == "none":
        return None
    form = tool_form(language.template) if "tools" in language.variables else None
    divided = language.response_template is not None and values["tool_choice"].mode == "auto"
    if form is None and not (divided and "tools" in language.variables):
        message = "this model's chat template has no tools in a form that jaxkv knows"
        if language.template is None:
            message = "this model has no chat template, and so no form of tools"
        message += "; leave tools out, or ask for JSON by response_format"
        raise APIError(400, message, param="tools")
    return form


class AnswerForm(NamedTuple):
    """The parts of an answer.

    calls: how they are written; None without tools. thoughts: the marks around them; None if there
    are none. thinking: the prompt has begun one. must_call: the answer is nothing but calls.
    """

    calls: ToolForm | None
    thoughts: tuple[str, str] | None
    thinking: bool
    must_call: bool


def answer_form(
    values: Values,
    calls: ToolForm | None,
    prompts: Sequence[tuple[str, Sequence[int]]],
    language: LanguageProtocol,
    format: ResponseFormat,
) -> AnswerForm:
    """Raises APIError for tools beside a grammar that takes no other rules."""
    if not format.is_chat:
        return AnswerForm(None, None, False, False)
    structure, thoughts = values["structure"], thought_marks(language.template)
    alone = structure is not None and not structure.kind.startswith("json")
    if alone:  # a grammar of its own has no place for thoughts
        thoughts = None
    choice = values["tool_choice"]
    if choice.among(values["tools"]) and structure is not None and (alone or calls is None):
        message = f"tools and {structure.name} exclude each other; leave one out, or set "
        raise APIError(400, f"{message}tool_choice to none", param=structure.name)
    thinking = thoughts is not None and _end_of_prompt(prompts, language).endswith(thoughts[0])
    return AnswerForm(calls, thoughts, thinking, bool(calls) and choice.mode == "required")


def grammar_field(values: Values, form: AnswerForm) -> str | None:
    """The field that says what an answer must obey; None for none."""
    structure = values["structure"]
    return "tools" if structure is None and form.must_call else structure and structure.name


def matcher_of(
    values: Values, form: AnswerForm, language: LanguageProtocol
) -> MatcherProtocol | None:
    """What an answer must obey; None for no grammar.

    Without tools it is the grammar of the request. Otherwise it is one of all parts of an answer.
    """
    structure, rules, choices = values["structure"], {}, []
    name = grammar_field(values, form)
    if name is None:
        return None
    try:
        if structure is not None and form.calls is None and form.thoughts is None:
            return language.matcher(structure.kind, structure.value)
        if structure is not None:
            anything = structure.kind == "json_object"
            rules["answer"] = language.json_rule(OBJECT if anything else structure.value)
            choices.append("answer")
        if form.calls is not None:
            choice = values["tool_choice"]
            tools = choice.among(values["tools"])
            several = values["parallel_tool_calls"] and not choice.single
            rules |= call_rules(language, form.calls, tools, several)
            choices.append("calls")
        start = f"({' | '.join(choices)})"
        if form.thoughts is not None:
            begin, rules_of_thought = thought_rules(language, form.thoughts, form.thinking)
            start, rules = f"{begin} {start}", rules | rules_of_thought
        return language.matcher("grammar", grammar_of(start, rules))
    except UserError as error:
        _check_schemas(values, form, language)
        raise APIError(400, f"{name}: {error}", param=name) from None


def _check_schemas(values: Values, form: AnswerForm, language: LanguageProtocol) -> None:
    """Raise APIError for the first schema that cannot be used alone."""
    structure = values["structure"]
    schemas = [] if structure is None else [(structure.name, structure.kind, structure.value)]
    tools = () if form.calls is None else values["tools"]
    for number, tool in enumerate(tools):
        if tool not in values["tool_choice"].among(tools):
            continue
        place = f"tools[{number}].function.parameters"
        schemas.append((place, "json_schema", object_schema(tool["function"]["parameters"])))
    for name, kind, value in schemas:
        try:
            language.matcher(kind, value)
        except UserError as error:
            raise APIError(400, f"{name}: {error}", param=name) from None


def parser_of(
    form: AnswerForm,
    values: Values,
    prompts: Sequence[tuple[str, Sequence[int]]],
    language: LanguageProtocol,
    format: ResponseFormat,
) -> dict[str, Any]:
    """What divides an answer into thoughts, content and calls, if there are any."""
    tools = values["tool_choice"].among(values["tools"]) if format.is_chat else []
    names = frozenset(tool["function"]["name"] for tool in tools)
    several = bool(values.get("parallel_tool_calls", True))
    template = language.response_template
    obeys = form.must_call or values["structure"] is not None
    if format.is_chat and template is not None and not obeys:
        (_, ids), *_ = prompts

        def parser() -> TemplateParser:
            return TemplateParser(language.response_parser(ids, tools), template, names, several)

        try:
            parser()
        except UserError as error:
            raise APIError(400, str(error), param="messages") from None
        return {"parser": parser, "marks": language.response_marks}
    calls, thoughts = form.calls, form.thoughts
    if calls is None and thoughts is None and format.kind != "responses":
        return {}
    marks = [*((calls.begin, calls.end) if calls else ()), *(thoughts or ())]
    marks += [ARGUMENTS, CALL_ID] if calls and calls.named else []
    parser_of_form = partial(AnswerParser, calls, thoughts, form.thinking, names, several)
    return {"parser": parser_of_form, "marks": marks}


def _end_of_prompt(prompts: Sequence[tuple[str, Sequence[int]]], language: LanguageProtocol) -> str:
    """The last words of the prompt, in which the template may begin a thought."""
    (_, ids), *_ = prompts
    return b"".join(map(language.token_bytes, ids[-8:])).decode("utf-8", "replace").rstrip()
