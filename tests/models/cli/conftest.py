"""The command line, called in this process, on a tiny random model."""

from __future__ import annotations

import io
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxkv.cli import main, progress
from tests.tiny import write_tiny


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        """The one object on standard output."""
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1
        return json.loads(self.out)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("cli") / "tiny"))


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("It was a bright cold day in April. " * 6, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def no_keys(monkeypatch) -> None:
    for name in ("JAXKV_API_KEYS", "JAXKV_ADMIN_KEYS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(capsys, monkeypatch) -> Callable[..., Ran]:
    """Runs a command. A busy machine prints no lines of progress."""
    monkeypatch.setattr(progress, "REPEAT", math.inf)

    def run(*words: object) -> Ran:
        code = main([str(word) for word in words])
        return Ran(code, *capsys.readouterr())

    return run


@pytest.fixture
def press(monkeypatch) -> Callable[..., list]:
    """Presses Ctrl-C when a function is called for the time of this number, from 0.

    items: the function is a generator, and the number is that of an item of all calls, or None for
    the end of a call. Returns a list that gets an entry at each call or item.
    """

    def press(owner: object, name: str, number: int | None, items: bool = False) -> list:
        function, seen = getattr(owner, name), []

        def step() -> None:
            seen.append(None)
            if len(seen) - 1 == number:
                os.kill(os.getpid(), signal.SIGINT)

        def call(*words, **named):
            step()
            return function(*words, **named)

        def generate(*words, **named):
            for item in function(*words, **named):
                step()
                yield item
            if number is None:
                os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(owner, name, generate if items else call)
        return seen

    return press


@pytest.fixture
def stdin(monkeypatch) -> Callable[[bytes], None]:
    """Put bytes on standard input."""

    def put(raw: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))

    return put
