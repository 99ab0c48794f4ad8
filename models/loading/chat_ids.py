"""The ids of a conversation, in which only the chat template marks roles and turns.

A rendering is encoded as one text. In it the added tokens of messages are text (`Escape`). An
assistant's message keeps those that the template does not write itself, such as `<think>`, because
the model wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from jaxkv.errors import UserError
from jaxkv.models.loading.added_tokens import Escape, free_characters, map_texts
from jaxkv.models.loading.chat import Chat, Message, constants_of
from jaxkv.models.loading.tokenizer import Tokenizer

# Conversations that show what a template writes around messages; it may refuse some. They end with
# a user, because some templates write an empty thought into an answer after the last one.
HISTORIES = (
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "user"),
    ("user", "assistant", "tool", "assistant", "user"),
)
ANSWERED = ("user", "assistant")


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

    Text that closes a message ends no answer, because an answer may contain it.
    """
    added = {token.id for token in tokenizer.added}
    for roles, texts in _probes(chat, (*HISTORIES, ANSWERED)):
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
        for content in contents:
            text, _, rest = rest.partition(content) if content in rest else ("", "", rest)
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
        escaped.append(
            {name: text if name == "role" else escape(text) for name, text in message.items()}
        )
    return escaped
