"""Clients that connect and send little cannot lock others out."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxkv.serve.http import connections
from tests.serve.http.conftest import ENDLESS, POST, eventually, serving
from tests.serve.http.fake import FakeEngine

ROOT = Path(__file__).resolve().parents[3]
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
SERVER = f"""
import resource, sys
sys.path.append({str(ROOT)!r})
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from tests.serve.http.conftest import serving
from tests.serve.http.fake import FakeEngine
with serving(FakeEngine()) as served:
    print(served.port, flush=True)
    sys.stdin.read()
"""


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed the connection, which had nothing to read."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    finally:
        connection.settimeout(20)


@pytest.fixture(scope="module")
def strict():
    with serving(FakeEngine(pause=0.002), header_seconds=0.3) as served:
        yield served


@pytest.mark.parametrize("begin", [b"", b"GET /health HTTP/1.1\r\nHost: "])
def test_an_incomplete_header_ends_the_connection(strict, begin):
    with strict.connect() as connection:
        connection.sendall(begin)
        start = time.monotonic()
        assert connection.recv(100) == b""
        assert 0.2 < time.monotonic() - start < 5
    strict.works()


def test_a_header_that_trickles_in_ends_the_connection(strict):
    start = time.monotonic()
    with strict.connect() as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for byte in b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a" * 1000:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)
            if is_closed(connection):
                break
    assert time.monotonic() - start < 5
    strict.works()


def test_a_second_header_must_be_complete_too(strict):
    with strict.connect() as connection:
        connection.sendall(GET)
        raw = b""
        while b'"ok"}' not in raw:
            raw += connection.recv(1000)
        time.sleep(0.6)
        assert not is_closed(connection)  # idle between requests, which is allowed for longer
        connection.sendall(GET[:20])
        assert connection.recv(1000) == b""


def test_the_rest_of_a_refused_body_must_come_in_time(strict):
    head = b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
    with strict.connect() as connection:
        connection.sendall(head)
        assert b" 405 " in connection.recv(1000)
        eventually(lambda: is_closed(connection), 5)


def test_a_refused_body_in_chunks_is_not_read_to_its_end():
    """The client gets its 413, and loses the connection although it goes on to send."""
    with (
        serving(FakeEngine(), header_seconds=0.3, max_body=1000) as served,
        served.connect() as connection,
    ):
        connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        start = time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while time.monotonic() - start < 10:
                connection.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n")
                time.sleep(0.01)
        assert time.monotonic() - start < 5
        served.works()


def test_idle_connections_give_way_to_new_ones():
    with serving(FakeEngine(pause=0.002), max_connections=4) as served:
        running = served.send(ENDLESS | {"stream": True})
        assert running.recv(10)
        idle = [served.connect() for _ in range(3)]
        time.sleep(0.05)
        assert not any(map(is_closed, idle))
        for _ in range(6):  # each closes the connection that has been idle longest
            assert served.ask("GET", "/health").status == 200
        eventually(lambda: is_closed(idle[0]))
        assert len(running.recv(10)) > 0 and served.engine.handles
        for connection in (running, *idle):
            connection.close()
        served.works()


def test_a_connection_beyond_the_limit_gets_503():
    """Where no connection is idle."""
    with serving(FakeEngine(pause=0.002), max_connections=2) as served:
        running = [served.send(ENDLESS) for _ in range(2)]
        eventually(lambda: len(served.engine.handles) == 2)
        with served.connect() as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 503 ")
        for connection in running:
            connection.close()
        eventually(lambda: not served.engine.handles)
        served.works()


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="descriptors as on Linux")
def test_idle_sockets_at_the_limit_of_open_files():
    """100 idle sockets at a limit of 64: others are served and nothing floods the log."""
    words = [sys.executable, "-c", SERVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, cwd=ROOT, text=True, **pipes) as process:
        try:
            port = int(process.stdout.readline())
            with contextlib.ExitStack() as open_sockets:
                for _ in range(100):
                    opened = socket.create_connection(("127.0.0.1", port), timeout=10)
                    open_sockets.enter_context(opened)
                for _ in range(3):
                    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                        client.sendall(GET)
                        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
            assert len(process.communicate("")[1]) < 1000
        finally:
            process.kill()


def test_exhausted_descriptors_are_reported_once(caplog, monkeypatch, unchecked):
    report, passed_on = connections.Reporter(), []

    class Loop:
        default_exception_handler = passed_on.append

    now = [1000.0]
    monkeypatch.setattr(connections.time, "monotonic", lambda: now[0])
    full = {"exception": OSError(errno.EMFILE, os.strerror(errno.EMFILE))}
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            report(Loop, full)
        assert len(caplog.records) == 1 and "ulimit -n" in caplog.text
        now[0] += 61
        report(Loop, full)
        assert len(caplog.records) == 2
    report(Loop, {"exception": OSError(errno.EPIPE, "broken")})
    assert len(passed_on) == 1


def test_the_limit_of_open_files_is_raised():
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        assert connections.most_connections() <= 512 - connections.SPARE
        connections.raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_after_a_pipelined_request(strict, stream):
    connection = strict.send(ENDLESS | {"stream": stream})
    connection.sendall(GET)
    eventually(lambda: strict.engine.handles)
    connection.sendall(GET)
    time.sleep(0.05)
    connection.close()
    eventually(lambda: not strict.engine.handles, 2)
    strict.works()


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_after_the_last_request_are_not_logged(strict, stream, caplog):
    """A client that announced to close may not send more; its request is cancelled."""
    body = json.dumps(ENDLESS | {"stream": stream}).encode()
    with strict.connect() as connection:
        head = POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        eventually(lambda: strict.engine.handles)
        if stream:
            assert connection.recv(10)
        connection.sendall(b"more")
        eventually(lambda: not strict.engine.handles, 2)
    assert not caplog.text
    strict.works()


def test_pipelined_requests_are_answered_in_order(strict):
    with strict.connect() as connection:
        connection.sendall(GET * 3 + b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        raw = b""
        while b"version" not in raw:
            raw += connection.recv(1000)
        assert raw.count(b"HTTP/1.1 200 ") == 4


def test_pipelining_is_bounded(strict):
    """Bytes beyond the request that is being answered would fill the memory."""
    connection = strict.send(ENDLESS)
    eventually(lambda: strict.engine.handles)
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        for _ in range(100):
            connection.sendall(b"x" * 2**16)
    eventually(lambda: not strict.engine.handles, 2)
    connection.close()
    strict.works()
