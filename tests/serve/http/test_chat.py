"""Chat templates: names, variables, continued messages, and models without one."""

from __future__ import annotations

import json

import pytest

from tests.serve.http.conftest import chat_prompt, serving
from tests.serve.http.fake import BOS, TEMPLATE, FakeEngine, language

TALK = [
    {"role": "user", "content": "Say", "name": "Ann"},
    {"role": "assistant", "content": "I am "},
]
GENERATING = TEMPLATE.replace("[assistant]", "{% if add_generation_prompt %}[assistant]{% endif %}")


def test_the_last_message_is_continued():
    """Exactly, also if it ends with a space, which a template may cut off."""
    continued = {"messages": TALK, "continue_final_message": True, "add_generation_prompt": False}
    for template in (GENERATING, GENERATING.replace("m.content", "m.content | trim")):
        assert chat_prompt(template, **continued) == b"[user]Say[assistant]I am "
    assert chat_prompt(GENERATING, messages=TALK) == b"[user]Say[assistant]I am [assistant]"
    without = {"messages": TALK, "add_generation_prompt": False}
    assert chat_prompt(GENERATING, **without) == b"[user]Say[assistant]I am "


def test_a_template_reads_names_and_variables():
    template = "{% for m in messages %}{{ m.name }}{{ m.content }}{% endfor %}{{ mood.level }}"
    fields = {"messages": TALK[:1], "chat_template_kwargs": {"mood": {"level": 7}}}
    assert chat_prompt(template, **fields) == b"AnnSay7"


def test_variables_cannot_contain_special_tokens():
    template = "{{ bos_token }}{{ messages[0].content }}{{ note }}"
    with serving(FakeEngine(), language(template)) as served:
        fields = {"chat_template_kwargs": {"note": "<s>"}, "max_tokens": 1}
        served.chat("<s>", **fields)
        (request,) = served.engine.requests
    assert request.tokens == (BOS, *b"<s><s>")


@pytest.mark.parametrize("variables, words", [
    ({"mod": 1}, "no variable 'mod', it reads mood;"),
    ({"messages": []}, "no variable 'messages'"),
    ({"bos_token": "x"}, "no variable 'bos_token'"),
    ({"mood": [[]] * 2 + [json.loads("[" * 900 + "]" * 900)]}, "at most 20 levels"),
])  # fmt: skip
def test_variables_that_the_template_does_not_read(variables, words):
    template = "{{ bos_token }}{{ messages[0].content }}{{ mood }}"
    with serving(FakeEngine(), language(template)) as served:
        answer = served.chat("x", chat_template_kwargs=variables)
        assert (answer.status, answer.error["param"]) == (400, "chat_template_kwargs")
        assert words in answer.error["message"]


@pytest.mark.parametrize("template, mood, words", [
    ("{{ 1 / mood }}", 0, "ZeroDivisionError"),
    ("{% macro f(n) %}{{ f(n + mood) }}{% endmacro %}{{ f(0) }}", 1, "RecursionError"),
    ("{{ raise_exception(mood) }}", "two\nlines " * 100, "two lines two"),
])  # fmt: skip
def test_a_template_that_fails_is_one_error_of_the_client(template, mood, words):
    with serving(FakeEngine(), language(template)) as served:
        answer = served.chat("x", chat_template_kwargs={"mood": mood})
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert f"refuses this conversation: {words}" in answer.error["message"]


def test_roles_are_not_dropped_without_a_template(served):
    answer = served.chat("x", messages=TALK)
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert "no chat template" in answer.error["message"]
