"""The end of a server: draining, and streams that wait."""

from __future__ import annotations

import re
import threading
import time

from jaxkv.serve.http import Drain
from tests.serve.http.conftest import ENDLESS, events, eventually, serving
from tests.serve.http.fake import FakeEngine


def test_draining_finishes_answers_and_refuses_requests():
    """Also answers that wait in the queue, streamed and whole."""
    engine, drain, go, answers = FakeEngine(max_batch=2), Drain(60), threading.Event(), {}
    write = engine._write
    engine._write = lambda handle: go.wait(60) and write(handle)
    with serving(engine, drain=drain, comment_seconds=0.2) as served:

        def ask(number: int) -> None:
            answers[number] = served.complete("x", max_tokens=100, seed=1, stream=number == 0)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(engine.handles) == 4)
        assert drain.begin() and not drain.begin() and not drain.over
        for answer in (served.ask("GET", "/health"), served.complete("x")):
            assert answer.status == 503 and answer.error["code"] == "server_draining"
            assert answer.headers["connection"] == "close" and answer.headers["retry-after"] == "10"
        assert not answers
        go.set()
        for thread in threads:
            thread.join(60)
        eventually(lambda: drain.over)
    stream = answers[0].raw.replace(b": waiting\n\n", b"")
    texts = ["".join(event["choices"][0]["text"] for event in events(stream))]
    texts += [answers[number].json["choices"][0]["text"] for number in (1, 2, 3)]
    assert texts == ["1 " * 50] * 4


def test_draining_ends_when_the_time_is_up():
    with serving(FakeEngine(pause=0.002), drain=(drain := Drain(0.3))) as served:
        endless = served.send(ENDLESS | {"stream": True})
        eventually(lambda: served.engine.handles)
        assert drain.begin() and not drain.over
        raw = b"".join(iter(lambda: endless.recv(1 << 16), b""))
        assert b"the server is stopping" in raw and b"data: [DONE]" in raw
        endless.close()
    assert drain.over


def test_a_body_that_is_still_coming_is_refused_when_draining():
    with serving(FakeEngine(), drain=(drain := Drain(5))) as served, served.connect() as slow:
        running = served.send(ENDLESS)
        eventually(lambda: served.engine.handles)
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
            b"Content-Type: application/json\r\n\r\n{"
        )
        time.sleep(0.1)
        drain.begin()
        slow.sendall(b"}")
        assert b" 503 " in slow.recv(1000)
        running.close()


def test_an_answer_that_is_read_slowly_is_complete():
    """Its last bytes are still unsent when its request has ended."""
    with serving(FakeEngine(), drain=(drain := Drain(20)), max_unread=10**6) as served:
        body = {"model": "bytes", "prompt": "wide", "max_tokens": 1500, "temperature": 0}
        slow = served.send(body, SO_RCVBUF=4096)
        eventually(lambda: served.engine.handles or served.engine.ended)
        assert drain.begin()
        eventually(lambda: drain.over)
        time.sleep(0.5)
        raw = b"".join(iter(lambda: slow.recv(1 << 16), b""))
        slow.close()
    head, _, content = raw.partition(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", head)[1])
    assert len(content) == length > 10**6


def test_a_stream_that_waits_sends_headers_and_comments():
    """Until its first token; then its events are those of any stream."""
    with serving(FakeEngine(max_batch=1, pause=0.002), comment_seconds=0.1) as served:
        running = served.send(ENDLESS)
        eventually(lambda: served.engine.handles)
        waiting = served.send({"model": "bytes", "prompt": "|hi", "stream": True})
        raw = b""
        while raw.count(b": waiting\n\n") < 3:
            raw += waiting.recv(1000)
        assert raw.startswith(b"HTTP/1.1 200 ") and b"text/event-stream" in raw
        assert b"data:" not in raw
        running.close()
        while b"[DONE]" not in raw:
            raw += waiting.recv(1000)
        assert b'"text":"h"' in raw and b'"text":"i"' in raw
        waiting.close()
        with served.client() as client:
            text = "".join(
                event.choices[0].text
                for event in client.completions.create(model="bytes", prompt="|hi", stream=True)
            )
        assert text == "hi"


def test_an_error_before_the_first_event_has_its_status(caplog):
    """If it comes within `comment_seconds`; else the stream reports it."""
    with serving(FakeEngine(), comment_seconds=5.0) as served:
        assert served.complete("!full", stream=True).status == 503
    with serving(FakeEngine(pause=0.3), comment_seconds=0.05) as served:
        answer = served.complete("✓!fail", stream=True, temperature=0, max_tokens=3)
        assert answer.status == 200 and b"the engine failed" in answer.raw
