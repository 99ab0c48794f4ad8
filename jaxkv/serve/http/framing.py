"""Refuses requests whose end a proxy may see elsewhere, which would let one smuggle another in."""

from __future__ import annotations

from typing import Any

import h11

HEADER = 2**16  # bytes of a header, and of the line before a chunk
OVERHEAD = 2**16  # bytes of a body's framing, besides PER_BYTE of each of its bytes
PER_BYTE = 6  # bytes of framing: a chunk of one byte has five


class RequestParser(h11.Connection):
    """h11's parser, which also refuses two lengths of one body, and endless chunk extensions.

    h11 refuses a Content-Length of other characters than digits or unlike another, transfer codings
    other than chunked, and control characters. It joins folded lines, as RFC 9112 5.2 allows.
    refusal: why the bytes were refused, for the response.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEADER)
        self.refusal = ""
        self._received = self._body = 0  # bytes of the body that is coming, with and without chunks

    def receive_data(self, data: bytes) -> None:
        if self.their_state is h11.SEND_BODY:
            self._received += len(data)
        super().receive_data(data)

    def next_event(self) -> Any:
        """The next event. Raises h11.RemoteProtocolError for bytes that are refused."""
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._received = self._body = 0
                _check_length(event)
            elif isinstance(event, h11.Data):
                self._body += len(event.data)
            long = self._received - self._body > OVERHEAD + PER_BYTE * self._body
            if event is h11.NEED_DATA and long:  # all that was received is parsed
                raise h11.RemoteProtocolError("the chunks of a body have too long extensions")
        except h11.RemoteProtocolError as error:
            self.refusal = str(error)
            raise
        return event


def _check_length(request: h11.Request) -> None:
    """Raise for two lengths of one body (RFC 9112 6.3), and for chunks in HTTP/1.0 (6.1)."""
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" not in names:
        return
    if b"content-length" in names:
        raise h11.RemoteProtocolError("a request has Content-Length or Transfer-Encoding, not both")
    if request.http_version < b"1.1":
        raise h11.RemoteProtocolError("HTTP/1.0 has no Transfer-Encoding; send a Content-Length")
