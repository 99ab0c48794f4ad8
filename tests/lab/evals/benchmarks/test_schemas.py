"""Answers under schemas at a tiny size, and the check that decides whether an answer is valid."""

import json

import jsonschema
import pytest

from jaxkv.evals.benchmarks import schemas
from jaxkv.evals.lib.run import run
from jaxkv.models.generation.serving import Language, make_engine
from tests.tiny import write_tiny

BOX = {"shape": "box", "sides": [1, 2]}
CASES = {  # by schema: a valid answer, and invalid ones
    "nested objects": (
        {"name": "Ada", "address": {"city": "Oslo", "place": {"zip": 12345, "floor": -2}}},
        [{"name": "Ada", "address": {"city": "Oslo", "place": {"zip": 1234, "floor": -2}}},
         {"name": "Ada", "address": {"city": "Oslo"}}],
    ),
    "enums": ({"colour": "red", "size": None, "kind": "shirt"},
              [{"colour": "pink", "size": None, "kind": "shirt"}]),
    "bounds of numbers": (
        {"count": 1, "below": -1, "share": 0.5, "price": 1.25},
        [{"count": 1, "below": 0, "share": 0.5, "price": 1.25},
         {"count": 1, "below": -1, "share": 0.5, "price": 1.3},
         {"count": 1, "below": -1, "share": float("nan"), "price": 1.25}],
    ),
    "arrays": ({"tags": ["a"], "grid": [[1, 2], [3, 4]], "pair": [1, "a"]},
               [{"tags": [], "grid": [[1, 2], [3, 4]], "pair": [1, "a"]},
                {"tags": ["a"], "grid": [[1, 2], [3, 4]], "pair": [1, "a", 2]}]),
    "recursion": ([1, [[2], 3], [[[4]]]], [[1, [[2], 3], [[["4"]]]], [1, [2, 3]]]),
    "unicode": ({"größe": "🙂🙃", "名前": "日本", "слово": "мир"},
                [{"größe": "🙂🙃", "名前": "日", "слово": "мир"}]),
    "anyOf": ({"answer": BOX}, [{"answer": BOX | {"radius": 1}}, {"answer": 100}]),
    "optional members": ({"id": 1, "note": None}, [{"note": None}, {"id": 1, "note": 2}]),
    "lengths and dates": (
        {"date": "2024-02-29", "host": "10.0.0.1", "code": "abc", "plate": "AB-123"},
        [{"date": "2023-02-29", "host": "10.0.0.1", "code": "abc", "plate": "AB-123"},
         {"date": "2024-02-29", "host": "10.0.0.256", "code": "abc", "plate": "AB-123"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", schemas.JSON_SCHEMAS)
def test_the_check_tells_valid_answers_from_others(name):
    jsonschema.Draft202012Validator.check_schema(schemas.JSON_SCHEMAS[name])
    valid, invalid = CASES[name]
    grammar, text = schemas.GRAMMARS[name], json.dumps(valid)
    assert schemas.problem(grammar, text) == ""
    for value in invalid:
        assert schemas.problem(grammar, json.dumps(value))
    assert schemas.problem(grammar, text[:-1])


def test_the_check_matches_the_expression_with_all_of_an_answer():
    grammar = schemas.GRAMMARS["regular expression"]
    assert schemas.problem(grammar, "Ada Bo 12.50 €")  # a name has three letters or more
    assert schemas.problem(grammar, "Ada Bob 12.50 €") == ""
    assert schemas.problem(grammar, "Ada Bob 12.50 € ")


@pytest.mark.parametrize("limit, cut", [(2, 6), (256, 0)])
def test_an_answer_that_the_limit_ends_is_not_valid(limit, cut, llm, monkeypatch):
    monkeypatch.setattr(schemas, "LIMIT", limit)
    language, engine = Language(llm, "tiny"), make_engine(llm, max_batch=4)
    case = schemas.valid_answers(language, engine, schemas.GRAMMARS["enums"], 6)
    assert (case["valid"], case["invalid"], case["cut"]) == (6 - cut, cut, cut)
    assert [line["problem"] for line in case["problems"]] == ["ended by length"] * cut
    assert case["tokens"]["max"] <= limit


def test_the_record_of_the_speed(trials, tmp_path, monkeypatch):
    names = ("enums", "regular expression")
    monkeypatch.setattr(schemas, "GRAMMARS", {name: schemas.GRAMMARS[name] for name in names})
    model = write_tiny(tmp_path / "model", num_hidden_layers=1)
    run(schemas.MEASURE, ["speed", "--models", str(model), "--quick"])
    (file,) = trials.glob("schemas_speed.json")
    results = json.loads(file.read_text())["results"]
    assert results["schemas"].keys() == {*names}
    assert results["clients"]["changed"] == 0 and len(results["bars"]) == 4
    monkeypatch.setattr(schemas, "read", lambda name: {"results": results})
    assert schemas.speed_table().count("\n|") > 2


def test_an_answer_that_ends_early_is_refused():
    with pytest.raises(RuntimeError, match="must have 16 tokens, got 3"):
        schemas.check_tokens(3, 16)
