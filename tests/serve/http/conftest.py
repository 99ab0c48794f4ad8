"""Servers on real sockets, each in its own thread."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import openai
import pytest

from jaxkv.serve import http as server
from jaxkv.serve.http.access import ANYONE
from jaxkv.serve.http.request import ServedModel, parse_request
from jaxkv.serve.http.responses import CHAT
from tests.serve.http.fake import FakeEngine, language

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
ENDLESS = {"model": "bytes", "prompt": "endless", "max_tokens": 90_000, "temperature": 0}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        """The one error object, whose message is one line."""
        assert self.json.keys() == {"error"}
        error = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"] and "\n" not in error["message"]
        assert len(error["message"]) < 400
        return error


class Served(NamedTuple):
    """A running server: its engine, and methods that send requests."""

    engine: FakeEngine
    port: int

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Send a request. body: bytes are sent unchanged, anything else as JSON."""
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if raw is not None:
            headers = {"content-type": "application/json"} | headers
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            connection.request(method, path, raw, headers)
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())

    def complete(self, prompt: Any, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        body = {"model": "bytes", "prompt": prompt, "max_tokens": 400} | fields
        return self.ask("POST", "/v1/completions", body, **(headers or {}))

    def chat(self, text: str, **fields: Any) -> Answer:
        body = {"model": "bytes", "messages": [{"role": "user", "content": text}]} | fields
        return self.ask("POST", "/v1/chat/completions", body)

    def client(self, key: str = "none") -> openai.OpenAI:
        """The official client without retries. Use it in a `with`."""
        base = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=base, api_key=key, max_retries=0, timeout=20)

    def connect(self, **options: int) -> socket.socket:
        """Open a connection. options: of the socket, such as SO_RCVBUF."""
        connection = socket.socket()
        for name, value in options.items():
            connection.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def send(self, body: Any, key: str = "none", **options: int) -> socket.socket:
        """Send a completion request without reading the response."""
        connection, raw = self.connect(**options), json.dumps(body).encode()
        connection.sendall(
            POST
            + b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n" % (key.encode(), len(raw))
            + raw
        )
        return connection

    def works(self) -> None:
        """Assert that the server still answers and that earlier requests have ended."""
        assert self.complete("|fine", max_tokens=8).json["choices"][0]["text"] == "fine"
        eventually(lambda: not self.engine.handles)


def eventually(holds: Callable[[], Any], seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "the condition did not become true"
        time.sleep(0.005)


def bearer(key: str) -> dict[str, str]:
    """The header of an API key."""
    return {"authorization": f"Bearer {key}"}


def events(raw: bytes) -> list[Any]:
    """The JSON objects of a finished stream; asserts its framing."""
    assert raw.endswith(b"\n\n")
    *reply, done = raw.decode().removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    assert all(event.startswith("data: {") and "\n" not in event for event in reply)
    return [json.loads(event.removeprefix("data: ")) for event in reply]


def chat_prompt(template: str | None, **fields: Any) -> bytes:
    """The bytes of the prompt that a template makes of a chat."""
    model = ServedModel(FakeEngine(), language(template), server.ServerConfig())
    raw = json.dumps({"model": "bytes", "max_tokens": 1} | fields).encode()
    (request,) = parse_request(raw, CHAT, ANYONE, model).requests
    return bytes(token for token in request.tokens if token < 256)


@contextlib.contextmanager
def serving(
    engine, words=None, tenants=(), admins=(), keys=None, kernel_seconds=60.0, drain=None, **config
):
    """Run a server. kernel_seconds: after which a connection is dropped. config: a ServerConfig."""
    words, keys = words or language(), keys or server.ApiKeys(tenants, admins)
    listener = server.bind("127.0.0.1", 0, kernel_seconds)
    server.begin_listening(listener)
    settings = server.ServerConfig(**config)
    app = server.application(engine, words, keys, settings, drain)
    running = server.make_server(app, settings, drain)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    port = listener.getsockname()[1]
    engine.start()
    thread.start()
    try:
        yield Served(engine, port)
    finally:
        running.should_exit = True
        thread.join(20)
        engine.stop()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server that many tests share, so each test must end its requests."""
    with serving(FakeEngine()) as served:
        yield served
