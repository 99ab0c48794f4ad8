from typing import NamedTuple


class Hit(NamedTuple):
    at: int


class Store: ...
