"""Clients that disconnect or stop reading free their batch entry and do not affect others."""

from __future__ import annotations

import json
import socket
import struct
import threading

import pytest

from tests.serve.http.conftest import ENDLESS, POST, eventually, serving
from tests.serve.http.fake import FakeEngine

WIDE = ENDLESS | {"prompt": "wide", "stream": True}  # long tokens fill the kernel's buffers soon


@pytest.fixture(scope="module")
def slow():
    with serving(FakeEngine(pause=0.002)) as served:
        yield served


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("abruptly", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_disconnects(slow, stream, abruptly, n):
    before = len(slow.engine.ended)
    connection = slow.send(ENDLESS | {"stream": stream, "n": n})
    if stream:
        assert connection.recv(100)
    eventually(lambda: len(slow.engine.handles) == n)
    if abruptly:  # close with a reset
        linger = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()
    eventually(lambda: not slow.engine.handles, 2)
    assert {outcome.reason for outcome in slow.engine.ended[before:]} == {"cancelled"}
    slow.works()


def test_a_client_that_disconnects_while_queued(slow):
    running = [slow.send(ENDLESS) for _ in range(slow.engine.max_batch)]
    eventually(lambda: len(slow.engine.handles) == slow.engine.max_batch)
    waiting = slow.send(ENDLESS | {"stream": True})
    eventually(lambda: len(slow.engine.handles) == slow.engine.max_batch + 1)
    handle = slow.engine.handles[-1]
    waiting.close()
    eventually(lambda: handle.cancelled, 2)
    for connection in running:
        connection.close()
    eventually(lambda: not slow.engine.handles, 2)
    slow.works()


def test_a_client_that_disconnects_within_its_body(slow):
    with slow.connect() as connection:
        connection.sendall(POST + b"Content-Length: 100\r\n\r\n{")
    slow.works()


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
    monkeypatch.setattr("jaxkv.serve.http.listen.GRACE", 0.3)
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
