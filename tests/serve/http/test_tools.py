"""Tool calls, thoughts and structured answers over HTTP, also by OpenAI's client."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import canitoolcall
import pytest

from jaxkv.errors import UserError
from jaxkv.serve.http import tools
from jaxkv.serve.http.tools import (
    BARE,
    HERMES,
    LISTED,
    NAMED,
    THOUGHTS,
    AnswerParser,
    Call,
    Content,
    Thought,
    thought_marks,
    tool_form,
)
from tests.models.test_grammar import walk
from tests.serve.http.conftest import serving
from tests.serve.http.fake import FakeEngine, language

THINK = THOUGHTS[0]
TEMPLATE = (
    '{% if tools %}Write <tool_call>{"name": ...}</tool_call>. {{ tools | tojson }}{% endif %}'
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}[assistant]"
)
THINKING = TEMPLATE + "{% if think %}<think>\n{% endif %}"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 9}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
RESPONSE_TOOL = {"type": "function"} | WEATHER["function"]
NOW = {"type": "function", "function": {"name": "now"}}
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def joined(parts):
    """The parts, with neighbours of a kind joined, and without the ids of calls."""
    result = []
    for part in parts:
        if isinstance(part, Call):
            result.append((part.number, part.name, json.loads(part.arguments)))
        elif result and isinstance(result[-1], type(part)):
            result[-1] = type(part)(result[-1].text + part.text)
        else:
            result.append(part)
    return result


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (HERMES, f"Let me see. {ROME}", [Content("Let me see."), (0, "weather", {"city": "Rome"})]),
        (HERMES, f"{ROME}\n{ROME}", [(n, "weather", {"city": "Rome"}) for n in (0, 1)]),
        (HERMES, f"<think>\nHm.\n</think>\n\n{ROME}\n",
         [Thought("Hm."), (0, "weather", {"city": "Rome"})]),
        (HERMES, "<think>Hm", [Thought("Hm")]),
        (HERMES, "a <b>c</b> <tool", [Content("a <b>c</b> <tool")]),
        (HERMES, "<tool_call>{bad}</tool_call> b", [Content("<tool_call>{bad}</tool_call> b")]),
        (HERMES, '<tool_call>{"name": "a", "arguments": {"x": "</tool_call>"}}</tool_call>',
         [(0, "a", {"x": "</tool_call>"})]),
        (NAMED, '[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[CALL_ID]123[ARGS]{}',
         [(0, "a", {"x": 1}), (1, "b", {})]),
        (HERMES, '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
         [Content('<tool_call>{"name": 3, "arguments": {}}</tool_call>')]),
        (LISTED, '[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]',
         [(0, "a", {}), (1, "b", {})]),
        (LISTED, "Hello [TOOL", [Content("Hello [TOOL")]),
        (BARE, '{"name": "a", "parameters": {"x": "é"}}', [(0, "a", {"x": "é"})]),
        (BARE, '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}',
         [(0, "a", {}), (1, "b", {})]),
        (BARE, '{"x": 1}', [Content('{"x": 1}')]),
        (BARE, '{"name": "Ann", "age": 3}', [Content('{"name": "Ann", "age": 3}')]),
        (HERMES, "Write <tool_call> to call. So.", [Content("Write <tool_call> to call. So.")]),
        (HERMES, '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
         [Content('<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>')]),
        (HERMES, '<tool_call>{"name": "a", "arguments": {"x": "\\ud83d"}}</tool_call>',
         [Content('<tool_call>{"name": "a", "arguments": {"x": "\\ud83d"}}</tool_call>')]),
        (NAMED, "[TOOL_CALLS]a[ARGS]{bad", [Content("[TOOL_CALLS]a[ARGS]{bad")]),
        (None, "  <think>a</think> b\n", [Thought("a"), Content("b\n")]),
        (None, "  x <think>a</think> ", [Content("  x <think>a</think> ")]),
        (None, "", []),
    ],
)  # fmt: skip
def test_an_answer_is_divided_alike_in_any_pieces(form, text, expected):
    rng = random.Random(0)
    for _ in range(100):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 9)))
        parser, parts = AnswerParser(form, THINK), []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            parts += parser.push(text[start:end])
        parts += parser.push("", last=True)
        assert joined(parts) == expected
        assert parser.called == any(isinstance(part, Call) for part in parts)


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (HERMES, f"Hm {ROME[:-20]}", [Content("Hm")]),
        (HERMES, "Hm <tool_c", [Content("Hm ")]),
        (NAMED, '[TOOL_CALLS]a[ARGS]{"x', []),
        (BARE, '{"name": "a", "par', []),
        (BARE, ' {"na', []),
        (BARE, '{"answer": [1, 2', [Content('{"answer": [1, 2')]),
        (BARE, '<|python_tag|>{"x', []),
    ],
)
def test_only_the_limit_of_tokens_leaves_a_beginning_of_a_call_out(form, text, expected):
    assert joined(AnswerParser(form).push(text, last=True, cut=True)) == expected
    assert "".join(part.text for part in AnswerParser(form).push(text, last=True)) == text


def test_one_call_alone_is_shown_without_parallel_calls():
    parts = AnswerParser(HERMES, several=False).push(f"{ROME}\n{ROME} Hm.", last=True)
    assert joined(parts) == [(0, "weather", {"city": "Rome"}), Content("Hm.")]


@pytest.mark.parametrize("form", [HERMES, NAMED])
def test_long_arguments_are_read_once(form, monkeypatch):
    """Otherwise a call of a page with many braces would halt all streams for seconds."""
    reads, decoder = [], tools.DECODER
    count = lambda text, start: reads.append(len(text)) or decoder.raw_decode(text, start)
    monkeypatch.setattr(tools, "DECODER", SimpleNamespace(raw_decode=count))
    arguments = {"code": ["if (x) { y }"] * 500, "n": [{"a": {}}] * 100}
    text = f"<tool_call>{json.dumps({'name': 'a', 'arguments': arguments})}</tool_call>"
    if form is NAMED:
        text = f"[TOOL_CALLS]a[ARGS]{json.dumps(arguments)}"
    parser = AnswerParser(form)
    parts = [part for character in text for part in parser.push(character)]
    assert joined(parts) == [(0, "a", arguments)]
    assert len(reads) <= 2


def test_templates_have_forms():
    assert tool_form("... <tool_call> ...") is HERMES
    for other in ("<function=name>", "<arg_key>key</arg_key>"):  # Qwen3-Coder, GLM
        assert tool_form(f"... <tool_call>{other} ...") is None
    assert tool_form("[TOOL_CALLS]") is LISTED
    assert tool_form("[TOOL_CALLS] + name + [ARGS]") is NAMED
    assert thought_marks("... [THINK] ...") == ("[THINK]", "[/THINK]")
    assert thought_marks(None) is thought_marks("plain") is None
    assert tool_form('{"name": function name, "parameters": dictionary}') is BARE
    assert tool_form(None) is tool_form("plain") is None


@pytest.fixture(scope="module")
def served():
    with serving(FakeEngine(), language(THINKING)) as served:
        yield served


def test_comments_come_while_a_call_is_written():
    message = {"role": "user", "content": f"|{ROME}"}
    ask = {"model": "bytes", "messages": [message], "tools": [WEATHER], "stream": True}
    engine = FakeEngine(pause=0.01)
    with serving(engine, language(TEMPLATE), comment_seconds=0.1) as served:
        raw = served.ask("POST", "/v1/chat/completions", ask).raw
        assert raw.count(b": waiting") >= len(ROME) * 0.01 / 0.1 / 3
        ask = {"model": "bytes", "input": f"|{ROME}", "stream": True, "tools": [RESPONSE_TOOL]}
        assert b": waiting" in served.ask("POST", "/v1/responses", ask).raw


def test_a_call_is_one_of_openai(served):
    with served.client() as client:
        ask = {"model": "bytes", "tools": [WEATHER, NOW]}
        messages = [{"role": "user", "content": f"Rome?|Sure. {ROME}"}]
        answer = client.chat.completions.create(messages=messages, **ask)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Sure."
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "weather")
        assert json.loads(call.function.arguments) == {"city": "Rome"}
        # The next turn has the call and its result.
        result = {"role": "tool", "tool_call_id": call.id, "content": "17 degrees|Warm."}
        answer = client.chat.completions.create(
            messages=[{"role": "user", "content": "Rome?"}, choice.message, result], **ask
        )
    assert answer.choices[0].message.content == "Warm."
    assert answer.choices[0].finish_reason == "stop"
    prompt = bytes(t for t in served.engine.requests[-1].tokens if t < 256).decode()
    assert "[tool]17 degrees" in prompt
    assert json.dumps(WEATHER) in prompt
    assert '"arguments": {"city": "Rome"}' in prompt


def test_a_streamed_call_adds_up(served):
    with served.client() as client:
        text = f"x|<think>Hm.</think>One. {ROME}\n{ROME}"
        messages = [{"role": "user", "content": text}]
        chunks = list(client.chat.completions.create(
            model="bytes", tools=[WEATHER], messages=messages, stream=True
        ))  # fmt: skip
        answer = client.chat.completions.create(model="bytes", tools=[WEATHER], messages=messages)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    message = answer.choices[0].message
    assert "".join(delta.content or "" for delta in deltas) == message.content == "One."
    thoughts = "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas)
    assert thoughts == message.reasoning_content == "Hm."
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    for index, call in enumerate(message.tool_calls):
        parts = [part for part in calls if part.index == index]
        assert parts[0].id and parts[0].function.name == call.function.name
        assert not any(part.id or part.function.name for part in parts[1:])
        assert "".join(part.function.arguments for part in parts) == call.function.arguments
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == answer.choices[0].finish_reason == "tool_calls"
    assert set(reasons[:-1]) == {None}


def test_a_thought_that_the_prompt_begins(served):
    answer = served.chat("x|Hm.</think>Yes.", chat_template_kwargs={"think": True})
    message = answer.json["choices"][0]["message"]
    # The answer of the fake engine ends before the prompt's last words.
    assert message["reasoning_content"] == "Hm."
    assert message["content"].startswith("Yes.")


JSON = {"response_format": {"type": "json_object"}}
REQUIRED = {"tools": [WEATHER], "tool_choice": "required"}
OBJECT = '{"name": "a"}'


@pytest.mark.parametrize("think", [False, True])
@pytest.mark.parametrize(
    ("fields", "texts", "refused"),
    [
        (JSON, [OBJECT], [ROME, "Yes."]),
        (JSON | {"tools": [WEATHER]}, [OBJECT, ROME], ["Yes."]),
        (JSON | {"tools": [WEATHER], "tool_choice": "none"}, [OBJECT], [ROME]),
        (REQUIRED, [ROME, f"{ROME}\n{ROME}"], [OBJECT]),
        (REQUIRED | {"parallel_tool_calls": False}, [ROME], [f"{ROME}\n{ROME}"]),
    ],
)
def test_a_grammar_has_all_parts_of_an_answer(served, think, fields, texts, refused):
    """A schema, calls of tools beside it, and thoughts before both."""
    for text in (*texts, *refused):
        written = f"Hm.</think>\n\n{text}" if think else text
        fields = fields | {"chat_template_kwargs": {"think": think}}
        message = served.chat(f"x|{written}", **fields).json["choices"][0]["message"]
        matcher = served.engine.requests[-1].matcher
        try:
            for byte in written.encode():
                matcher.advance(byte)
        except UserError:
            assert text in refused
            continue
        assert matcher.complete and text in texts
        assert message.get("reasoning_content") == ("Hm." if think else None)
        assert len(message.get("tool_calls", ())) == text.count("<tool_call>")
        assert (message["content"] or "").startswith(text if text == OBJECT else "")


def test_a_grammar_of_its_own_has_no_tools_and_no_thoughts(served):
    answer = served.chat("x|Yes.", guided_regex="Yes.", tools=[WEATHER])
    assert (answer.status, answer.error["param"]) == (400, "guided_regex")
    fields = {"chat_template_kwargs": {"think": True}}
    answer = served.chat("x|Yes.", guided_regex="Yes\\.", **fields).json["choices"][0]["message"]
    assert answer["content"].startswith("Yes.")


def test_tokens_of_thoughts_are_counted(served):
    text = "x|<think>\nHm.</think>Yes."
    ask = {"model": "bytes", "messages": [{"role": "user", "content": text}]}
    with served.client() as client:
        complete = client.chat.completions.create(**ask)
        *_, last = client.chat.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}
        )
        response = client.responses.create(model="bytes", input=text)
        *_, end = client.responses.create(model="bytes", input=text, stream=True)
    for usage in (complete.usage, last.usage):
        assert usage.completion_tokens_details.reasoning_tokens == len("\nHm.")
    for usage in (response.usage, end.response.usage):
        assert usage.output_tokens_details.reasoning_tokens == len("\nHm.")


def test_an_agent_with_two_tools_ends(served):
    """It asks, calls both tools at once, then one, and answers."""
    now = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    script = ["Rome now?|" + f"{ROME}\n{now}", f"later|{now}", "|17 degrees at noon."]
    results = {"weather": "17 degrees", "now": "noon"}
    messages, called = [{"role": "user", "content": script[0]}], []
    with served.client() as client:
        while True:
            choice = client.chat.completions.create(
                model="bytes", messages=messages, tools=[WEATHER, NOW]
            ).choices[0]
            if choice.finish_reason != "tool_calls":
                break
            messages = [{"role": "user", "content": "Rome now?"}, choice.message]
            script = script[1:]
            for number, call in enumerate(choice.message.tool_calls):
                called.append((call.function.name, json.loads(call.function.arguments)))
                last = number == len(choice.message.tool_calls) - 1
                content = results[call.function.name] + (script[0] if last else "")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    assert called == [("weather", {"city": "Rome"}), ("now", {}), ("now", {})]
    assert choice.message.content == "17 degrees at noon."


def test_helpers_of_openai(served):
    """`parse` of a class, and the stream that gathers its parts."""
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str

    ask = {"model": "bytes", "messages": [{"role": "user", "content": f"x|{OBJECT}"}]}
    with served.client() as client:
        parsed = client.chat.completions.parse(**ask, response_format=Person)
        with client.chat.completions.stream(**ask, response_format=Person) as stream:
            streamed = stream.get_final_completion()
        ask["messages"] = [{"role": "user", "content": f"x|{ROME}"}]
        strict = WEATHER | {"function": WEATHER["function"] | {"strict": True}}
        with client.chat.completions.stream(**ask, tools=[strict]) as stream:
            (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert parsed.choices[0].message.parsed == Person(name="a")
    assert streamed.choices[0].message.parsed == Person(name="a")
    assert call.function.parsed_arguments == {"city": "Rome"}


def test_a_call_of_no_tool_is_text(served):
    text = '<tool_call>{"name": "nope", "arguments": {}}</tool_call>'
    answer = served.chat(f"x|{text}", tools=[WEATHER])
    assert answer.json["choices"][0]["message"]["content"] == text


def test_no_tools_without_a_choice_of_them(served):
    answer = served.chat(f"x|{ROME}", tools=[WEATHER], tool_choice="none")
    assert answer.json["choices"][0]["message"]["content"] == ROME
    prompt = bytes(t for t in served.engine.requests[-1].tokens if t < 256).decode()
    assert "weather" not in prompt.partition("|")[0]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_choice_of_a_tool_is_a_grammar(served, choice):
    served.chat("x|y", tools=[WEATHER, NOW], tool_choice=choice, parallel_tool_calls=False)
    matcher = served.engine.requests[-1].matcher
    names = set()
    for seed in range(20):
        if (text := walk(matcher.copy(), seed)) is not None:
            names |= {name for _, name, _ in joined(AnswerParser(HERMES).push(text, last=True))}
    assert names == ({"now", "weather"} if choice == "required" else {"now"})


def test_allowed_tools(served):
    """The prompt and the grammar have no others."""
    tools = [WEATHER, NOW]
    for mode, matched in (("auto", False), ("required", True)):
        choice = allowed(mode, tool(name="now"))
        assert served.chat("x|y", tools=tools, tool_choice=choice).status == 200
        request = served.engine.requests[-1]
        prompt = bytes(t for t in request.tokens if t < 256).decode()
        assert '"now"' in prompt and '"weather"' not in prompt
        assert (request.matcher is not None) == matched
    choice = {"type": "allowed_tools", "mode": "auto"}
    choice |= {"tools": [{"type": "function", "name": "now"}]}
    ask = {"model": "bytes", "input": f"x|{ROME}", "tool_choice": choice}
    with served.client() as client:
        response = client.responses.create(
            **ask, tools=[{"type": "function", "strict": False, **t["function"]} for t in tools],
        )  # fmt: skip
    assert ROME in response.output_text, "a call of another tool is text"


def tool(**function):
    return {"type": "function", "function": {"name": "a"} | function}


def test_what_frameworks_send(served):
    """Functions without a docstring, long descriptions, and tools whose words fit no grammar."""
    tools = [tool(name=f"t{n}", description="", parameters={
        "properties": {"description": {"type": "null", "description": "x" * 2000}},
    }) for n in range(40)]  # fmt: skip
    for choice in ("auto", "required"):
        assert served.chat("x|y", tools=tools, tool_choice=choice).status == 200
    form = {"name": "a", "description": "x" * 5000, "schema": {"type": "object"}}
    form = {"type": "json_schema", "json_schema": form}
    assert served.chat("x|y", response_format=form).status == 200
    mistral = "{% for m in messages %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}" \
        "{{ raise_exception('no id of 9') }}{% endif %}{% endfor %}{% endfor %}"  # fmt: skip
    with serving(FakeEngine(), language(mistral + TEMPLATE)) as served:
        message = served.chat(f"x|{ROME}", tools=[WEATHER]).json["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert call["id"].isalnum()
        history = [message, {"role": "tool", "tool_call_id": call["id"], "content": "x|y"}]
        assert served.chat("x", messages=history, tools=[WEATHER]).status == 200


def allowed(mode, *tools):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


CHOICES = [
    (allowed("auto", tool(), tool(name="b")), "tool_choice", "'b' needs a tool of that name"),
    (allowed("none", tool()), "tool_choice.allowed_tools.mode", "auto, required"),
    (allowed("auto"), "tool_choice.allowed_tools.tools", "1 to 128 tools"),
    (allowed("auto", *[tool()] * 129), "tool_choice.allowed_tools.tools", "1 to 128 tools"),
    (allowed("auto", 1), "tool_choice.allowed_tools.tools[0]", "of type function"),
    ({}, "tool_choice", "function or allowed_tools"),
]
NESTED = {"properties": {}}
for _ in range(70):
    NESTED = {"properties": {"x": NESTED}}
CALL = {"id": "c", "type": "function", "function": {"name": "a", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]", "type function with a function"),
        ({"tools": [tool(name="a b")]}, "tools[0].function.name", "64 letters"),
        ({"tools": [tool(), tool()]}, "tools", "'a' twice"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "an object"),
        ({"tools": [tool(), tool(name="b", parameters={"not": {}})], "tool_choice": "required"},
         "tools[1].function.parameters", "Unimplemented keys"),
        ({"tools": [tool(parameters={"maximum": 2**60 + 1})], "tool_choice": "required"},
         "tools[0].function.parameters", "at most 2^53"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters.type",
         "object, as arguments are one"),
        ({"tools": [tool(parameters=NESTED)]}, "tools[0].function.parameters", "64 levels"),
        ({"tools": [tool()] * 129}, "tools", "at most 128"),
        ({"tools": [tool(extra=1)]}, "tools[0].function", "'extra'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools, got none"),
        ({"tool_choice": "always"}, "tool_choice", "one of none, auto, required"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "b"}}},
         "tool_choice", "'b' needs a tool of that name, got a"),
        *(({"tools": [tool()], "tool_choice": {"type": "allowed_tools"} | choice}, param, words)
          for choice, param, words in CHOICES),
        ({"tools": [tool(), tool(name="b", parameters={"not": {}})],
          "tool_choice": allowed("required", tool(name="b"))},
         "tools[1].function.parameters", "Unimplemented keys"),
        ({"tools": [tool()], "tool_choice": tool() | {"x": 1}}, "tool_choice", "'x'"),
        ({"messages": [{"role": "user", "content": "a", "name": 5}]}, "messages[0].name", "a text"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            CALL | {"function": {"name": "a", "arguments": '{"a": 1e999}'}}]}]},
         "messages[0].tool_calls[0].function.arguments", "finite numbers"),
        ({"messages": [{"role": "user", "content": "a"}] * 8193}, "messages", "1 to 8192 messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"type": "function", "function": {"name": "a", "arguments": "[" * 2**19}}]}]},
         "messages[0].tool_calls[0].function.arguments", "members"),
        ({"guided_json": "[" * 2**21}, "guided_json", "may have 1048576 characters"),
        ({"tools": [tool()], "tool_choice": "required", "guided_regex": "a"}, "tool_choice",
         "exclude each other"),
        *(({"tools": [tool()], "tool_choice": "required", name: value}, name, f"leave {name} out")
          for name, value in (("ignore_eos", True), ("min_tokens", 2))),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "give the field tools"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id", "the id"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "a text"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "messages[0]",
         "nothing else"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            CALL | {"function": {"name": "a", "arguments": "{"}}]}]},
         "messages[0].tool_calls[0].function.arguments", "an object as JSON"),
        *(({"messages": [{"role": "assistant", "tool_calls": [
            CALL | {"function": {"name": "a", "arguments": arguments}}]}]},
         "messages[0].tool_calls[0].function.arguments", "an object as JSON")
         for arguments in (0, [], False, '{"x": NaN}')),
    ],
)  # fmt: skip
def test_bad_tools_are_refused_by_name(served, fields, param, words):
    answer = served.chat("x", **fields)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert words in answer.error["message"]


def test_a_template_without_tools_is_said():
    for template in (None, "{{ messages[0].content }}", "{{ messages }}{{ tools }}"):
        with serving(FakeEngine(), language(template)) as served:
            answer = served.chat("x", tools=[WEATHER])
            assert (answer.status, answer.error["param"]) == (400, "tools")
            words = "no chat template" if template is None else "no tools in a form"
            assert words in answer.error["message"]


FAMILIES = {"qwen3-hermes": HERMES, "mistral": NAMED, "llama": BARE}


@pytest.mark.parametrize("family", FAMILIES)
def test_canitoolcall(family):
    """Answers of published models, with what is in them."""
    folder = Path(canitoolcall.__file__).parent / "_data/fixtures" / family
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    cases = map(json.loads, lines)
    cases = [case for case in cases if not case["id"].startswith("llama/l4-")]  # Python's syntax
    for case in cases:
        text = case["raw_output"]
        form = FAMILIES[family]
        if form is NAMED and "[ARGS]" not in text:
            form = LISTED
        marks = next((m for m in THOUGHTS[::-1] if m[0] in text or m[1] in text), THOUGHTS[0])
        thinking = (case.get("generation_prompt") or "").rstrip().endswith(marks[0])
        parser = AnswerParser(form if case["tools"] else None, marks, thinking)
        parts = parser.push(text, last=True, cut="truncated" in case["id"])
        calls = [{"name": p.name, "arguments": json.loads(p.arguments)}
                 for p in parts if isinstance(p, Call)]  # fmt: skip
        texts, thoughts = ("".join(p.text for p in parts if isinstance(p, kind))
                           for kind in (Content, Thought))  # fmt: skip
        expected = case.get("expected")
        if expected is None:  # cut or malformed
            assert not calls, case["id"]
            continue
        assert calls == [{k: call[k] for k in ("name", "arguments")}
                         for call in expected["tool_calls"]], case["id"]  # fmt: skip
        assert texts.strip() == (expected["content"] or "").strip(), case["id"]
        assert thoughts.strip() == (expected["reasoning_content"] or "").strip(), case["id"]
    assert len(cases) > 20


@pytest.mark.parity
def test_langchain_calls_tools_and_parses_answers(served):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Person(BaseModel):
        """A person."""

        name: str

    base = f"http://127.0.0.1:{served.port}/v1"
    chat = ChatOpenAI(model="bytes", base_url=base, api_key="none", max_retries=0)
    bound = chat.bind_tools([WEATHER])
    question = HumanMessage(f"Rome?|{ROME}")
    reply = bound.invoke([question])
    (call,) = reply.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Rome"})
    streamed = None
    for piece in bound.stream([question]):
        streamed = piece if streamed is None else streamed + piece
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [("weather", {"city": "Rome"})]
    result = ToolMessage("17 degrees|Warm.", tool_call_id=call["id"])
    assert bound.invoke([HumanMessage("Rome?"), reply, result]).content == "Warm."
    for method in ("json_schema", "function_calling"):
        answer = '{"name": "Ann"}'
        if method == "function_calling":
            answer = f'<tool_call>{{"name": "Person", "arguments": {answer}}}</tool_call>'
        structured = chat.with_structured_output(Person, method=method)
        assert structured.invoke(f"x|{answer}") == Person(name="Ann")
