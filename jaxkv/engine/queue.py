"""Those who wait for a slot."""

from __future__ import annotations

from collections import deque
from itertools import islice

from jaxkv.engine.ticket import Ticket


class Queue:
    """Tickets, the oldest first. most: how many may wait, most_tokens: tokens of their prompts.

    It has no lock: whoever calls holds that of the engine.
    """

    def __init__(self, most: int, most_tokens: int) -> None:
        self.tokens = 0
        self._most, self._most_tokens = most, most_tokens
        self._tickets: deque[Ticket] = deque()

    def __len__(self) -> int:
        return len(self._tickets)

    def is_full(self, size: int, free: int) -> bool:
        """Whether a prompt of so many tokens must go; free: slots that the first will take.

        One that is larger than all that may wait can do so alone.
        """
        if len(self) <= free:
            return False
        placed = sum(len(ticket.request.tokens) for ticket in islice(self._tickets, free))
        return len(self) >= self._most + free or self.tokens - placed + size > self._most_tokens

    def put(self, ticket: Ticket) -> None:
        self._tickets.append(ticket)
        self.tokens += len(ticket.request.tokens)

    def take(self) -> Ticket:
        """The oldest; raises IndexError where nobody waits."""
        ticket = self._tickets.popleft()
        self.tokens -= len(ticket.request.tokens)
        return ticket

    def drop_cancelled(self) -> list[Ticket]:
        """Those who need not wait any longer."""
        gone = [ticket for ticket in self._tickets if ticket.cancelled]
        for ticket in gone:
            self._tickets.remove(ticket)
            self.tokens -= len(ticket.request.tokens)
        return gone

    def clear(self) -> None:
        self._tickets.clear()
        self.tokens = 0
