"""What the server needs besides HTTP: an engine that answers, and a model's way with words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxkv.engine.request import Listener, Request


@runtime_checkable
class Row(Protocol):
    """One answer's text as its tokens come. reason: why it ended, empty until it has."""

    reason: str

    def push(self, token: int) -> str:
        """The text that is certain now: never half a character, no possible start of a stop."""

    def end(self, reason: str) -> str:
        """The text that was held back; nothing follows."""


@runtime_checkable
class Language(Protocol):
    """A model's name and words.

    created: when it was loaded, in seconds since 1970. eos: ids that end an answer. longest: bytes
    of the longest token.
    """

    name: str
    created: int
    eos: tuple[int, ...]
    longest: int

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt. Raises UserError where the text has none."""

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation up to where the next answer begins.

        Raises UserError where the model's template refuses it.
        """

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What each id of a prompt adds to its text."""

    def spell(self, token: int) -> bytes:
        """One token alone, a special one written out."""

    def row(self, stops: Sequence[str], eos: Sequence[int]) -> Row:
        """The text of a new answer."""


@runtime_checkable
class Engine(Protocol):
    """What answers. Every method may be called from any thread.

    healthy: whether its thread still runs. room: tokens of a prompt and its answer that a slot
    holds. vocab: ids are below it.
    """

    healthy: bool
    room: int
    vocab: int

    def submit(self, request: Request, listener: Listener) -> Any:
        """A ticket. Raises UserError where the request never fits, Overloaded where not now."""

    def cancel(self, ticket: Any) -> None:
        """End an answer; nothing where it has ended."""

    def figures(self) -> Mapping[str, Any]:
        """What /metrics tells of the engine: see metrics.py."""
