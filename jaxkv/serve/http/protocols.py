"""The interfaces that the server needs: an engine, and a model's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxkv.serve.engine.request import Listener, MatcherProtocol, Request


@runtime_checkable
class DetokenizerProtocol(Protocol):
    """Turns the tokens of one answer into text. reason: why the answer ended; empty before."""

    reason: str

    def push(self, token: int) -> str:
        """Add a token; returns text that is final: no half character, no possible stop string."""

    def end(self, reason: str) -> str:
        """End the answer; returns the text that was held back."""


class ResponseParserProtocol(Protocol):
    """Divides one answer as transformers' `ResponseParser` does, into events."""

    initial_events: Sequence[Mapping[str, Any]]

    def feed(self, text: str) -> Sequence[Mapping[str, Any]]:
        """The events that are certain with more of the text. Raises ValueError for other text."""

    def finalize(self) -> tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]:
        """The message and the last events. Raises ValueError for a text that is no message."""


@runtime_checkable
class LanguageProtocol(Protocol):
    """A model's name, tokenizer and chat template.

    created: when it was loaded, in seconds since 1970. eos: ids that end an answer.
    max_token_bytes: bytes of the longest token. variables: names that the chat template reads.
    template: the chat template, if there is one. response_template: by which `response_parser`
    divides its answers, if there is one. response_marks: the special tokens in it.
    """

    name: str
    created: int
    eos: tuple[int, ...]
    max_token_bytes: int
    variables: frozenset[str]
    template: str | None
    response_template: Mapping[str, Any] | None
    response_marks: frozenset[str]

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt. Raises UserError if the text has none."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
    ) -> list[int]:
        """The ids of a conversation, by default up to the beginning of the next answer.

        variables: more variables of the template. continue_final: end within the last message.
        Raises UserError if the model's template refuses it.
        """

    def matcher(self, kind: str, value: object) -> MatcherProtocol:
        """A matcher of a grammar. kind: json_object, json_schema, regex, choice or grammar.

        Raises UserError for a grammar that no text obeys.
        """

    def literal(self, text: str) -> str:
        """A text in a grammar of Lark's form; a special token stands there by its id."""

    def json_rule(self, schema: Mapping[str, Any] | str) -> str:
        """The JSON that obeys a schema, in such a grammar. Raises UserError for no schema."""

    def response_parser(
        self, ids: Sequence[int], tools: Sequence[Mapping[str, object]]
    ) -> ResponseParserProtocol:
        """A parser of the answer to a prompt."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each id of a prompt adds."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; a special token is written out."""

    def detokenizer(
        self,
        stops: Sequence[str],
        eos: Sequence[int],
        min_new_tokens: int = 0,
        marks: Collection[str] = (),
    ) -> DetokenizerProtocol:
        """A detokenizer for a new answer.

        min_new_tokens: the first tokens, in which no stop string is looked for. marks: special
        tokens that are written out.
        """


@runtime_checkable
class EngineProtocol(Protocol):
    """An engine. Every method may be called from any thread.

    healthy: whether it answers. max_len: tokens of a prompt with its answer; None for no limit.
    vocab: the vocabulary size.
    """

    healthy: bool
    max_len: int | None
    vocab: int

    def submit(self, request: Request, listener: Listener) -> Any:
        """Returns a handle. Raises UserError for an invalid request, Overloaded if it is full."""

    def cancel(self, handle: Any) -> None:
        """Cancel a request; does nothing if it has finished."""

    def metrics(self) -> Mapping[str, Any]:
        """The engine's metrics by the names in metrics.py."""
