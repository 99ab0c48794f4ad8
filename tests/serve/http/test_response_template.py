"""Answers divided by a `response_template`, beside transformers' own parser of whole answers."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jaxkv.cli.serve import with_usable_response
from jaxkv.errors import UserError
from jaxkv.models import Llm
from jaxkv.models.generation.response_template import response_parser
from jaxkv.models.loading.chat import Chat
from jaxkv.serve.http.response_template import TemplateParser
from jaxkv.serve.http.tools import Call, Content, Thought
from tests.serve.http.conftest import serving
from tests.serve.http.fake import FakeEngine, language
from tests.serve.http.test_tools import NOW, WEATHER, joined

pytestmark = pytest.mark.parity
CALL = {"type": "function", "function": "{content}"}
HERMES = {
    "start_anchor": "[assistant]",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": True,
                       "content": "json", "transform": CALL},
        "content": {},
    },
}  # fmt: skip
# In the manner of gpt-oss: every part has a channel, and the last one is the answer.
CHANNELS = {
    "start_anchor": "[assistant]",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>",
                     "repeats": True, "join": "\n"},
        "content": {"open": "<|channel|>final<|message|>", "close": "<|return|>"},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+)<\|message\|>",
            "close": "<|call|>", "repeats": True, "content": "json",
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}  # fmt: skip
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
CUT_CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ro'
NAMES = frozenset({"weather", "now"})
CASES = [
    (HERMES, "[assistant]", "<think> a\nb </think>\n\nfine \n",
     [Thought("a\nb"), Content("fine")]),
    (HERMES, "[assistant]<think>\n", "a</think>b", [Thought("a"), Content("b")]),
    (HERMES, "[assistant]",
     f"Sure.\n<tool_call>\n{ROME}\n</tool_call>\n<tool_call>{ROME}</tool_call>",
     [Content("Sure."), (0, "weather", {"city": "Rome"}), (1, "weather", {"city": "Rome"})]),
    (HERMES, "[assistant]", CUT_CALL, []),
    (HERMES, "[assistant]", '<tool_call>{"name": "none"}</tool_call>',
     [Content('{"name": "none"}')]),
    (HERMES, "no anchor <think>", "plain", [Content("plain")]),
    (HERMES, "[assistant]", "", []),
    (CHANNELS, "[assistant]", "<|channel|>analysis<|message|>one<|end|><|start|>assistant"
     "<|channel|>analysis<|message|>two<|end|><|channel|>final<|message|>It rains.<|return|>",
     [Thought("one\ntwo"), Content("It rains.")]),
    (CHANNELS, "[assistant]",
     '<|channel|>commentary to=functions.weather<|message|>{"city": "Oslo"}<|call|>',
     [(0, "weather", {"city": "Oslo"})]),
]  # fmt: skip


@pytest.mark.parametrize(("template", "prompt", "text", "expected"), CASES)
def test_an_answer_is_divided_alike_in_any_pieces(template, prompt, text, expected):
    rng = random.Random(0)
    for _ in range(60):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 9)))
        parser = TemplateParser(response_parser(template, prompt), template, NAMES)
        parts = []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            parts += parser.push(text[start:end])
        parts += parser.push("", last=True, cut=text == CUT_CALL)
        assert joined(parts) == expected
        assert parser.called == any(isinstance(part, Call) for part in parts)


# Without the anchor, transformers takes the prompt for the answer. It knows no names of tools, of a
# field without `repeats` it keeps the last region, and it refuses a call that is cut.
COMMON_CASES = [
    (template, prompt, text)
    for template, prompt, text, _ in CASES
    if template["start_anchor"] in prompt and "none" not in text and text.count(ROME) < 2
    and text != CUT_CALL
]  # fmt: skip


@pytest.mark.parametrize(("template", "prompt", "text"), COMMON_CASES)
def test_parts_are_those_of_transformers(template, prompt, text):
    from transformers.utils.chat_parsing import parse_response

    message = parse_response(text, template, prefix=prompt)
    parser = TemplateParser(response_parser(template, prompt), template, NAMES)
    parts = joined(parser.push(text, last=True))
    texts = {
        kind: "".join(part.text for part in parts if isinstance(part, kind))
        for kind in (Thought, Content)
    }
    assert texts[Content] == (message.get("content") or "")
    assert texts[Thought] == (message.get("reasoning_content") or message.get("thinking") or "")
    calls = [call["function"] for call in message.get("tool_calls", ())]
    assert [part[1:] for part in parts if isinstance(part, tuple) and len(part) == 3] == [
        (call["name"], call["arguments"]) for call in calls
    ]


@pytest.mark.parametrize(
    "body",
    ["{bad}", '"x"', '{"name": {"a": 1}}', '{"name": ["weather"]}', "[" * 5000, "[]x",
     '{"name": "weather", "arguments": {"x": NaN}}', '[{"name": "weather"}, {"name": "none"}]',
     '{"name": "weather", "arguments": "{\\"x\\": Infinity}"}'],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 3, 10**6])
def test_what_is_no_call_is_content(body, size):
    """The parts before it do not depend on the pieces."""
    text = f"<think>secret</think>Sure.<tool_call>{body}</tool_call>"
    parser, parts = TemplateParser(response_parser(HERMES, "[assistant]"), HERMES, NAMES), []
    for start in range(0, len(text), size):
        parts += parser.push(text[start : start + size])
    parts += parser.push("", last=True)
    assert joined(parts) == [Thought("secret"), Content(f"Sure.{body}")]
    assert not parser.called


def test_a_call_without_its_last_mark_ends_with_the_answer_unless_the_limit_cut_it():
    """The last mark may be an EOS, which is not part of the text."""
    text = '<|channel|>commentary to=functions.weather<|message|>{"city": "Oslo"}'
    for cut, expected in ((False, [(0, "weather", {"city": "Oslo"})]), (True, [])):
        parser = TemplateParser(response_parser(CHANNELS, "[assistant]"), CHANNELS, NAMES)
        assert joined(parser.push(text, last=True, cut=cut)) == expected
    parser = TemplateParser(response_parser(CHANNELS, "[assistant]"), CHANNELS, NAMES)
    assert joined(parser.push(text[:-2], last=True)) == [Content('{"city": "Oslo')]


def test_a_prompt_that_begins_what_cannot_be_read():
    with pytest.raises(UserError, match="the answer that the prompt begins cannot be read"):
        response_parser(HERMES, "[assistant]<tool_call>bad</tool_call>")


@pytest.fixture(scope="module")
def served():
    template = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}"
    fake = language(template + "{% endfor %}[assistant]")
    chat = replace(fake.llm.chat, response=HERMES)
    llm = SimpleNamespace(**vars(fake.llm) | {"chat": chat})
    with serving(FakeEngine(), replace(fake, llm=llm)) as served:
        yield served


def test_answers_of_a_model_with_a_response_template(served):
    """Whole, streamed, and by the Responses API; the chat template shows no form of calls."""
    text = f"x|<think>warm?</think>Sure.\n<tool_call>{ROME}</tool_call>"
    ask = {
        "model": "bytes",
        "messages": [{"role": "user", "content": text}],
        "tools": [WEATHER, NOW],
    }
    with served.client() as client:
        (choice,) = client.chat.completions.create(**ask).choices
        assert choice.finish_reason == "tool_calls"
        assert (choice.message.content, choice.message.reasoning_content) == ("Sure.", "warm?")
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Rome"}
        deltas = [
            chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **ask)
        ]
        assert "".join(delta.content or "" for delta in deltas) == "Sure."
        named, filled = (call for delta in deltas for call in delta.tool_calls or ())
        assert (named.function.name, named.function.arguments) == ("weather", "")
        assert json.loads(filled.function.arguments) == {"city": "Rome"}
        both = client.chat.completions.create(n=2, **ask).choices
        assert [len(choice.message.tool_calls) for choice in both] == [1, 1]
        (none,) = client.chat.completions.create(tool_choice="none", **ask).choices
        assert none.message.content == f"Sure.{ROME}" and not none.message.tool_calls
        response = client.responses.create(model="bytes", input=text)
        assert [item.type for item in response.output] == ["reasoning", "message"]
        tool = {"type": "function"} | WEATHER["function"]
        response = client.responses.create(model="bytes", input=text, tools=[tool])
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    reply = served.ask("POST", "/v1/chat/completions", ask | {"tool_choice": "required"})
    assert reply.status == 400 and reply.json["error"]["param"] == "tools"


def test_the_server_starts_without_a_template_that_it_cannot_use():
    llm = Llm(None, {}, None, Chat("x", (), {"fields": {}}), None, "float32")
    with pytest.warns(UserWarning, match=r"a non-empty dict; correct it; until then, thoughts"):
        assert with_usable_response(llm).chat.response is None
    with pytest.raises(UserError, match=r"response_template .* must be a non-empty dict; correct"):
        response_parser({"fields": {}}, "")
