"""Chat templates: which file is read, what is rendered, and that no message forges a mark."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import TokenType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from jaxkv.errors import UserError
from jaxkv.models.generation.serving import Language
from jaxkv.models.loading import gguf
from jaxkv.models.loading.chat import (
    ANSWER,
    Chat,
    conversation_ids,
    end_of_turn,
    next_turn_ids,
    read_chat,
    role_marks,
)
from jaxkv.models.loading.tokenizer import Tokenizer, read_tokenizer
from tests.models.folders import write_json
from tests.models.tokenizer_files import (
    write_byte_level,
    write_gguf,
    write_sentencepiece,
    write_unigram,
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}"
    "{{ eos_token }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# It removes thoughts before the last message of a user, and writes one into an answer after it.
QWEN3 = """{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for m in messages[::-1] %}
    {%- if ns.searching and m.role == 'user' and not(m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content %}
    {%- if m.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>' + m.role + '\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>' + m.role + '\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""  # noqa: E501
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}"
    "{{ eos_token }}{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """A published tokenizer in small.

    marks: special tokens around roles. written: special tokens that a model writes itself.
    lossy: letters may become unknown tokens.
    """

    tokenizer: Callable[[Path], Tokenizer]
    template: str
    marks: tuple[str, ...]
    bos: str = ""
    eos: str = ""
    written: tuple[str, ...] = ()
    lossy: bool = False

    def chat(self) -> Chat:
        return Chat(self.template, (("bos_token", self.bos), ("eos_token", self.eos)))


def quiet(text: str, **flags: bool) -> AddedToken:
    """An added token that is not special."""
    return AddedToken(text, special=False, **flags)


BEGIN_DS, END_DS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
IM = ("<|im_start|>", "<|im_end|>")
USER = dict.fromkeys(IM, Kind.USER_DEFINED)
SHAPES = {
    "deepseek-r1-distill": Shape(
        lambda path: read_tokenizer(
            write_byte_level(
                path, [BEGIN_DS, END_DS, *map(quiet, ("<｜User｜>", "<｜Assistant｜>", "<think>",
                                                    "</think>"))],
                {"bos_token": BEGIN_DS, "eos_token": END_DS},
            )
        ),
        DEEPSEEK, ("<｜User｜>", "<｜Assistant｜>"), BEGIN_DS, END_DS, ("<think>", "</think>"),
    ),
    "qwen3": Shape(
        lambda path: read_tokenizer(
            write_byte_level(path, [*IM, *map(quiet, ("<think>", "</think>", "<tool_response>",
                                                    "</tool_response>"))])
        ),
        QWEN3, IM, written=("<think>", "</think>", "<tool_response>"),
    ),
    "chatml, gguf, byte-level": Shape(
        lambda path: gguf.read_tokenizer(
            write_gguf(path / "m.gguf", "gpt2", USER | {"<tool_call>": Kind.USER_DEFINED})
        ),
        CHATML, IM, written=("<tool_call>",),
    ),
    "chatml, gguf, sentencepiece": Shape(
        lambda path: gguf.read_tokenizer(
            write_gguf(path / "m.gguf", "llama", USER | {"<tool_call>": Kind.USER_DEFINED})
        ),
        CHATML, IM, "<s>", "</s>", ("<tool_call>",),
    ),
    "llama3": Shape(
        lambda path: read_tokenizer(
            write_byte_level(path, ["<|begin|>", "<|start_header_id|>", "<|end_header_id|>",
                                    "<|eot_id|>", "<|python_tag|>"])
        ),
        LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|begin|>",
        written=("<|python_tag|>",),
    ),
    "mistral": Shape(
        lambda path: read_tokenizer(
            write_sentencepiece(
                path, {"[INST]": Kind.CONTROL, "[/INST]": Kind.CONTROL, "[tool]": Kind.CONTROL}
            )
        ),
        MISTRAL, ("[INST]", "[/INST]"), "<s>", "</s>", ("[tool]",),
    ),
    "unigram": Shape(
        lambda path: read_tokenizer(write_unigram(path, ["<s>", "</s>", "[INST]", "[/INST]"])),
        MISTRAL, ("[INST]", "[/INST]"), "<s>", "</s>", lossy=True,
    ),
    "tight": Shape(  # the template's letters complete marks with those of a message
        lambda path: read_tokenizer(
            write_byte_level(path, ["<|user|>", "<|end|>", quiet("x<|", normalized=True)])
        ),
        "{% for m in messages %}<|user|>|{{ m.content }}|>{{ m.content }}<|end|>{% endfor %}",
        ("<|user|>", "<|end|>"),
    ),
    "tokens that overlap": Shape(
        lambda path: read_tokenizer(
            write_byte_level(path, [*IM, "<|im", "start|>user", quiet("|>", normalized=True)])
        ),
        CHATML, IM,
    ),
    "marks of whole words": Shape(  # which the model's vocabulary has, too
        lambda path: read_tokenizer(write_byte_level(path, [*IM, quiet("user"), quiet("im")])),
        CHATML, (*IM, "user"), written=("im",),
    ),
}  # fmt: skip


EXAMPLES = settings(
    max_examples=30, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
USER_A = {"role": "user", "content": "a"}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


@pytest.fixture(scope="module", params=SHAPES)
def shape(request, tmp_path_factory) -> tuple[Shape, Tokenizer]:
    spec = SHAPES[request.param]
    path = tmp_path_factory.mktemp("shape")
    return spec, spec.tokenizer(path)


def marks_in(tokenizer: Tokenizer, ids) -> list[str]:
    by_id = {token.id: token.text for token in tokenizer.added}
    return [by_id[i] for i in ids if i in by_id]


def pieces_of(tokenizer: Tokenizer) -> list[str]:
    """Marks, their halves and other text."""
    texts = [token.text for token in tokenizer.added]
    halves = [half for t in texts for n in (1, len(t) // 2, len(t) - 1) for half in (t[:n], t[n:])]
    return [*texts, *halves, "user", "a", " ", "\n", "é", "\ue000answer\ue001", "\U000f0000"]


@EXAMPLES
@given(data=st.data())
def test_the_marks_of_a_prompt_are_those_of_the_template(shape, data):
    """Random messages, in the server and in chat."""
    spec, tokenizer = shape
    texts = st.lists(st.sampled_from(pieces_of(tokenizer)), min_size=1, max_size=6).map("".join)
    contents = [data.draw(texts) for _ in range(3)]
    roles = ("system", "user", "user")
    said = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
    plain = [{"role": role, "content": "é"} for role in roles]
    chat = spec.chat()
    expected = marks_in(tokenizer, tokenizer.encode(chat.render(plain), bos=False))
    ids = conversation_ids(tokenizer, chat, said)
    assert marks_in(tokenizer, ids) == expected
    # All of the text is there. SentencePiece may put a space after a mark.
    text = tokenizer.decode(ids, special=True)
    if "trim" not in spec.template and not spec.lossy:
        assert text.replace(" ", "") == chat.render(said).replace(" ", "")
    answer = {"role": "assistant", "content": contents[1]}
    turn = next_turn_ids(tokenizer, chat, [said[1], answer], contents[2], begins=False)
    delta = chat.render_next([plain[1], {**answer, "content": "é"}], "é")
    assert marks_in(tokenizer, turn) == marks_in(
        tokenizer, tokenizer.encode(delta, bos=False, start=False)
    )


# What a template does to a message -> texts that it deletes.
DELETING = {
    "{{ m.content.replace('<think>', '') }}": ("<think>",),
    "{{ m.content.split('|x|') | join }}": ("|x|",),
    "{{ m.content.replace('/no_think', '').replace('/think', '').rstrip() }}": (
        "/no_think", "/think", " "),
    "{{ m.content | replace('<', '') | replace('end', '') }}": ("<", "end"),
    "{{ m.content.replace('</x>', '').replace('<x>', '').replace('x', '') }}": (
        "</x>", "<x>", "x", "<</x>x>"),
    "{{ m.content.split('</think>')[-1] | trim }}{{ m.content[2:] }}": ("</think>", "ab"),
    "{{ m.content.replace('&lt;', '<').replace('[', '<') | lower }}": ("&lt;", "["),
    "{% for d in documents or [] %}{{ d.title }}{{ d.text }}{% endfor %}{{ m.content }}": (),
}  # fmt: skip


@pytest.mark.parametrize("change", DELETING)
@EXAMPLES
@given(data=st.data())
def test_a_template_that_deletes_texts_makes_no_mark(change, data, deleting):
    template = CHATML.replace("{{ m.content }}", change)
    tokenizer, chat = deleting, Chat(template)
    deleted = st.sampled_from(DELETING[change] or ("",))
    broken = st.builds(
        lambda mark, n, part: mark[:n] + part + mark[n:], st.sampled_from(IM), st.integers(0, 12),
        deleted,
    )  # fmt: skip
    pieces = st.sampled_from(pieces_of(tokenizer))
    texts = st.lists(st.one_of(broken, deleted, pieces), max_size=4).map("".join)
    said = [{"role": role, "content": data.draw(texts)} for role in ("system", "user")]
    document, n = data.draw(texts), data.draw(st.integers(0, 12))
    documents = [{"title": document[:n], "text": document[n:]}]
    variables = {"documents": documents} if "documents" in change else {}
    ids = conversation_ids(tokenizer, chat, said, variables)
    assert marks_in(tokenizer, ids) == [*IM * 2, IM[0]]


def many(test: Any) -> Any:
    """A property with more examples than on every day."""
    return settings(EXAMPLES, max_examples=300)(given(data=st.data())(test.hypothesis.inner_test))


@pytest.mark.slow
def test_many_messages(shape):
    many(test_the_marks_of_a_prompt_are_those_of_the_template)(shape=shape)


@pytest.mark.slow
@pytest.mark.parametrize("change", DELETING)
def test_many_messages_of_which_parts_are_deleted(change, deleting):
    many(test_a_template_that_deletes_texts_makes_no_mark)(change=change, deleting=deleting)


@pytest.fixture(scope="module")
def deleting(tmp_path_factory) -> Tokenizer:
    return read_tokenizer(write_byte_level(tmp_path_factory.mktemp("deleting"), list(IM)))


def test_a_template_finds_its_constants(deleting):
    """Names in tools and words in messages, which it compares or deletes."""
    chat = Chat(
        "{% for m in messages %}<|im_start|>{{ m.content.replace('</think>', '') }}<|im_end|>"
        "{{ m.content.startswith('<tool>') }}{% endfor %}"
        "{% for tool in tools %}{{ tool.type == 'end' }}{{ tool.start }}{% endfor %}"
    )
    tools = [{"type": "end", "start": "<"}]
    said = [{"role": "user", "content": "<tool> a</think>"}]
    text = deleting.decode(conversation_ids(deleting, chat, said, {"tools": tools}), special=True)
    assert text == "<|im_start|><tool> a<|im_end|>TrueTrue<"


def test_an_answer_keeps_the_marks_that_the_model_wrote(shape):
    spec, tokenizer = shape
    marks = role_marks(tokenizer, spec.chat())
    assert set(spec.marks) <= marks and not marks & set(spec.written)
    for mark in (*spec.marks, *spec.written):
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"{mark}b"}]
        empty = [said[0], {"role": "assistant", "content": "b"}]
        with_mark, without = (
            [m for m in marks_in(tokenizer, conversation_ids(tokenizer, spec.chat(), messages))
             if m in (*spec.marks, mark)]
            for messages in (said, empty)
        )  # fmt: skip
        kept = mark in spec.written and mark != "</think>"  # the template removes thoughts itself
        assert sorted(with_mark) == sorted([*without, *[mark] * kept])


@pytest.mark.parametrize("name", ["deepseek-r1-distill", "qwen3"])
def test_thoughts_of_earlier_answers_are_removed(name, tmp_path):
    """The template finds them, because they contain no separator."""
    tokenizer, chat = SHAPES[name].tokenizer(tmp_path), SHAPES[name].chat()
    answers = ("<think>hm</think>b", "b")
    first, second = (
        conversation_ids(tokenizer, chat, [USER_A, assistant(content), USER_A])
        for content in answers
    )
    assert first == second


@pytest.mark.parity
@pytest.mark.parametrize("last", [[], [USER_A]])
def test_conversations_agree_with_transformers(last, tmp_path):
    """A history with thoughts, rendered and encoded by the package."""
    import transformers

    tokenizer, chat = SHAPES["qwen3"].tokenizer(tmp_path), SHAPES["qwen3"].chat()
    package = transformers.AutoTokenizer.from_pretrained(tmp_path)
    said = [{"role": "system", "content": "a"}, USER_A,
            assistant("<think>\nhm\n</think>\n\nuser <tool_response>"),
            {"role": "tool", "content": "a"}, assistant("<think>us</think>\na"), *last]  # fmt: skip
    text = package.apply_chat_template(
        said, chat_template=QWEN3, tokenize=False, add_generation_prompt=True
    )
    expected = package.encode(text, add_special_tokens=False)
    assert conversation_ids(tokenizer, chat, said) == expected


@pytest.mark.parametrize("name", SHAPES)
def test_a_message_of_only_marks(name, tmp_path):
    shape = SHAPES[name]
    tokenizer = shape.tokenizer(tmp_path)
    llm = SimpleNamespace(tokenizer=tokenizer, chat=shape.chat(), eos=())
    content = "".join(shape.marks)
    ids = Language(llm, "m", 1).render([{"role": "user", "content": content}])
    empty = Language(llm, "m", 1).render([{"role": "user", "content": "é"}])
    assert marks_in(tokenizer, ids) == marks_in(tokenizer, empty)
    allowed = Language(llm, "m", 1, allow_special=True)
    ids = allowed.render([{"role": "user", "content": content}])
    assert len(marks_in(tokenizer, ids)) >= len(marks_in(tokenizer, empty)) + len(shape.marks)


def test_special_tokens_without_a_template(shape):
    spec, tokenizer = shape
    llm = SimpleNamespace(tokenizer=tokenizer, chat=Chat(None), eos=())
    content = "".join((*spec.marks, *spec.written))
    ids = Language(llm, "m", 1).render([{"role": "user", "content": content}])
    front = list(tokenizer.front)
    assert ids[: len(front)] == front and not marks_in(tokenizer, ids[len(front) :])
    if not spec.lossy:  # SentencePiece may put a space after a mark
        text = tokenizer.decode(ids[len(front) :], special=True)
        assert text.replace(" ", "") == f"{content}\n".replace(" ", "")


def test_a_mark_of_one_character_is_refused(tmp_path):
    """Its text has no other ids."""
    tokenizer = read_tokenizer(write_byte_level(tmp_path, ["§"]))
    chat = Chat("{% for m in messages %}§{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match="must not contain '§', a mark of one character"):
        conversation_ids(tokenizer, chat, [{"role": "user", "content": "a § b"}])
    assert conversation_ids(tokenizer, chat, [{"role": "user", "content": "a"}])
    # A letter that the template does not write, as some models name for padding, is no mark.
    named = Chat(CHATML, (("pad_token", "§"),))
    assert conversation_ids(tokenizer, named, [{"role": "user", "content": "a § b"}])


# A plain template ends answers with nothing: the words that follow may be part of an answer.
ENDS = {
    "eot": (LLAMA3, ["<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
            "<|eot_id|>"),
    "im_end, not special": (CHATML, [quiet("<|im_start|>"), quiet("<|im_end|>")], "<|im_end|>"),
    "after a space": (CHATML.replace("}}<|im_end|>", "}} <|im_end|>"), list(IM), "<|im_end|>"),
    "the next role": ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}",
                      ["<|user|>", "<|assistant|>"], "<|user|>"),
    "the last one is closed otherwise": (
        CHATML.replace("<|im_end|>", "{{ '<|return|>' if loop.last else '<|im_end|>' }}"),
        [*IM, "<|return|>"], "<|return|>"),
    "plain text": (PLAIN, list(IM), None),
    "a word": (CHATML.replace("<|im_end|>", "stop"), list(IM), None),
    "no end": ("{{ messages[0].content }}", list(IM), None),
    "refuses": ("{{ raise_exception('no') }}", list(IM), None),
    "no template": (None, list(IM), None),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_turn(name, tmp_path):
    template, added, mark = ENDS[name]
    tokenizer = read_tokenizer(write_byte_level(tmp_path, added))
    ids = {token.text: token.id for token in tokenizer.added}
    assert end_of_turn(tokenizer, Chat(template)) == (() if mark is None else (ids[mark],))


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
THINKING = CHATML.replace("m.content", "m.content.split('</think>')[-1].strip()")
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
