"""Chat templates: render messages as the model was trained to see them, whole or one by one.

A rendering contains the BOS where the template writes one, so it is encoded with `bos=False`.
Templates come from the network and run in Jinja's sandbox. In the ids of a conversation only the
template marks roles and turns: the added tokens of messages are text (`Escape`). An assistant's
message keeps those that the template does not write itself, such as `<think>`, because the model
wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from jaxkv.errors import UserError
from jaxkv.files import reading
from jaxkv.models.loading.added_tokens import Escape, free_characters, map_texts
from jaxkv.models.loading.hf.folder import read_json
from jaxkv.models.loading.hf.tokenizer_config import content
from jaxkv.models.loading.tokenizer import Tokenizer

# role (system, user, assistant, tool) and content; tool_calls of an assistant, as in OpenAI's API.
Message = Mapping[str, Any]

# Placeholder of an answer in a rendering: private-use characters that templates copy unchanged.
ANSWER = "\ue000answer\ue001"
# What an expression of a template may raise.
FAILURES = (
    TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError,
    MemoryError,
)  # fmt: skip
REASON = 200  # characters of an error
# None where a conversation has none, as in transformers: a template may ask `is not none`.
ABSENT = ("tools", "documents")
# Conversations that show what a template writes around messages; it may refuse some. They end with
# a user, because some templates write an empty thought into an answer after the last one.
HISTORIES = (
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "user"),
    ("user", "assistant", "tool", "assistant", "user"),
)
ANSWERED = ("user", "assistant")


@dataclass(frozen=True)
class Chat:
    """The chat format of one model.

    template: Jinja source, None where the model has none. tokens: the special tokens that the
    template may name (bos_token, eos_token, ...). response: how to divide an answer into thoughts,
    content and calls, the `response_template` of transformers; None where the model has none.
    """

    template: str | None
    tokens: tuple[tuple[str, str], ...] = ()
    response: Mapping[str, Any] | None = field(default=None, hash=False)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The text of a conversation, by default up to where the next answer begins.

        variables: more variables of the template, such as enable_thinking.
        """
        if self.template is None:
            raise UserError(
                "this model has no chat template; use `generate`, or add a chat_template.jinja"
            )
        jinja2, variables = _jinja2(), variables or {}
        self._check_variables(variables)
        try:
            return _compiled(self.template).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **(dict.fromkeys(ABSENT) | dict(self.tokens) | dict(variables)),
            )
        except jinja2.TemplateError as error:
            why = str(error)
        except FAILURES as error:  # from variables of another type or value than the template needs
            why = f"{type(error).__name__}: {error}"
        why = " ".join(why.split())[:REASON]
        raise UserError(f"the chat template refuses this conversation: {why}")

    def _check_variables(self, names: Collection[str]) -> None:
        """Raise UserError for a variable that the template does not read."""
        if not names:
            return
        unknown = next((name for name in names if name not in self.variables), None)
        if unknown is not None:
            names = ", ".join(sorted(self.variables)) or "none"
            raise UserError(
                f"the chat template has no variable {unknown!r:.60}, it reads {names}; leave it out"
            )

    @property
    def variables(self) -> frozenset[str]:
        """The variables that a caller may give: all that the template reads, but the dialogue's."""
        names = variables_of(self.template) - {"messages", "add_generation_prompt"}
        return names.difference(dict(self.tokens))

    def render_next(self, previous: Sequence[Message], text: str, answer: str = ANSWER) -> str:
        """The text that the user's next message adds to a cache with the conversation so far.

        previous: the messages so far. The last one is the answer at the end of the cache. Without
        an answer the cache is empty, and the whole rendering is returned. answer: its placeholder,
        a text that no message has.
        The new text begins directly after that answer, with the marks that close it: the end token
        was sampled, but is not in the cache. It is cut from a rendering with a placeholder as the
        answer, so templates may trim old answers or drop their thoughts. Where a template does not
        show the answer at all, the message is rendered as its own conversation, without the BOS.
        """
        message = {"role": "user", "content": text}
        if not any(m["role"] == "assistant" for m in previous):
            return self.render([*previous, message])
        stand_in = {**previous[-1], "content": answer}
        rendering = self.render([*previous[:-1], stand_in, message])
        if answer in rendering:
            return rendering.rpartition(answer)[2]
        return self.render([message]).removeprefix(dict(self.tokens).get("bos_token", ""))


