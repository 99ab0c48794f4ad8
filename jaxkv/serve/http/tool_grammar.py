"""Grammars of answers that call tools, and of answers that think before they obey a schema.

A grammar is in Lark's form. The language of the model writes the parts that depend on the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.serve.http.protocols import LanguageProtocol
from jaxkv.serve.http.tools import ARGUMENTS, Tool, ToolForm

ANYTHING = "/(?s:.*)/"


def call_rules(
    language: LanguageProtocol, form: ToolForm, tools: Sequence[Tool], several: bool
) -> dict[str, str]:
    """The rule `calls`, of one call or perhaps several, and the rules that it names.

    The arguments of each tool have a rule of their own, because references in a schema, such as
    `#/$defs/unit`, begin at its root.
    """
    functions = [tool["function"] for tool in tools]
    begin, end = language.literal(form.begin), language.literal(form.end) if form.end else ""
    calls = f'{begin} "\\n" call "\\n" {end}'
    calls = f'{calls} ("\\n" {calls})*' if several else calls
    if form.bare:
        calls = "call"
    if form.named:
        calls = f"call{'+' if several else ''}"
    if form.listed:
        further = '(", " call)*' if several else ""
        calls = f'{begin} "[" call {further} "]"'
    choices = []
    for number, function in enumerate(functions):
        before = f'{{"name": {json.dumps(function["name"])}, "{form.arguments}": '
        choice = f'{json.dumps(before)} arguments{number} "}}"'
        if form.named:
            name = json.dumps(function["name"])
            choice = f"{begin} {name} {language.literal(ARGUMENTS)} arguments{number}"
        choices.append(choice)
    arguments = {
        f"arguments{number}": language.json_rule(object_schema(function["parameters"]))
        for number, function in enumerate(functions)
    }
    return {"calls": calls, "call": " | ".join(choices)} | arguments


def object_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of arguments, which are an object whether it says so or not."""
    return {**schema, "type": "object"}


def thought_rules(
    language: LanguageProtocol, marks: tuple[str, str], thinking: bool
) -> tuple[str, dict[str, str]]:
    """The beginning of an answer that may think, and the rule that it names.

    thinking: the prompt has begun the thought.
    """
    begin, end = map(language.literal, marks)
    special = end.startswith("<[")
    thought = {"thought": f"{ANYTHING} {end}"} if special else {f"thought[suffix={end}]": ANYTHING}
    rules = thought | {"BREAK": r"/\s{0,2}/"}
    return ("thought BREAK" if thinking else f"({begin} thought BREAK)?"), rules


def grammar_of(start: str, rules: Mapping[str, str]) -> str:
    """The text of a grammar."""
    return "\n".join(f"{name}: {rule}" for name, rule in {"start": start, **rules}.items())
