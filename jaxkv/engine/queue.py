"""The queue of requests that wait for a batch entry."""

from __future__ import annotations

from collections import deque
from itertools import islice

from jaxkv.engine.handle import RequestHandle


class RequestQueue:
    """Waiting requests, oldest first.

    max_requests, max_tokens: how many requests, and tokens of their prompts, may wait. The queue
    has no lock: callers hold the engine's.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.tokens = 0
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._handles: deque[RequestHandle] = deque()

    def __len__(self) -> int:
        return len(self._handles)

    def is_full(self, size: int, free: int) -> bool:
        """Whether a prompt of `size` tokens is refused.

        free: free batch entries, which the first requests will take. A prompt that exceeds
        max_tokens may wait alone.
        """
        if len(self) <= free:
            return False
        placed = sum(len(handle.request.tokens) for handle in islice(self._handles, free))
        full = len(self) >= self._max_requests + free
        return full or self.tokens - placed + size > self._max_tokens

    def put(self, handle: RequestHandle) -> None:
        self._handles.append(handle)
        self.tokens += len(handle.request.tokens)

    def take(self) -> RequestHandle:
        """Remove and return the oldest request; raises IndexError if none waits."""
        handle = self._handles.popleft()
        self.tokens -= len(handle.request.tokens)
        return handle

    def drop_cancelled(self) -> list[RequestHandle]:
        """Remove and return the cancelled requests."""
        gone = [handle for handle in self._handles if handle.cancelled]
        for handle in gone:
            self._handles.remove(handle)
            self.tokens -= len(handle.request.tokens)
        return gone

    def clear(self) -> None:
        self._handles.clear()
        self.tokens = 0
