"""What the log and the metrics tell of a request: its API key by name, tokens and times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from jaxkv.serve.engine.request import Outcome, Request


class UsageRecord:
    """The usage of one request, which the threads of server and engine write.

    id: answer id. requests: one per answer; n consecutive ones have one prompt, which counts
    once. api_key: the name of its key; empty without keys.
    """

    def __init__(self, id: str, requests: Sequence[Request], n: int, api_key: str) -> None:
        self.id, self.api_key = id, api_key
        self._prompts, self._n = [len(request.tokens) for request in requests], n
        self._start = time.perf_counter()
        self._new = [0] * len(requests)
        self._first: float | None = None
        self._ends: dict[int, tuple[Outcome, str]] = {}

    def token(self, index: int) -> None:
        """Count a new token of an answer."""
        self._new[index] += 1
        if self._first is None:
            self._first = time.perf_counter() - self._start

    def end(self, index: int, outcome: Outcome, reason: str) -> None:
        self._ends[index] = outcome, reason

    def is_first(self, index: int) -> bool:
        """Whether an answer is the first one to its prompt."""
        return index % self._n == 0

    def fields(self) -> dict[str, Any]:
        """The fields of the log; answers that have not ended yet were left by their client."""
        ends = [self._ends.get(index) for index in range(len(self._new))]
        fields: dict[str, Any] = {
            "answer_id": self.id,
            "prompt_tokens": sum(self._prompts[:: self._n]),
            "cached_tokens": sum(end[0].cached_tokens for end in ends[:: self._n] if end),
            "completion_tokens": sum(self._new),
            "finish_reasons": [end[1] if end else "cancelled" for end in ends],
        }
        if self._first is not None:
            fields["first_token_seconds"] = round(self._first, 6)
        return fields
