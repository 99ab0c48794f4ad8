"""Requests whose end is ambiguous are refused; so nobody hides a second request in a first."""

from __future__ import annotations

import json
import time

import pytest

from tests.serve.http.conftest import POST, serving
from tests.serve.http.fake import FakeEngine

BODY = json.dumps({"model": "bytes", "prompt": "|x", "max_tokens": 4}).encode()
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CODED = b"Transfer-Encoding: chunked\r\n"
SECOND = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
# Each rule of RFC 9112 that says 400 (or 501), with the section.
REFUSED = {
    "6.3 length and chunks": (LENGTH + CODED, CHUNKS),
    "6.3 chunks and length": (CODED + LENGTH, CHUNKS),
    "6.3 no length and chunks": (b"Content-Length: 0\r\n" + CODED, CHUNKS),
    "6.3 two lengths": (LENGTH + b"Content-Length: 5\r\n", BODY),
    "6.3 a list of lengths": (b"Content-Length: %d, 5\r\n" % len(BODY), BODY),
    "6.3 plus": (b"Content-Length: +%d\r\n" % len(BODY), BODY),
    "6.3 minus": (b"Content-Length: -%d\r\n" % len(BODY), BODY),
    "6.3 underscore": (b"Content-Length: 5_0\r\n", BODY),
    "6.3 hexadecimal": (b"Content-Length: 0x32\r\n", BODY),
    "6.3 empty": (b"Content-Length:\r\n", BODY),
    "6.1 gzip": (b"Transfer-Encoding: gzip\r\n", CHUNKS),
    "6.1 gzip, chunked": (b"Transfer-Encoding: gzip, chunked\r\n", CHUNKS),
    "6.1 identity": (b"Transfer-Encoding: identity\r\n", CHUNKS),
    "6.1 xchunked": (b"Transfer-Encoding: xchunked\r\n", CHUNKS),
    "6.1 chunked twice": (CODED + CODED, CHUNKS),
    "6.1 a control character": (b"Transfer-Encoding: \x0bchunked\r\n", CHUNKS),
    "5.1 a space before the colon": (b"Transfer-Encoding : chunked\r\n", CHUNKS),
    "5.1 a bare CR": (b"X: a\rTransfer-Encoding: chunked\r\n" + LENGTH, BODY),
    "5.1 a NUL": (b"X: a\x00b\r\n" + LENGTH, BODY),
    "7.1 no size": (CODED, b"zz\r\n" + CHUNKS),
    "7.1 a signed size": (CODED, b"+" + CHUNKS),
    "7.1 a size with 0x": (CODED, b"0x" + CHUNKS),
    "7.1 a chunk that is longer": (CODED, b"1\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "7.1 bytes between chunks": (CODED, b"1\r\n{xx" + CHUNKS),
}
ACCEPTED = {
    "5.2 a folded value": (b"X: a\r\n b\r\n" + LENGTH, BODY),
    "5.2 a folded coding": (b"Transfer-Encoding:\r\n chunked\r\n", CHUNKS),
    "6.3 one length twice": (LENGTH + LENGTH, BODY),
    "7.1.1 an extension": (CODED, CHUNKS.replace(b"\r\n", b';a="b"\r\n', 1)),
    "7.1.2 a trailer": (CODED, CHUNKS[:-2] + b"Content-Length: 5\r\n\r\n"),
    "chunks of one byte": (
        CODED, b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    ),
}  # fmt: skip


def replies(served, *parts: bytes) -> bytes:
    """All that the server sends, until it closes the connection or has answered SECOND."""
    with served.connect() as connection:
        for part in parts:
            connection.sendall(part)
        raw = b""
        while b"version" not in raw and (new := connection.recv(10_000)):
            raw += new
        return raw


# Two are refused by their heads, and two by their bodies, which may come later.
SENT_APART = ("6.3 length and chunks", "6.1 gzip", "7.1 no size", "7.1 bytes between chunks")


@pytest.mark.parametrize(
    ("case", "at_once"), [(case, True) for case in REFUSED] + [(case, False) for case in SENT_APART]
)
def test_ambiguous_framing_ends_the_connection(served, case, at_once):
    """With one answer, of status 400, and none to the request that follows."""
    head, body = REFUSED[case]
    parts = [POST + head + b"\r\n", body, SECOND]
    raw = replies(served, b"".join(parts)) if at_once else replies(served, parts[0], body)
    assert raw.startswith(b"HTTP/1.1 400 ") and raw.count(b"HTTP/1.1 ") == 1
    assert b"\r\nconnection: close\r\n" in raw.lower()
    served.works()


@pytest.mark.parametrize("case", ACCEPTED)
def test_other_framing_is_read_as_the_rfc_says(served, case):
    head, body = ACCEPTED[case]
    raw = replies(served, POST + head + b"\r\n" + body + SECOND)
    assert raw.count(b"HTTP/1.1 200 ") == raw.count(b"HTTP/1.1 ") == 2
    assert b'"text":"x"' in raw


def test_http_1_0(served):
    """A length is read, a coding is refused, and `Expect` is not answered (RFC 9110 10.1.1)."""
    head = POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Expect: 100-continue\r\n"
    assert replies(served, head + CODED + b"\r\n" + CHUNKS).startswith(b"HTTP/1.1 400 ")
    raw = replies(served, head + LENGTH + b"\r\n" + BODY)
    assert raw.startswith(b"HTTP/1.1 200 ") and raw.count(b"HTTP/1.1 ") == 1


def test_expect_100_continue(served):
    with served.connect() as connection:
        connection.sendall(POST + b"Expect: 100-continue\r\n" + LENGTH + b"\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")
        connection.sendall(BODY)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("extension", [2**18, 2**11])
def test_long_chunk_extensions_are_refused(served, extension):
    """One long extension, and many short ones, which would let a body last for ever."""
    chunk = b"1;" + b"a" * extension + b"\r\n \r\n"
    with served.connect() as connection:
        connection.sendall(POST + CODED + b"\r\n")
        sent = 0
        connection.settimeout(0.02)
        while sent < 2**22:
            connection.sendall(chunk)
            sent += len(chunk)
            try:
                assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")
                break
            except TimeoutError:
                pass
            except ConnectionResetError:
                break
        assert sent < 2**20
    served.works()


def test_a_pipelined_request_after_a_refused_one_is_answered(served):
    """If the refused body ends: the second request is not a part of it."""
    raw = replies(served, POST.replace(b"json", b"xml") + LENGTH + b"\r\n" + BODY + SECOND)
    assert raw.startswith(b"HTTP/1.1 415 ") and raw.count(b"HTTP/1.1 200 ") == 1


@pytest.mark.parametrize("head", [CODED, b"Content-Length: 8000000\r\n"])
@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_a_refused_body_is_soon_read_no_more(head, pause):
    """Neither half a second nor a megabyte longer, however fast it comes."""
    with serving(FakeEngine(), max_body=1000) as served, served.connect() as connection:
        connection.sendall(POST.replace(b"json", b"xml") + head + b"\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 415 ")
        start, sent = time.monotonic(), 0
        try:
            while time.monotonic() - start < 10 and sent < 7_000_000:
                connection.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n")
                sent += 1007
                time.sleep(pause)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert time.monotonic() - start < 2 and sent < 7_000_000
        served.works()


def test_a_connection_is_used_again_after_a_refused_body_that_ends(served):
    with served.connect() as connection:
        connection.sendall(POST.replace(b"json", b"xml") + LENGTH + b"\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 415 ")
        connection.sendall(BODY)
        time.sleep(1)  # longer than the server would have waited for the body
        connection.sendall(SECOND)
        raw = b""
        while b"version" not in raw and (new := connection.recv(1000)):
            raw += new
        assert b"HTTP/1.1 200 " in raw
