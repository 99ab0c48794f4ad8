"""Clients that send little, leave or stop reading free what they hold and do not affect others."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxkv.serve.http import connections
from tests.serve.http.conftest import ENDLESS, POST, eventually, serving
from tests.serve.http.fake import FakeEngine

ROOT = Path(__file__).resolve().parents[3]
WIDE = ENDLESS | {"prompt": "wide", "stream": True}  # long tokens fill the kernel's buffers soon
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


def test_a_kept_connection_answers_at_once(strict):
    """Not after the 40 ms for which a system delays an acknowledgement."""
    connection = http.client.HTTPConnection("127.0.0.1", strict.port, timeout=20)
    seconds = []
    for _ in range(8):
        start = time.monotonic()
        connection.request("GET", "/health")
        connection.getresponse().read()
        seconds.append(time.monotonic() - start)
    connection.close()
    assert min(seconds[1:]) < 0.03


@pytest.mark.parametrize("sent", [b"", GET[:-2] + b"a" * 1000], ids=["nothing", "each byte"])
def test_an_incomplete_header_ends_the_connection(strict, sent):
    """Also one that trickles in."""
    start = time.monotonic()
    with strict.connect() as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for byte in sent:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)
            if is_closed(connection):
                break
        assert connection.recv(100) == b""
    assert 0.2 < time.monotonic() - start < 5
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


def test_the_limit_of_open_files_is_raised():
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        assert connections.max_connections() <= 512 - connections.SPARE
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


@pytest.mark.parametrize("stream, abruptly, n", [
    (False, False, 1), (False, True, 3), (True, False, 3), (True, True, 1),
])  # fmt: skip
def test_a_client_that_disconnects(strict, stream, abruptly, n):
    before = len(strict.engine.ended)
    connection = strict.send(ENDLESS | {"stream": stream, "n": n})
    if stream:
        assert connection.recv(100)
    eventually(lambda: len(strict.engine.handles) == n)
    if abruptly:  # close with a reset
        linger = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()
    eventually(lambda: not strict.engine.handles, 2)
    assert {outcome.reason for outcome in strict.engine.ended[before:]} == {"cancelled"}
    strict.works()


def test_a_client_that_disconnects_while_queued(strict):
    running = [strict.send(ENDLESS) for _ in range(strict.engine.max_batch)]
    eventually(lambda: len(strict.engine.handles) == strict.engine.max_batch)
    waiting = strict.send(ENDLESS | {"stream": True})
    eventually(lambda: len(strict.engine.handles) == strict.engine.max_batch + 1)
    handle = strict.engine.handles[-1]
    waiting.close()
    eventually(lambda: handle.cancelled, 2)
    for connection in running:
        connection.close()
    eventually(lambda: not strict.engine.handles, 2)
    strict.works()


def test_a_client_that_stops_reading():
    """Its request is cancelled after `write_seconds`; others are served meanwhile."""
    with serving(FakeEngine(pause=0.0005), write_seconds=1.0, max_unread=10**9) as served:
        stuck = served.send(WIDE, SO_RCVBUF=4096)
        eventually(lambda: served.engine.handles)
        assert served.complete("|fine").json["choices"][0]["text"] == "fine"
        eventually(lambda: len(served.engine.ended) == 2)
        assert [outcome.reason for outcome in served.engine.ended] == ["eos", "cancelled"]
        stuck.close()
        served.works()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="not on this system")
def test_unread_data_is_dropped_after_a_timeout():
    """The kernel drops the connection with its unread data."""
    with serving(FakeEngine(pause=0.0005), kernel_seconds=0.5, max_unread=10**9) as served:
        stuck = served.send(WIDE, SO_RCVBUF=4096)
        eventually(lambda: served.engine.ended)
        with pytest.raises(ConnectionResetError):
            while stuck.recv(1 << 16):
                pass
        stuck.close()
        served.works()


def test_a_client_that_reads_too_slowly():
    """Its answer ends with an error when `max_unread` events are unread."""
    with serving(FakeEngine(), max_unread=50) as served:
        stuck = served.send(WIDE, SO_RCVBUF=4096)
        eventually(lambda: served.engine.ended)
        assert served.engine.ended[0].reason == "stop"  # the listener asks the engine to stop
        assert served.engine.ended[0].new_tokens < 90_000
        served.works()
        raw = b""
        while not raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            received = stuck.recv(1 << 16)
            assert received
            raw = raw[-1000:] + received
        assert b"read too slowly" in raw
        stuck.close()


def test_many_at_once(caplog):
    """Each client gets its own answer, whole or streamed, while others disconnect."""
    with serving(FakeEngine(max_batch=8)) as served:
        wrong = []

        def ask(number: int) -> None:
            answer = served.complete(f"|answer {number} ✓", stream=number % 2 == 0)
            if number % 2:
                text = answer.json["choices"][0]["text"]
            else:
                reply = answer.raw.decode().split("\n\n")[:-2]
                choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in reply]
                text = "".join(choice["text"] for choice in choices)
            if text != f"answer {number} ✓":
                wrong.append((number, text))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
        disconnecting = [served.send(WIDE) for _ in range(4)]
        for connection in disconnecting:
            connection.recv(1)
        for thread in threads:
            thread.start()
        for connection in disconnecting:
            connection.close()
        for thread in threads:
            thread.join()
        assert not wrong
        served.works()
    assert not caplog.text  # such as errors of writing to closed connections


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_stops(stream, monkeypatch):
    """Answers that do not end in time get an error: the server is stopping."""
    monkeypatch.setattr("jaxkv.serve.http.server.GRACE", 0.3)
    with serving(FakeEngine(pause=0.002)) as served:
        connection = served.send(ENDLESS | {"stream": stream})
        eventually(lambda: served.engine.handles)
        if stream:
            assert connection.recv(10)
    raw = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    connection.close()
    assert b"the server is stopping" in raw
    assert (b"data: [DONE]" in raw) == stream and (b" 503 " in raw) != stream
    assert served.engine.ended[-1].reason == "cancelled"
