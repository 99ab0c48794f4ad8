"""The Responses API without stored state, by OpenAI's client."""

from __future__ import annotations

import json
import re

import pydantic
import pytest

from tests.serve.http.conftest import serving
from tests.serve.http.fake import FakeEngine, language
from tests.serve.http.test_tools import ROME, THINKING, WEATHER

TOOL = {"type": "function"} | WEATHER["function"]
ASK = {"model": "bytes", "tools": [TOOL]}


@pytest.fixture(scope="module")
def served():
    with serving(FakeEngine(), language(THINKING)) as served:
        yield served


def prompt_of(served):
    return bytes(t for t in served.engine.requests[-1].tokens if t < 256).decode()


def test_a_text(served):
    with served.client() as client:
        response = client.responses.create(
            model="bytes", instructions="Be kind.", input="x|Hello.", max_output_tokens=50
        )
    assert response.output_text == "Hello."
    assert (response.status, response.incomplete_details) == ("completed", None)
    assert response.instructions == "Be kind."
    assert response.usage.total_tokens == response.usage.input_tokens + 7
    assert prompt_of(served).startswith("[system]Be kind.[user]x")
    assert served.engine.requests[-1].max_new_tokens == 50


def test_a_loop_of_an_agent_ends(served):
    """A thought, a call, its output, and the answer; each turn sends the whole conversation."""
    items = [{"role": "user", "content": f"Rome?|<think>Hm.</think>Sure. {ROME}"}]
    with served.client() as client:
        response = client.responses.create(input=items, **ASK)
        kinds = [item.type for item in response.output]
        assert kinds == ["reasoning", "message", "function_call"]
        thought, message, call = response.output
        assert thought.content[0].text == "Hm."
        assert message.content[0].text == "Sure."
        assert json.loads(call.arguments) == {"city": "Rome"}
        items = [{"role": "user", "content": "Rome?"}, *response.output]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "17|Warm."}
        response = client.responses.create(input=[*items, output], **ASK)
    assert response.output_text == "Warm."
    assert '[assistant]Sure.[{"type": "function", "function": {"name": "weather"' in (
        prompt_of(served)
    )
    assert "[tool]17" in prompt_of(served)


def test_the_events_of_a_stream_add_up(served):
    with served.client() as client:
        text = f"x|<think>Hm.</think>Sure. {ROME}"
        with client.responses.stream(input=text, **ASK) as stream:
            events = list(stream)
            final = stream.get_final_response()
        complete = client.responses.create(input=text, **ASK)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    for response in (final, complete):
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        assert response.output_text == "Sure."
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == "Sure."
    calls = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    assert calls == complete.output[2].arguments
    added = [e for e in events if e.type == "response.output_item.added"]
    done = [e for e in events if e.type == "response.output_item.done"]
    assert [e.item.id for e in added] == [e.item.id for e in done] == [i.id for i in final.output]


def test_an_answer_that_is_cut_is_incomplete(served):
    with served.client() as client:
        response = client.responses.create(model="bytes", input="endless", max_output_tokens=9)
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        with client.responses.stream(model="bytes", input="endless", max_output_tokens=9) as stream:
            assert [event.type for event in stream][-1] == "response.incomplete"


def test_a_call_is_complete_though_the_answer_is_cut(served):
    """Its last event comes before those of what follows it."""
    text = f"x|{ROME} and so on"
    with served.client() as client:
        events = list(
            client.responses.create(input=text, max_output_tokens=len(ROME) + 3, stream=True, **ASK)
        )
    response = events[-1].response
    call, message = response.output
    assert (response.status, call.status, message.status) == (
        "incomplete", "completed", "incomplete"
    )  # fmt: skip
    kinds = [event.type for event in events]
    second = [n for n, kind in enumerate(kinds) if kind == "response.output_item.added"][1]
    assert kinds.index("response.output_item.done") < second


def test_a_response_says_which_settings_applied(served):
    with served.client() as client:
        response = client.responses.create(
            model="bytes", input="x|y", text={"verbosity": "low"}, top_p=0.5,
            reasoning={"summary": "auto"}, instructions="",
        )  # fmt: skip
    sampling = served.engine.requests[-1].sampling
    assert (response.temperature, response.top_p) == (sampling.temperature, 0.5)
    assert (response.text.format.type, response.text.verbosity) == ("text", "low")
    assert response.reasoning.summary == "auto"