@reading()
def read_chat(folder: Path) -> Chat:
    """The chat template of a model folder: chat_template.jinja, .json, or tokenizer_config's."""
    folder = Path(folder)
    config = read_json(folder / "tokenizer_config.json")
    named = read_json(folder / "special_tokens_map.json") | config
    contents = {key: content(value) for key, value in named.items() if key.endswith("_token")}
    tokens = tuple((key, text) for key, text in contents.items() if text is not None)
    response = config.get("response_template")
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        try:
            return Chat(alone.read_text(encoding="utf-8"), tokens, response)
        except UnicodeDecodeError:
            raise UserError(f"{alone} is not UTF-8; download it again") from None
    source = read_json(folder / "chat_template.json").get("chat_template")
    return Chat(_default(source or config.get("chat_template"), folder), tokens, response)


def _default(source: Any, folder: Path) -> str | None:
    """The template itself, or of several named ones the default (else the first)."""
    if isinstance(source, list):
        by_name = {
            entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)
        }
        source = by_name.get("default", next(iter(by_name.values()), None))
    if source is not None and not isinstance(source, str):
        raise UserError(f"{folder}: chat_template must be a text or a list of named ones")
    return source


def check_template(source: str) -> None:
    """Raise UserError for a template that is not valid Jinja."""
    _compiled(source)


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    """The compiled template, in the environment that transformers gives to templates."""
    jinja2 = _jinja2()
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}` marks answers for training; its body is rendered as it is."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template is not valid Jinja: {error}") from None


@lru_cache(maxsize=8)
def variables_of(template: str | None) -> frozenset[str]:
    """The variables that a template reads and does not set."""
    if template is None:
        return frozenset()
    environment = _compiled(template).environment
    names = _jinja2().meta.find_undeclared_variables(environment.parse(template))
    return frozenset(names - environment.globals.keys())


@lru_cache(maxsize=8)
def constants_of(template: str | None) -> frozenset[str]:
    """The texts in the expressions of a template, for some of which it looks in messages."""
    if template is None:
        return frozenset()
    tree = _compiled(template).environment.parse(template)
    values = (node.value for node in tree.find_all(_jinja2().nodes.Const))
    return frozenset(value for value in values if isinstance(value, str))


def _jinja2() -> Any:
    try:
        import jinja2
        import jinja2.meta
        import jinja2.nodes
    except ImportError:
        raise UserError("chat templates need the package jinja2 (pip install jinja2)") from None
    return jinja2


def conversation_ids(
    tokenizer: Tokenizer,
    chat: Chat,
    messages: Sequence[Message],
    variables: Mapping[str, object] | None = None,
    add_generation_prompt: bool = True,
    continue_final: bool = False,
    allow_special: bool = False,
) -> list[int]:
    """The ids of a conversation, by default up to where the next answer begins.

    variables: more variables of the chat template. continue_final: end within the last message,
    which the answer continues. allow_special: added tokens in messages become their ids. A model
    without a chat template takes one message of the user, as a plain line. Raises UserError where
    a template refuses the conversation.
    """
    separator, end = free_characters([*messages, variables, chat.template], 2)
    if allow_special:
        separator = ""
    else:
        messages = _escaped(tokenizer, chat, messages, separator)
        constants = constants_of(chat.template)
        escape = _escape(separator, _texts(tokenizer), constants)
        variables = map_texts(
            variables,
            # The template compares some values with its constants.
            lambda text: escape(text, beside=text not in constants),
            lambda name: escape(name, beside=False),
        )
    if continue_final:
        *before, last = messages
        messages = [*before, {**last, "content": last["content"] + end}]
        add_generation_prompt = False
    if chat.template is None:
        if variables or [message["role"] for message in messages] != ["user"]:
            raise UserError(
                "this model has no chat template, so it takes one message of the user and nothing "
                "else; use completions, or start the server with --chat-template"
            )
        return tokenizer.encode(messages[0]["content"] + "\n", separator=separator)
    text = chat.render(messages, add_generation_prompt, variables)
    if continue_final:
        text, shown, _ = text.rpartition(end)
        if not shown:
            raise UserError("the chat template does not show the last message; send another")
    # The template writes the BOS itself.
    return [*tokenizer.sinks, *tokenizer.encode(text, bos=False, separator=separator)]


def next_turn_ids(
    tokenizer: Tokenizer, chat: Chat, previous: Sequence[Message], text: str, begins: bool
) -> list[int]:
    """The ids that the user's next message adds to a cache with the conversation so far.

    previous: the messages so far, of which the last is an answer unless the cache is empty.
    begins: nothing is in the cache, so sinks come first.
    """
    messages = [*previous, {"role": "user", "content": text}]
    separator, answer = free_characters([*messages, chat.template], 2)
    *previous, message = _escaped(tokenizer, chat, messages, separator)
    first = not any(before["role"] == "assistant" for before in previous)
    if chat.template is not None:
        rendered = chat.render_next(previous, message["content"], answer)
        ids = tokenizer.encode(rendered, bos=False, start=first, separator=separator)
        return [*tokenizer.sinks, *ids] if begins else ids
    if not first:
        line = f"\n{message['content']}\n"
        return tokenizer.encode(line, bos=False, start=False, separator=separator)
    return tokenizer.encode(
        "".join(m["content"] + "\n" for m in (*previous, message)), separator=separator
    )


@lru_cache(maxsize=2)
def end_of_turn(tokenizer: Tokenizer, chat: Chat) -> tuple[int, ...]:
    """The added token with which the template closes an assistant's message, if it is one.

    Text that closes a message ends no answer, because an answer may contain it. The last message
    counts first: gpt-oss closes earlier ones by a token that also ends its reasoning.
    """
    added = {token.id for token in tokenizer.added}
    for roles, texts in _probes(chat, (ANSWERED, *HISTORIES)):
        text = texts[roles.index("assistant") + 1].lstrip()
        (separator,) = free_characters([text], 1)
        ids = tokenizer.encode(text, bos=False, start=False, separator=separator)
        if ids:
            return tuple(i for i in ids[:1] if i in added)
    return ()


@lru_cache(maxsize=2)
def role_marks(tokenizer: Tokenizer, chat: Chat) -> frozenset[str]:
    """The added tokens that the template writes around messages, and those that it may name."""
    written: set[int] = set()
    for _, texts in _probes(chat, HISTORIES):
        (separator,) = free_characters(texts, 1)
        written.update(
            i for text in texts for i in tokenizer.encode(text, bos=False, separator=separator)
        )
    marks = {token.text for token in tokenizer.added if token.id in written}
    named = {text for _, text in chat.tokens if len(text) > 1}  # a padding token may be a letter
    return frozenset(marks | (_texts(tokenizer) & named))


def _probes(
    chat: Chat, probes: Sequence[Sequence[str]]
) -> Iterator[tuple[Sequence[str], list[str]]]:
    """Roles, and what the template writes before, between and after their messages."""
    for roles in probes if chat.template is not None else ():
        contents = [f"\ue000{number}\ue001" for number, _ in enumerate(roles)]
        messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
        try:
            rest = chat.render(messages, add_generation_prompt=False)
        except UserError:
            continue  # it refuses these roles
        texts = []
        for placeholder in contents:
            text, mark, after = rest.partition(placeholder)
            text, rest = (text, after) if mark else ("", rest)
            texts.append(text)
        yield roles, [*texts, rest]


@lru_cache(maxsize=2)
def _texts(tokenizer: Tokenizer) -> frozenset[str]:
    return frozenset(token.text for token in tokenizer.added)


@lru_cache(maxsize=2)
def _plain_texts(tokenizer: Tokenizer, chat: Chat) -> frozenset[str]:
    """Texts without separators in an assistant's message."""
    return constants_of(chat.template) | (_texts(tokenizer) - role_marks(tokenizer, chat))


_escape = lru_cache(maxsize=8)(Escape)


def _escaped(
    tokenizer: Tokenizer, chat: Chat, messages: Sequence[Message], separator: str
) -> list[dict[str, str]]:
    """The messages, with separators in the added tokens that are part of their text."""
    marks = role_marks(tokenizer, chat)
    single = [mark for mark in marks if len(mark) == 1 and mark.strip()]
    by_user = _escape(separator, _texts(tokenizer), constants_of(chat.template))
    by_model = _escape(separator, marks, _plain_texts(tokenizer, chat))
    escaped = []
    for message in messages:
        escape = by_model if message["role"] == "assistant" else by_user
        mark = next((mark for mark in single if mark in message["content"]), None)
        if mark is not None:
            raise UserError(
                f"messages must not contain {mark!r}, a mark of one character that the chat "
                "template writes; leave it out"
            )
        name_of = partial(escape, beside=False)
        escaped.append(
            {
                name: value if name == "role" else map_texts(value, escape, name_of)
                for name, value in message.items()
            }
        )
    return escaped
