"""Without API keys, other sites cannot use the server through the user's browser."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from jaxkv.serve.http import ApiKeys, access, parse_api_keys
from tests.serve.http.conftest import serving
from tests.serve.http.fake import FakeEngine

ASK = {"model": "bytes", "prompt": "|x"}
PREFLIGHT = {"access_control_request_method": "POST", "access_control_request_headers": "x-any"}


def ask(served, **headers):
    return served.ask("POST", "/v1/completions", ASK, **headers)


@pytest.fixture(scope="module")
def named():
    with serving(FakeEngine(), host="Box.lan", allowed_origins=("https://chat.example",)) as served:
        yield served


@pytest.mark.parametrize("host", [
    "localhost", "localhost:8000", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:80",
    "box.lan", "BOX.lan:8000",
])  # fmt: skip
def test_own_hosts_are_served(named, host):
    assert ask(named, host=host).status == 200


@pytest.mark.parametrize("host", [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
    "evil.example@localhost", "localhost/evil", "127.0.0.2", "[::2]", "[::1", "localhost:port",
    "0.0.0.0", "",
])  # fmt: skip
def test_other_hosts_are_refused(named, host):
    """After DNS rebinding, a browser sends the name of the other site."""
    for answer in (ask(named, host=host), named.ask("GET", "/metrics", host=host)):
        assert answer.status == 421 and answer.error["code"] == "unknown_host"
        assert "--api-key-file" in answer.error["message"]
    assert named.ask("GET", "/health", host=host).status == 200  # probes use any address


@pytest.mark.parametrize("server, host, served", [
    (("10.0.0.7", 80), "10.0.0.7:80", True), (("10.0.0.7", 80), "10.0.0.8", False),
    (("::ffff:10.0.0.7", 80), "10.0.0.7", True), (("fe80::1%eth0", 80), "[fe80::1]:80", True),
    (("10.0.0.7", 80), "", False), (None, "", False), (None, "evil.example", False),
    (("10.0.0.7", 80), "[::1].evil.example", False),
])  # fmt: skip
def test_the_address_of_a_connection_is_served(server, host, served):
    """As with --host 0.0.0.0; an address is not a name that can be rebound."""
    seen = []

    async def app(scope, receive, send):
        seen.append(200)

    async def send(message):
        if message["type"] == "http.response.start":
            seen.append(message["status"])

    guard = access.CheckMiddleware(app, partial(access.check_host, ApiKeys(), "0.0.0.0", ()))
    headers = [(b"host", host.encode())]
    scope = {"type": "http", "path": "/version", "headers": headers, "server": server, "state": {}}
    asyncio.run(guard(scope, None, send))
    assert seen == [200 if served else 421]


@pytest.mark.parametrize("origin, status", [
    ("http://localhost", 200), ("http://LOCALHOST", 200), ("https://chat.example", 200),
    ("https://evil.example", 403), ("http://localhost:3000", 403), ("http://chat.example", 403),
    ("null", 403), ("", 403), ("http://[", 403), ("https://chat.example.evil.example", 403),
])  # fmt: skip
def test_origins(named, origin, status):
    answer = ask(named, host="localhost", origin=origin)
    assert answer.status == status
    if status == 403:
        assert answer.error["code"] == "unknown_origin"
        assert "--allowed-origins" in answer.error["message"]


def test_a_browser_may_read_answers_on_an_allowed_origin(named):
    """Also refusals; and it may ask for permission first."""
    headers = {"host": "localhost", "origin": "https://chat.example"}
    private = {"access_control_request_private_network": "true"}  # from a public page to localhost
    assert named.ask("OPTIONS", "/v1/completions", **headers, **PREFLIGHT, **private).status == 200
    granted = named.ask("OPTIONS", "/v1/completions", **headers, **PREFLIGHT)
    assert granted.status == 200
    assert granted.headers["access-control-allow-headers"] == "x-any"
    for answer in (granted, ask(named, **headers), named.ask("GET", "/nowhere", **headers)):
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"


def test_allowed_origins_with_api_keys():
    """The request for permission has no key, and other origins get none."""
    tenants = parse_api_keys("first", "keys")
    with serving(
        FakeEngine(), tenants=tenants, allowed_origins=("https://chat.example",)
    ) as served:
        headers = {"host": "any.example", "origin": "https://chat.example"}
        granted = served.ask("OPTIONS", "/v1/completions", **headers, **PREFLIGHT)
        assert granted.headers["access-control-allow-origin"] == "https://chat.example"
        assert ask(served, **headers).status == 401
        headers |= {"authorization": "Bearer first"}
        assert ask(served, **headers).status == 200
        denied = ask(served, **headers | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in denied.headers


def test_every_origin_may_be_allowed():
    with serving(FakeEngine(), allowed_origins=("*",)) as served:
        answer = ask(served, origin="https://any.example")
        assert answer.status == 200 and answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("text, valid", [
    ("https://a.example", True), ("http://localhost:3000", True), ("http://[::1]:80", True),
    ("https://a.example/", False), ("a.example", False), ("https://", False), ("", False),
    ("https://a.example?x", False), ("null", False),
])  # fmt: skip
def test_origins_are_validated(text, valid):
    assert access.is_origin(text) == valid
