"""Grammars: any text that a matcher allows obeys the schema, by other packages."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from types import SimpleNamespace
from typing import Literal

import jsonschema
import numpy as np
import pydantic
import pytest

from jaxkv import models
from jaxkv.errors import UserError
from jaxkv.models.generation.grammar import MAX_SIZE, Grammar, matcher_of
from jaxkv.models.loading.added_tokens import AddedToken
from tests.serve.http.fake import EOS, VOCAB, language

SCHEMAS = {
    "nested": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "at": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 99},
                               "y": {"type": "number", "minimum": 0, "maximum": 1}},
                "required": ["x", "y"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "at"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["red", "grün", "青", 7, None, True]},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    "recursion": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
    },
    "pattern": {"type": "string", "pattern": "^[0-9]{3}-[a-z]{2}$"},
    "anything": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def llm():
    """A model with a token for each byte."""
    fake = language().llm
    return SimpleNamespace(tokenizer=fake.tokenizer, eos=(EOS,), config=SimpleNamespace(vocab=300))


def walk(matcher, seed, limit=400):
    """A text whose tokens are drawn among those that are allowed; None for one without an end."""
    rng, ids = np.random.default_rng(seed), []
    while not matcher.ended:
        allowed = np.flatnonzero(matcher.allowed())
        assert set(allowed.tolist()) <= set(range(VOCAB)), "no padding of the embedding"
        if EOS in allowed and (len(ids) > limit // 4 or rng.random() < 0.5):
            assert matcher.complete
            break
        if len(ids) == limit:
            return None
        ids.append(int(rng.choice(allowed[allowed != EOS])))
        matcher.advance(ids[-1])
    return bytes(ids).decode()


@pytest.fixture(scope="module")
def changing(llm):
    """A model whose tokenizer drops spaces around a text and the second of two."""
    ids_of = lambda text, *_: [*" ".join(text.split()).encode()]
    return SimpleNamespace(**vars(llm) | {
        "tokenizer": dataclasses.replace(llm.tokenizer, ids_of=ids_of)
    })  # fmt: skip


def test_a_tokenizer_that_changes_texts_spells_what_must_come(changing):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    for grammar in (
        Grammar("json_schema", schema | {"additionalProperties": False}),
        Grammar("choice", [" two  spaces "]),
    ):
        matcher = matcher_of(changing, grammar)
        assert walk(matcher, 0) in ('{"a": true}', '{"a": false}', " two  spaces ")


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_text_obeys_its_schema(llm, name):
    schema, matcher = SCHEMAS[name], matcher_of(llm, Grammar("json_schema", SCHEMAS[name]))
    texts = [walk(matcher.copy(), seed) for seed in range(40)]
    complete = [text for text in texts if text is not None]
    assert len(complete) >= 10
    for text in complete:
        jsonschema.validate(json.loads(text), schema)


def test_every_text_matches_its_expression(llm):
    expression = r"(\+|-)?[0-9]{1,3}(\.[0-9]+)?|grün|[x-z]*"
    matcher = matcher_of(llm, Grammar("regex", expression))
    for seed in range(40):
        assert re.fullmatch(expression, walk(matcher.copy(), seed))


@pytest.mark.parametrize(
    ("kind", "value", "accepted"),
    [
        ("choice", ["red", "green", "gr"], {"red", "green", "gr"}),
        ("grammar", 'start: "yes" | "no"', {"yes", "no"}),
        ("grammar", 'root ::= "yes" | "no"', {"yes", "no"}),
    ],
)
def test_choices_and_grammars(llm, kind, value, accepted):
    matcher = matcher_of(llm, Grammar(kind, value))
    assert {walk(matcher.copy(), seed) for seed in range(60)} == accepted


def test_any_object(llm):
    matcher = matcher_of(llm, Grammar("json_object"))
    texts = [walk(matcher.copy(), seed) for seed in range(20)]
    assert all(isinstance(json.loads(text), dict) for text in texts if text is not None)
    matcher.advance(ord("{"))
    with pytest.raises(UserError, match="give a simpler grammar"):
        matcher.advance(ord("{"))


def requiring(*names, **properties):
    return {"type": "object", "properties": properties, "required": [*names]}


ROOT, A, B = ({"$ref": pointer} for pointer in ("#", "#/$defs/a", "#/$defs/b"))
CHAIN = {f"n{n}": requiring("x", x={"$ref": f"#/$defs/n{(n * 21 + 1) % 500}"}) for n in range(500)}
ENDLESS = [
    (requiring("x", x=ROOT), "got '#', which requires itself"),
    (requiring("x", x={"$ref": ""}), "got '', "),
    (requiring("x", x=ROOT) | {"type": ["object"]}, "got '#',"),
    (requiring("x") | {"additionalProperties": ROOT}, "got '#',"),
    ({**A, "$defs": {"a": requiring("b", b=B), "b": requiring("a", a=A)}}, "got '#/[$]defs/a'"),
    ({"type": "object", "minProperties": 1, "additionalProperties": ROOT}, "got '#',"),
    (
        {
            "type": "object",
            "minProperties": 1,
            "additionalProperties": False,
            "patternProperties": {"^[a-c]$": ROOT},
        },
        "got '#',",
    ),
    (requiring("a") | {"patternProperties": {"a": ROOT}, "additionalProperties": ROOT}, "got '#',"),
    ({"type": "array", "items": ROOT, "minItems": 1}, "got '#',"),
    ({"type": "array", "items": [ROOT], "minItems": 1}, "got '#',"),
    ({"type": "array", "prefixItems": [{"type": "null"}, ROOT], "minItems": 2}, "got '#',"),
    ({"anyOf": [requiring("x", x=ROOT), {"allOf": [ROOT]}]}, "got '#',"),
    ({"$ref": "#/$defs/n0", "$defs": CHAIN}, "got '#/[$]defs/n0',"),
    ({"$ref": "#/a~1b", "a/b": requiring("x", x={"$ref": "#/a~1b"})}, "got '#/a~1b',"),
    ({"$ref": "#/a%0A", "a\n": requiring("x", x={"$ref": "#/a\n"})}, r"got '#/a"),
    ({"anyOf": [{"allOf": [ROOT]} for _ in range(2000)]}, "got '#',"),
]
ENDING = [
    requiring(x=ROOT),
    {"type": "array", "items": ROOT},
    {"type": "object", "minProperties": 1, "additionalProperties": {"anyOf": [ROOT, {"const": 1}]}},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": ROOT, "minItems": 1},
    {"anyOf": [requiring("x", x=ROOT), {"type": "null"}]},
    {**A, "$defs": {"a": requiring("b", b=B), "b": requiring(a=A)}},
    {"$ref": "#/$defs/n0", "$defs": CHAIN | {"n77": {"type": "null"}}},
    requiring("x", x={"$ref": "#leaf"}) | {"$defs": {"leaf": {"$anchor": "leaf", "type": "null"}}},
]


@pytest.mark.parametrize("schema", ENDING)
def test_recursion_that_may_end(llm, schema):
    assert matcher_of(llm, Grammar("json_schema", schema)).allowed().any()


VERY_DEEP: dict = {}
for _ in range(5000):
    VERY_DEEP = {"items": VERY_DEEP}
DEEP = {"type": "integer"}
for _ in range(300):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("json_schema", {"not": {}}, r'Unimplemented keys: \["not"\]; leave them out'),
        ("json_schema", False, "must be an object, got False"),
        ("json_schema", [1], "must be an object, got"),
        ("json_schema", "{", "must be JSON, got"),
        ("json_schema", {"type": "strnig"}, "cannot be used"),
        ("json_schema", DEEP, "recursion limit exceeded"),
        ("json_schema", {**A, "$defs": {"a": A}}, "without end"),
        *(("json_schema", schema, message) for schema, message in ENDLESS),
        ("json_schema", requiring([]), "cannot be used"),
        ("json_schema", {"$ref": "#/anyOf/" + "1" * 4301, "anyOf": [{}]}, "cannot be used"),
        ("grammar", "\n" * MAX_SIZE, "cannot be used"),
        ("regex", "((a{100}){100}){100}", "too many expressions"),
        ("regex", "(a|b|c)?" * 7000, "may have 16384 characters, got 56000; give a shorter one"),
        ("json_schema", {"pattern": "(a|b|c)?" * 7000}, "may have 16384 characters"),
        ("json_schema", {"patternProperties": {"a?" * 9000: {}}}, "may have 16384 characters"),
        ("json_schema", {"$ref": "#/" + "a/" * 20_000}, "cannot be used.{0,350}$"),
        ("grammar", "".join(f"r{n} ::= r{n + 1}\n" for n in range(3000)), "may have 200 rules"),
        ("json_schema", {"enum": ["x" * MAX_SIZE]}, f"may have {MAX_SIZE} characters, got"),
        ("regex", "(a", "invalid regex.* unclosed group; correct it"),
        ("json_schema", {"pattern": "(?=a)b"}, "look-around"),
        ("json_schema", VERY_DEEP, "nested too deeply"),
        ("json_schema", {"const": 2**53 + 1}, r"at most 2\^53, got 9007199254740993"),
        ("json_schema", {"a": [{"x-guidance": {}}]}, "must not have x-guidance"),
        ("json_schema", {"const": object()}, "must be JSON, got"),
        ("json_schema", {"uniqueItems": True}, "Unimplemented keys.*; leave them out"),
        ("json_schema", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "use anyOf"),
        ("regex", r"[^\s\S]", "no text obeys it"),
        ("regex", "", "must be a text, got ''"),
        ("regex", 3, "must be a text, got 3"),
        ("choice", [], "at least one"),
        ("choice", "red", "list of texts"),
        ("choice", ["a", 2], "list of texts"),
        ("grammar", "start: foo", 'unknown name: "foo"'),
        ("grammar", "root ::= foo", "cannot be used"),
        ("yaml", "", "kind must be one of"),
    ],
)
def test_bad_grammars_are_refused_at_once(llm, kind, value, message):
    matcher_of(llm, Grammar("regex", "a"))  # the tokens are prepared once
    start = time.perf_counter()
    with pytest.raises(UserError, match=message) as refused:
        matcher_of(llm, Grammar(kind, value))
    assert time.perf_counter() - start < 0.5
    assert "\n" not in str(refused.value)


@pytest.mark.real_model
def test_the_real_model_obeys_a_schema(smollm2):
    prompts = ["A person as JSON: ", "x", "Numbers"]
    for temperature in (0.0, 1.0):
        answers = models.generate(
            smollm2, prompts, max_new_tokens=200, schema=SCHEMAS["nested"], seed=5,
            temperature=temperature,
        )  # fmt: skip
        for answer in answers:
            assert answer.finish_reason == "eos"
            jsonschema.validate(json.loads(answer.text), SCHEMAS["nested"])
    digits = models.Grammar("regex", "[0-9]{30}")
    answers = models.generate(smollm2, ["1", "2"], schema=digits, stop=["1"], seed=1)
    assert all(answer.finish_reason in ("stop", "eos") for answer in answers)
    expression = models.Grammar("regex", "[0-9]{4}")
    assert re.fullmatch("[0-9]{4}", models.generate(smollm2, "The year is", schema=expression).text)


def test_a_schema_without_an_end_is_refused(llm):
    with pytest.raises(UserError, match="leave ignore_eos out"):
        models.generation.text.matchers_of(llm, {}, 1, ignore_eos=True)


def test_added_tokens_in_a_grammar_are_text(llm):
    """A text that a grammar forces is tokenized, and none of it is an added token."""
    tokenizer = dataclasses.replace(
        llm.tokenizer, added=(AddedToken("<s>", 256), AddedToken("</s>", EOS))
    )
    marked = SimpleNamespace(tokenizer=tokenizer, eos=(EOS,), config=llm.config)
    for text in ("<s>", "a </s> b", "</s></s>"):
        matcher = matcher_of(marked, Grammar("choice", [text]))
        assert walk(matcher, 0) == text


def test_a_class_of_pydantic_is_a_schema(llm):
    class Person(pydantic.BaseModel):
        name: Literal["Ann"]

    text = walk(matcher_of(llm, Grammar("json_schema", Person)), 0)
    assert Person.model_validate_json(text) == Person(name="Ann")


def test_the_size_of_a_grammar_is_in_characters(llm):
    matcher_of(llm, Grammar("json_schema", {"const": "青" * (MAX_SIZE // 2)}))
