"""Grammars of answers that call tools, or that think before they obey a schema."""

from __future__ import annotations

import re
from dataclasses import replace

import jsonschema
import pytest

from jaxkv.errors import UserError
from jaxkv.models.generation.grammar import Grammar, matcher_of
from jaxkv.models.loading.added_tokens import AddedToken
from jaxkv.serve.http.tool_grammar import call_rules, grammar_of, thought_rules
from jaxkv.serve.http.tools import FORMS, HERMES, AnswerParser
from tests.models.test_grammar import walk
from tests.serve.http.fake import VOCAB, language
from tests.serve.http.test_tools import NOW, THINK, WEATHER, joined, tool


def call_grammar(form, tools, several):
    """A grammar of answers that are calls."""
    return grammar_of("calls", call_rules(language(), form, tools, several))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("several", [False, True])
def test_every_text_of_a_grammar_of_calls_calls_a_tool(form, several):
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = [WEATHER, {"type": "function", "function": NOW["function"] | {"parameters": empty}}]
    llm = language().llm
    matcher = matcher_of(llm, Grammar("grammar", call_grammar(form, tools, several)))
    texts = [text for seed in range(30) if (text := walk(matcher.copy(), seed)) is not None]
    counts = set()
    for text in texts:
        calls = joined(AnswerParser(form).push(text, last=True))
        counts.add(len(calls))
        for number, (at, name, arguments) in enumerate(calls):
            assert at == number
            parameters = {t["function"]["name"]: t["function"]["parameters"] for t in tools}[name]
            jsonschema.validate(arguments, parameters)
    assert len(texts) >= 10
    assert (counts > {1}) if several and not form.bare else (counts == {1})


@pytest.mark.parametrize("form", FORMS)
def test_references_in_a_tool_begin_at_its_own_schema(form):
    def tool(name, unit):
        schema = {
            "type": "object", "properties": {"unit": {"$ref": "#/$defs/unit"}},
            "required": ["unit"], "additionalProperties": False, "$defs": {"unit": {"const": unit}},
        }  # fmt: skip
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    grammar = call_grammar(form, [tool("heat", "K"), tool("length", "m")], several=False)
    matcher = matcher_of(language().llm, Grammar("grammar", grammar))
    calls = {
        (name, *arguments.items())
        for seed in range(30)
        for _, name, arguments in joined(
            AnswerParser(form).push(walk(matcher.copy(), seed), last=True)
        )
    }
    assert calls == {("heat", ("unit", "K")), ("length", ("unit", "m"))}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("parameters", [{}, {"properties": {"x": {}}}, {"title": "a"}])
def test_arguments_are_an_object_whatever_their_schema_says(form, parameters):
    grammar = call_grammar(form, [tool(name="a", parameters=parameters)], several=False)
    matcher = matcher_of(language().llm, Grammar("grammar", grammar))
    texts = [text for seed in range(30) if (text := walk(matcher.copy(), seed)) is not None]
    texts = [text for text in texts if not re.search(r"\d[eE]\+?\d{3}", text)]  # no floats
    assert texts
    for text in texts:
        assert len(joined(AnswerParser(form).push(text, last=True))) == 1


def obeys(grammar, text):
    """Whether a whole text obeys a grammar in Lark's form."""
    matcher = matcher_of(language().llm, Grammar("grammar", grammar))
    try:
        for byte in text.encode():
            matcher.advance(byte)
    except UserError:
        return False
    return matcher.complete


@pytest.mark.parametrize("thinking", [False, True])
def test_an_answer_may_think_before_it_obeys(thinking):
    start, rules = thought_rules(language(), THINK, thinking)
    grammar = grammar_of(f"{start} answer", rules | {"answer": '"yes" | "no"'})
    begin = "" if thinking else "<think>"
    assert obeys(grammar, f"{begin}Hm {{}} <b>\n</think>\n\nyes")
    assert obeys(grammar, f"{begin}</think>no")
    assert obeys(grammar, "yes") == (not thinking)
    assert not obeys(grammar, f"{begin}Hm</think>maybe")
    assert not obeys(grammar, f"{begin}Hm</think>x</think>yes")


def test_special_tokens_stand_in_a_grammar_by_their_ids():
    """The model has never seen them spelled from other tokens."""
    mark, end = AddedToken("<tool_call>", VOCAB), AddedToken("</think>", VOCAB + 1)
    spoken = language()
    tokenizer = spoken.llm.tokenizer
    spoken.llm.config.vocab = VOCAB + 2
    spoken.llm.tokenizer = replace(
        tokenizer, added=(mark, end), table=(*tokenizer.table, b"<tool_call>", b"</think>"),
        special=tokenizer.special | {mark.id, end.id},
    )  # fmt: skip
    start, thoughts = thought_rules(spoken, THINK, True)
    rules = call_rules(spoken, HERMES, [WEATHER], several=False)
    matcher = matcher_of(
        spoken.llm, Grammar("grammar", grammar_of(f"{start} calls", rules | thoughts))
    )
    for token in (*b"Hm.", end.id):
        matcher.advance(token)
    allowed = matcher.allowed()
    assert allowed[mark.id] and not allowed[ord("<")]
