"""The queue of requests that wait for a batch entry."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from itertools import islice

from jaxkv.serve.engine.request import RequestHandle


class RequestQueue:
    """Waiting requests. Their owners take turns, so one with many requests does not delay others.

    Requests of one owner are taken in the order of their arrival. max_requests, max_tokens: how
    many requests, and tokens of their prompts, may wait. The queue has no lock: callers hold the
    engine's.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.tokens = 0
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._waiting: dict[str | None, deque[RequestHandle]] = {}  # owners in the order of turns

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[RequestHandle]:
        """The requests in the order in which they would be taken."""
        turns = deque(map(iter, self._waiting.values()))
        while turns:
            requests = turns.popleft()
            if (handle := next(requests, None)) is not None:
                yield handle
                turns.append(requests)

    def is_full(self, size: int, free: int) -> bool:
        """Whether a prompt of `size` tokens is refused.

        free: free batch entries, which the first requests will take. A prompt that exceeds
        max_tokens may wait alone.
        """
        if len(self) <= free:
            return False
        placed = sum(len(handle.request.tokens) for handle in islice(self, free))
        full = len(self) >= self._max_requests + free
        return full or self.tokens - placed + size > self._max_tokens

    def put(self, handle: RequestHandle) -> None:
        """Add a request; an owner who has none waiting gets the last turn."""
        self._waiting.setdefault(handle.request.owner, deque()).append(handle)
        self.tokens += len(handle.request.tokens)

    def take(self, blocked: Collection[str | None] = ()) -> RequestHandle | None:
        """Remove and return the oldest request of the owner whose turn it is.

        blocked: owners who are passed over and keep their turn. Returns None if no other waits.
        """
        owners = [owner for owner in self._waiting if owner not in blocked]
        if not owners:
            return None
        owner = owners[0]
        requests = self._waiting.pop(owner)
        handle = requests.popleft()
        if requests:
            self._waiting[owner] = requests  # the last turn
        self.tokens -= len(handle.request.tokens)
        return handle

    def drop_cancelled(self) -> list[RequestHandle]:
        """Remove and return the cancelled requests."""
        gone = [handle for handle in self if handle.cancelled]
        for handle in gone:
            requests = self._waiting[handle.request.owner]
            requests.remove(handle)
            if not requests:
                del self._waiting[handle.request.owner]
            self.tokens -= len(handle.request.tokens)
        return gone

    def clear(self) -> None:
        self._waiting.clear()
        self.tokens = 0