def test_a_schema(served):
    class Person(pydantic.BaseModel):
        name: str

    with served.client() as client:
        response = client.responses.parse(
            model="bytes", input='x|{"name": "Ann"}', text_format=Person
        )
    assert response.output_parsed == Person(name="Ann")
    assert served.engine.requests[-1].matcher is not None


CALLED = [
    {"role": "user", "content": "a"},
    {"type": "reasoning", "content": [{"text": "b"}]},
    {"type": "function_call", "call_id": "b", "name": "now", "arguments": "{}"},
]


NESTED = NOW = {"type": "function", "name": "now"}
for _ in range(400):
    NESTED = {"type": "allowed_tools", "mode": "auto", "tools": [NESTED]}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
        ({"store": True}, "store", "stores no responses"),
        ({"background": True}, "background", "stores no responses"),
        ({"input": []}, "input", "at least one item"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "one of message"),
        ({"input": [{"type": [], "content": "a"}]}, "input[0].type", "one of message"),
        ({"tool_choice": NESTED, "tools": [NOW]}, "tool_choice.tools[0]", "of type function"),
        ({"tool_choice": {"type": "function", "name": "now", "x": 1}, "tools": [NOW]},
         "tool_choice", "'x'"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "any", "tools": [NOW]}, "tools": [NOW]},
         "tool_choice.mode", "one of auto, required"),
        ({"input": [*CALLED[:-1], {"type": "function_call_output", "call_id": 5, "output": "a"}]},
         "input[2].call_id", "a text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content.type", "input_text"),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0].role", "one of system"),
        ({"instructions": "a", "input": [{"role": "king", "content": "a"}]}, "input[0].role",
         "one of system"),
        ({"input": [*CALLED, {"type": "function_call", "call_id": "c", "name": "now",
                              "arguments": "5"}]},
         "input[3].arguments", "an object as JSON"),
        ({"input": [*CALLED, {"role": "king", "content": "a"}]}, "input[3].role", "one of system"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "the only tools"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "64 letters"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "text, json_object"),
        ({"max_output_tokens": 0}, "max_output_tokens", "from 1 to"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "one of none"),
        ({"imput": "a"}, "imput", "did you mean input?"),
        ({"include": 5}, "include", "a list"),
        ({"tools": 5}, "tools", "a list"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content", "a list"),
        ({"input": [{"type": "reasoning", "content": [{"text": 5}]}]}, "input[0].content.text",
         "a text"),
        ({"metadata": {"a": "\ud800"}}, "metadata", "surrogates"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "512 characters"),
        ({"reasoning": []}, "reasoning", "an object"),
        ({"text": {"verbosity": {}}}, "text.verbosity", "one of low"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
         "text.format.schema", "Unimplemented"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"include": ["web_search_call.results"]}, "include", "reasoning.encrypted_content"),
        ({"store": 0}, "store", "stores no responses"),
        ({"top_logprobs": False}, "top_logprobs", "not supported"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary", "one of auto"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0]", "nothing else"),
        # Texts of a request are not read as places of its fields.
        ({"input": [{"role": "messages[99]", "content": "a"}]}, "input[0].role",
         "got 'messages[99]'"),
        ({"tools": [TOOL | {"name": "messages[3]"}]}, "tools[0].name", "got 'messages[3]'"),
        ({"tools": [TOOL | {"name": "response_format"}] * 2}, "tools", "'response_format' twice"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(served, fields, param, words):
    answer = served.ask("POST", "/v1/responses", {"model": "bytes", "input": "x"} | fields)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert words in answer.error["message"]


def test_a_failure_in_a_stream_is_an_event(served):
    body = {"model": "bytes", "input": "x !fail", "stream": True}
    answer = served.ask("POST", "/v1/responses", body)
    assert answer.status == 200
    assert b"event: error\n" in answer.raw
    data = re.findall(rb"^data: (.*)$", answer.raw, re.MULTILINE)
    numbers = [json.loads(event)["sequence_number"] for event in data]
    assert len(numbers) > 3 and numbers == [*range(len(numbers))]
    assert not answer.raw.rstrip().endswith(b"[DONE]")
