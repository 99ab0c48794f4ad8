"""Chat templates: which file is read, what is rendered, and the text of the next turn."""

from __future__ import annotations

import re

import pytest

from jaxkv.errors import UserError
from jaxkv.models.loading.chat import ANSWER, Chat, read_chat
from tests.models.folders import write_json

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
LLAMA2 = """
{%- if messages[0]['role'] == 'system' %}
    {%- set start = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set start = '' %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- bos_token + '[INST] ' + (start if loop.first else '') + message.content.strip() }}
        {{- ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""
# As in Qwen3, thoughts are removed from earlier answers.
THINKING = CHATML.replace("message.content", "message.content.split('</think>')[-1].strip()")
TEMPLATES = {"chatml": CHATML, "llama2": LLAMA2, "thinking": THINKING}
TOKENS = (("bos_token", "<s>"), ("eos_token", "</s>"))
HELLO = {"role": "user", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}


def answer_of(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("name", ["chatml", "llama2"])
def test_turns_join_to_the_whole_conversation(name):
    """The texts of all turns, joined, equal one rendering of the whole conversation."""
    chat = Chat(TEMPLATES[name], TOKENS)
    between = " " if name == "llama2" else ""
    messages, joined = [SYSTEM], ""
    for user, answer in (("Hello", "Hi!"), ("How are you?", "a"), ("Hi!", "Well, a [/INST] b.")):
        joined += chat.render_next(messages, user)
        assert joined == chat.render([*messages, {"role": "user", "content": user}])
        joined += between + answer
        messages += [{"role": "user", "content": user}, answer_of(answer)]


def test_a_turn_starts_after_the_answer():
    chat = Chat(CHATML, TOKENS)
    delta = "<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert chat.render_next([HELLO, answer_of("I am")], "Hello") == delta
    assert chat.render_next([HELLO, answer_of("")], "Hello") == delta


def test_a_turn_where_the_template_rewrites_answers():
    thought = answer_of("<think>\nhm\n</think>\n\nHi!  ")
    chat = Chat(THINKING, TOKENS)
    assert "hm" not in chat.render([HELLO, thought, HELLO])
    assert chat.render_next([HELLO, thought], "Go on") == Chat(CHATML).render_next(
        [HELLO, answer_of("x")], "Go on"
    )


def test_a_turn_where_the_template_omits_answers():
    hides = (
        "{{ bos_token }}{% for m in messages if m.role == 'user' %}[{{ m.content }}]{% endfor %}"
    )
    chat = Chat(hides, TOKENS)
    assert chat.render_next([HELLO, answer_of("Hi")], "Go on") == "[Go on]"


def test_the_first_turn_is_the_whole_conversation():
    assert Chat(LLAMA2, TOKENS).render_next([], "Hello") == "<s>[INST] Hello [/INST]"
    assert ANSWER not in Chat(CHATML).render_next([SYSTEM, HELLO, answer_of("Hi")], "Go on")


def test_templates_have_the_functions_of_transformers(tmp_path):
    def shows(template: str) -> str:
        return Chat(template).render([HELLO])

    assert shows("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
    assert shows("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert re.fullmatch(r"\d{4}", shows("{{ strftime_now('%Y') }}"))
    assert shows("{% for m in messages %}{% break %}{% endfor %}x") == "x"
    assert shows("{{ tools is none }} {{ documents is none }}") == "True True"
    assert Chat("{{ tools }}").render([HELLO], variables={"tools": "a"}) == "a"
    assert shows("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "Hello!"
    assert shows("a\n  {% if true %}\nb\n  {% endif %}\nc\n") == "a\nb\nc"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (LLAMA2.replace("user') !=", "user') =="), "refuses this conversation: roles must"),
        ("{% if %}", "not valid Jinja"),
        ("{{ messages.__class__.__mro__ }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ 'a' + 1 }}", "refuses"),
        (None, "no chat template"),
    ],
)
def test_invalid_templates_are_refused(template, message):
    with pytest.raises(UserError, match=message):
        Chat(template, TOKENS).render([HELLO])


def test_which_file_gives_the_template(tmp_path):
    assert read_chat(tmp_path) == Chat(None, ())
    config = tmp_path / "tokenizer_config.json"
    special = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    write_json(config, {**special, "add_bos_token": True, "chat_template": "one"})
    assert read_chat(tmp_path) == Chat("one", TOKENS)
    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}]
    write_json(config, {"chat_template": named})
    assert read_chat(tmp_path).template == "yes"
    write_json(config, {"chat_template": named[:1]})
    assert read_chat(tmp_path).template == "no"
    write_json(config, {"chat_template": 3})
    with pytest.raises(UserError, match="must be a text"):
        read_chat(tmp_path)
    write_json(tmp_path / "chat_template.json", {"chat_template": "json"})
    assert read_chat(tmp_path).template == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja é", encoding="utf-8")
    assert read_chat(tmp_path).template == "jinja é"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        read_chat(tmp_path)


@pytest.mark.parity
@pytest.mark.parametrize("name", TEMPLATES)
def test_agrees_with_transformers(name):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [HELLO, answer_of("<think>x</think> Hi "), {"role": "user", "content": " Go\non "}]
    (expected,), _ = render_jinja_template(
        [messages], chat_template=TEMPLATES[name], add_generation_prompt=True, **dict(TOKENS)
    )
    assert Chat(TEMPLATES[name], TOKENS).render(messages) == expected
