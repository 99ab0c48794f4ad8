"""Answers that obey a schema: whether all are valid, and how much slower they come.

`valid`: each model answers many times under each of ten schemas, at temperature 1, through the
engine with 16 requests at a time. The package jsonschema decides whether an answer is valid, and
`re.fullmatch` under the regular expression. An answer that the limit of tokens ends is not valid.

`speed`: the first model, variants alternating in one process. `alone`: one request with and without
a schema; the time to first token contains the compilation of the schema. `clients`: four requests
alone, with a fifth one, and with a fifth one under a schema. All have equally many new tokens, and
the matcher of the fifth is compiled before, as the server does it in another thread. `schemas`:
milliseconds to compile each schema, and of each mask of an answer. Run it on an idle machine.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import jsonschema
import numpy as np

from jaxkv import models
from jaxkv.evals.lib.measured_on import DEFAULT, REAL
from jaxkv.evals.lib.record import read, spread
from jaxkv.evals.lib.run import SMOLLM2, Measure, Run, flag, run
from jaxkv.evals.lib.table import ranged, table
from jaxkv.evals.lib.timing import bar, rate, ratio, time_rounds
from jaxkv.evals.lib.verdict import Statement, within
from jaxkv.models import Grammar, Llm
from jaxkv.models.generation.grammar import Matcher
from jaxkv.models.generation.serving import Language, make_engine
from jaxkv.sampling import Sampling
from jaxkv.serve.engine import Engine, PrefixConfig, Request, ScoredToken, answer

Schema = dict[str, Any]
RECORDS = {"valid": "schemas_valid", "speed": "schemas_speed"}  # by subject
NAMES = {SMOLLM2: REAL, "default": DEFAULT}  # of models, by --models
PROMPT, LIMIT = "Answer in JSON.", 256  # of `valid`: the limit of new tokens
BATCH, CHUNK, BLOCKS = 16, 32, 8  # of its engine; the prompt is cached
CLIENTS = 4
SLOWER, CLIENTS_SLOWER = 1.10, 1.03  # bars: maximum
SAMPLING = Sampling(temperature=1.0)


def object_of(*required: str, **properties: Schema) -> Schema:
    """An object of these members alone. required: without any, all are."""
    names = [*(required or properties)]
    return {"type": "object", "properties": properties, "required": names,
            "additionalProperties": False}  # fmt: skip


def array_of(items: Schema, minimum: int, maximum: int) -> Schema:
    return {"type": "array", "items": items, "minItems": minimum, "maxItems": maximum}


def text_of(maximum: int, **extra: Any) -> Schema:
    return {"type": "string", "maxLength": maximum, **extra}


def integer_of(minimum: int, maximum: int) -> Schema:
    return {"type": "integer", "minimum": minimum, "maximum": maximum}


NESTED = object_of(
    name=text_of(8),
    address=object_of(
        city={"enum": ["Paris", "Oslo", "Lima"]},
        place=object_of(zip=integer_of(10000, 99999), floor=integer_of(-2, 40)),
    ),
)
NODE = {"$ref": "#/$defs/node"}
TREE = {  # small models do not end chains of objects, so this one is of arrays
    "type": "array",
    "prefixItems": [integer_of(0, 9), array_of(NODE, 1, 2), NODE],
    "items": False, "minItems": 3,
    "$defs": {"node": {"anyOf": [integer_of(0, 9), array_of(NODE, 1, 2)]}},
}  # fmt: skip
SHAPES = [
    object_of(shape={"const": "circle"}, radius=integer_of(1, 9)),
    object_of(shape={"const": "box"}, sides=array_of(integer_of(1, 9), 2, 3)),
    integer_of(0, 99), {"type": "null"}, text_of(5),
]  # fmt: skip
JSON_SCHEMAS = {
    "nested objects": NESTED,
    "enums": object_of(
        colour={"enum": ["red", "green", "blue", "dark blue"]},
        size={"enum": [1, 2.5, "XL", None, True]},
        kind={"const": "shirt"},
    ),
    "bounds of numbers": object_of(
        count=integer_of(1, 10),
        below={"type": "integer", "exclusiveMinimum": -1000, "exclusiveMaximum": 0},
        share={"type": "number", "minimum": 0, "maximum": 1},
        price={"type": "number", "minimum": 0.5, "exclusiveMaximum": 20, "multipleOf": 0.25},
    ),
    "arrays": object_of(
        tags=array_of(text_of(6), 1, 3),
        grid=array_of(array_of(integer_of(0, 9), 2, 2), 2, 2),
        pair={"type": "array", "prefixItems": [integer_of(0, 99), text_of(4)], "items": False,
              "minItems": 2},
    ),
    "recursion": TREE,
    "unicode": object_of(**{
        "größe": {"enum": ["klein", "groß", "日本語", "🙂🙃"]},
        "名前": text_of(6, minLength=2),
        "слово": {"type": "string", "pattern": "^[а-яё]{1,6}$"},
    }),
    "anyOf": object_of(answer={"anyOf": SHAPES}),
    "optional members": object_of(
        "id",
        id=integer_of(0, 999),
        name=text_of(6),
        tags=array_of({"enum": ["a", "b"]}, 0, 2),
        open={"type": "boolean"},
        note={"type": ["string", "null"], "maxLength": 6},
    ),
    "lengths and dates": object_of(
        date={"type": "string", "format": "date"},
        host={"type": "string", "format": "ipv4"},
        code=text_of(5, minLength=3),
        plate={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    ),
}  # fmt: skip
EXPRESSION = r"(?:[A-Z][a-z]{2,6} ){1,3}[0-9]{1,3}(?:\.[0-9]{2})?(?: €|%)?|n/a"
GRAMMARS = {name: Grammar("json_schema", schema) for name, schema in JSON_SCHEMAS.items()} | {
    "regular expression": Grammar("regex", EXPRESSION)
}
# Of `speed`: no answer ends before its limit of tokens.
LONG = Grammar("json_schema", array_of(NESTED, 8, 99))


class Sizes(NamedTuple):
    """The sizes of `speed`: rounds, new tokens of a request, compilations of a schema."""

    rounds: int
    new: int
    compilations: int


def measure(run: Run) -> dict[str, Any]:
    """One of the two subjects."""
    names = run.options.models
    if run.options.subject == "speed":
        sizes = Sizes(2, 16, 2) if run.options.quick else Sizes(run.options.rounds, 96, 9)
        return speed(load(run, names[0]), sizes)
    count = min(4, run.options.answers) if run.options.quick else run.options.answers
    return valid({NAMES.get(name, name): partial(load, run, name) for name in names}, count)


def load(run: Run, name: str) -> Llm:
    """A model in float32, whose files the record names."""
    llm = models.load(*([] if name == "default" else [name]), dtype="float32")
    run.record.add(llm.files)
    return llm


def valid(loads: dict[str, Callable[[], Llm]], count: int) -> dict[str, Any]:
    """The valid answers under each schema. loads: functions that load the models, by name."""
    by_model: dict[str, dict[str, Any]] = {}
    bars = []
    for name, load_model in loads.items():
        language = Language(load_model(), name)
        prefixes = PrefixConfig(num_blocks=BLOCKS)
        engine = make_engine(language.llm, max_batch=BATCH, chunk=CHUNK, prefix_cache=prefixes)
        by_model[name] = {}
        for title, grammar in GRAMMARS.items():
            start = perf_counter()
            by_model[name][title] = valid_answers(language, engine, grammar, count)
            seconds = perf_counter() - start
            print(f"{name}, {title}: {seconds:.0f} s", file=sys.stderr, flush=True)
        fewest = min(case["valid"] for case in by_model[name].values())
        title = f"valid answers of {count} under the schema with fewest, {name}"
        bars.append(bar(title, fewest, ">=", count))
    schemas = {title: grammar.value for title, grammar in GRAMMARS.items()}
    settings = {"prompt": PROMPT, "temperature": SAMPLING.temperature, "max_new_tokens": LIMIT}
    return {"answers": count, **settings, "schemas": schemas, "models": by_model, "bars": bars}


def valid_answers(
    language: Language, engine: Engine, grammar: Grammar, count: int
) -> dict[str, Any]:
    """How many answers are valid, and the others with their problems. cut: ended by LIMIT."""
    matcher = language.matcher(grammar.kind, grammar.value)
    prompt = prompt_ids(language, PROMPT)
    requests = [
        Request(prompt, LIMIT, SAMPLING, seed, eos=language.eos, matcher=matcher.copy())
        for seed in range(count)
    ]
    answers = answer(engine, requests)
    texts = [text_of_tokens(language, collected.tokens) for collected in answers]
    reasons = [collected.outcome.reason for collected in answers]
    problems = [
        problem(grammar, text) if reason == "eos" else f"ended by {reason}"
        for text, reason in zip(texts, reasons, strict=True)
    ]
    tokens = [len(collected.tokens) for collected in answers]
    invalid = [
        {"text": text, "problem": reason}
        for text, reason in zip(texts, problems, strict=True) if reason
    ]  # fmt: skip
    return {
        "valid": problems.count(""), "invalid": len(invalid), "cut": reasons.count("length"),
        "distinct": len(set(texts)), "problems": invalid,
        "tokens": {"mean": float(np.mean(tokens)), "min": min(tokens), "max": max(tokens)},
    }  # fmt: skip


def prompt_ids(language: Language, text: str) -> tuple[int, ...]:
    return tuple(language.render([{"role": "user", "content": text}]))


def text_of_tokens(language: Language, tokens: Sequence[int]) -> str:
    output = language.detokenizer((), language.eos)
    return "".join(map(output.push, tokens)) + output.end("length")


def problem(grammar: Grammar, text: str) -> str:
    """Why a text does not obey a grammar, checked without llguidance; "" if it obeys."""
    if grammar.kind == "regex":
        return "" if re.fullmatch(grammar.value, text) else "the expression does not match"
    try:
        value = json.loads(text, parse_constant=refuse)
    except ValueError as error:
        return str(error)
    validator = jsonschema.Draft202012Validator
    errors = validator(grammar.value, format_checker=validator.FORMAT_CHECKER).iter_errors(value)
    return next((error.message for error in errors), "")


def refuse(constant: str) -> None:
    """Raise ValueError: Python reads NaN and Infinity, which are no JSON."""
    raise ValueError(f"{constant} is no JSON")


def speed(llm: Llm, sizes: Sizes) -> dict[str, Any]:
    """One request, the other clients of a batch, and each schema."""
    language = Language(llm, "model")
    start = perf_counter()
    language.matcher(LONG.kind, LONG.value)
    vocabulary = perf_counter() - start  # the first matcher of a model
    single = make_engine(llm, max_batch=1)
    alone = alone_times(language, single, sizes)
    clients = client_times(language, make_engine(llm, max_batch=2 * CLIENTS), sizes)
    schemas = {
        name: schema_times(language, single, grammar, sizes.compilations)
        for name, grammar in GRAMMARS.items()
    }
    return {
        "new_tokens": sizes.new, "clients_count": CLIENTS, "first_matcher_seconds": vocabulary,
        "alone": alone, "clients": clients, "schemas": schemas,
        "bars": [
            bar("time to first token, with a schema over without", alone["first_token"]["over"],
                "<=", SLOWER),
            bar("seconds per token after the first, with a schema over without",
                alone["token"]["over"], "<=", SLOWER),
            bar(f"seconds of {CLIENTS} clients, a fifth one with a schema over one without",
                clients["over"], "<=", CLIENTS_SLOWER),
            bar(f"answers of {CLIENTS} clients that a fifth one changes", clients["changed"], "<=",
                0),
        ],
    }  # fmt: skip


def alone_times(language: Language, engine: Engine, sizes: Sizes) -> dict[str, Any]:
    """Time to first token and tokens per second of one request, with a schema and without."""
    prompt = prompt_ids(language, f"Answer with JSON of this schema: {json.dumps(LONG.value)}")

    def ask(grammar: Grammar | None) -> tuple[float, float]:
        start = perf_counter()
        matcher = grammar and language.matcher(grammar.kind, grammar.value)
        compiled = perf_counter() - start
        (collected,) = answer(engine, [request_of(prompt, sizes.new, 0, matcher, None)])
        check_tokens(len(collected.tokens), sizes.new)
        outcome = collected.outcome
        first = outcome.first_token_seconds
        return compiled + first, (outcome.total_seconds - first) / (sizes.new - 1)

    variants = {"without": partial(ask, None), "with": partial(ask, LONG)}
    pairs = time_rounds(variants, sizes.rounds, "one request")
    first, token = (
        {name: [pair[part] for pair in of_name] for name, of_name in pairs.items()}
        for part in (0, 1)
    )
    return {
        "prompt_tokens": len(prompt),
        "first_token": {
            "seconds": {name: spread(seconds) for name, seconds in first.items()},
            "over": ratio(first["with"], first["without"]),
        },
        "token": {
            "tokens_per_second": {name: rate(1, seconds) for name, seconds in token.items()},
            "over": ratio(token["with"], token["without"]),
        },
    }


def request_of(
    prompt: tuple[int, ...], new: int, seed: int, matcher: Matcher | None, logprobs: int | None = 0
) -> Request:
    """A request of exactly `new` tokens, by default with their log probabilities."""
    return Request(prompt, new, SAMPLING, seed, logprobs=logprobs, matcher=matcher)


def check_tokens(tokens: int, new: int) -> None:
    """Raise RuntimeError for an answer that ended early: its time would not compare."""
    if tokens != new:
        raise RuntimeError(f"an answer must have {new} tokens, got {tokens}; use a longer schema")


def client_times(language: Language, engine: Engine, sizes: Sizes) -> dict[str, Any]:
    """Tokens per second of some clients: alone, with another one, and with one under a schema."""
    texts = [f"Tell me a story about {subject}." for subject in ("Rome", "a cat", "snow", "a king")]
    requests = [
        request_of(prompt_ids(language, text), sizes.new, seed, None)
        for seed, text in enumerate(texts[:CLIENTS])
    ]
    compiled = language.matcher(LONG.kind, LONG.value)
    prompt = prompt_ids(language, PROMPT)
    answers: dict[str, list[list[list[ScoredToken]]]] = {}

    def ask(name: str, matchers: Sequence[Matcher | None]) -> float:
        fifth = [
            request_of(prompt, sizes.new, CLIENTS, matcher and matcher.copy())
            for matcher in matchers
        ]
        collected = answer(engine, [*requests, *fifth])
        for entry in collected:
            check_tokens(len(entry.tokens), sizes.new)
        clients = collected[: len(requests)]
        answers.setdefault(name, []).append([entry.scored for entry in clients])
        return max(entry.outcome.total_seconds for entry in clients)

    variants = {
        "alone": partial(ask, "alone", []),
        "with another": partial(ask, "with another", [None]),
        "with one under a schema": partial(ask, "with one under a schema", [compiled]),
    }
    seconds = time_rounds(variants, sizes.rounds, "clients")
    expected = answers["alone"][0]
    changed = sum(
        client != first
        for rounds in answers.values()
        for clients in rounds
        for client, first in zip(clients, expected, strict=True)
    )
    tokens = len(requests) * sizes.new
    return {
        "tokens_per_second": {name: rate(tokens, taken) for name, taken in seconds.items()},
        "over": ratio(seconds["with one under a schema"], seconds["with another"]),
        "over_alone": ratio(seconds["with one under a schema"], seconds["alone"]),
        "changed": changed,
    }


def schema_times(
    language: Language, engine: Engine, grammar: Grammar, count: int
) -> dict[str, dict[str, float]]:
    """Milliseconds to compile a schema, and of each mask of an answer."""
    compiled, masks = [], []
    for _ in range(count):
        start = perf_counter()
        matcher = language.matcher(grammar.kind, grammar.value)
        compiled.append(1e3 * (perf_counter() - start))
    prompt = prompt_ids(language, PROMPT)
    request = Request(prompt, LIMIT, SAMPLING, eos=language.eos, matcher=matcher.copy())
    (collected,) = answer(engine, [request])
    for token in collected.tokens:
        start = perf_counter()
        matcher.allowed()
        masks.append(1e3 * (perf_counter() - start))
        if token not in language.eos:
            matcher.advance(token)
    return {"compile_milliseconds": spread(compiled), "mask_milliseconds": spread(masks)}


def valid_table() -> str:
    """A row per schema: valid answers and tokens of each model."""
    results = read(RECORDS["valid"])["results"]
    by_model = results["models"]
    heads = [f"{part}, {name}" for name in by_model for part in ("valid", "tokens")]
    rows = []
    for title in results["schemas"]:
        cells = []
        for cases in by_model.values():
            cells += [cases[title]["valid"], ranged(cases[title]["tokens"], "mean", ".0f")]
        rows.append((title, *cells))
    caption = (
        f"Valid answers of {results['answers']}, and their tokens, means with the range. An answer "
        f"may have {results['max_new_tokens']} tokens:"
    )
    return table(("schema", *heads), rows, caption)


def speed_table() -> str:
    """Times with a schema and without, of one request and of other clients."""
    results = read(RECORDS["speed"])["results"]
    heads = ("measured", "without a schema", "with a schema", "time, with over without")
    first, token = results["alone"]["first_token"], results["alone"]["token"]
    clients = results["clients"]
    rates = clients["tokens_per_second"]
    rows = [
        ("one request, seconds to the first token",
         *(ranged(first["seconds"][name], "median", ".3f") for name in ("without", "with")),
         ranged(first["over"], "median", ".3f")),
        ("one request, tokens per second after it",
         *(ranged(token["tokens_per_second"][name], "median", ".1f")
           for name in ("without", "with")),
         ranged(token["over"], "median", ".3f")),
        (f"{results['clients_count']} other clients, tokens per second",
         *(ranged(rates[name], "median", ".1f")
           for name in ("with another", "with one under a schema")),
         ranged(clients["over"], "median", ".3f")),
    ]  # fmt: skip
    caption = (
        f"{results['new_tokens']} new tokens of each request, medians of {first['over']['n']} "
        f"rounds with the range. Without a fifth request, the four clients get "
        f"{ranged(rates['alone'], 'median', '.1f')} tokens per second. The first schema of a "
        f"process takes {results['first_matcher_seconds']:.1f} seconds."
    )
    return table(heads, rows, caption)


def others_than(results: dict[str, Any], part: str) -> dict[str, int]:
    """The invalid answers of each model without this part."""
    return {
        name: sum(part not in line["text"] for case in cases.values() for line in case["problems"])
        for name, cases in results["models"].items()
    }


TABLES = {"schemas_valid": valid_table, "schemas_speed": speed_table}
STATEMENTS = (
    Statement("docs/results/speed.md", "Every answer of SmolLM2 is valid", "schemas_valid",
              [within(f"models/{REAL}/{{schema}}/invalid")]),
    Statement("docs/results/speed.md",
              "The default model has invalid answers under one schema: dates of the year 0000",
              "schemas_valid",
              [within(lambda results: others_than(results, '"date": "0000-'))]),
)  # fmt: skip
MEASURE = Measure(
    lambda options: RECORDS[options.subject], measure,
    [flag("subject", choices=RECORDS),
     flag("--models", (SMOLLM2, "default"), "`default` or names as of --model elsewhere"),
     flag("--answers", 200, "of each model and schema", minimum=1),
     flag("--rounds", 9, "of each comparison", minimum=1)],
)  # fmt: skip

if __name__ == "__main__":
    run(MEASURE)
