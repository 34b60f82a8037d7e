"""HTTP with a limit on the whole answer, where urllib limits only each wait for bytes of it."""

from __future__ import annotations

import io
import socket
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from time import monotonic
from typing import Any
from urllib.request import HTTPHandler, HTTPSHandler, Request


class _TimedReader(io.RawIOBase):
    """Reads from a socket until `ends_at` of the monotonic clock; then raises TimeoutError."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, ends_at: float) -> None:
        self._raw = raw
        self._sock = sock
        self._ends_at = ends_at

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._ends_at - monotonic()
        if left <= 0:
            raise TimeoutError("the answer is not complete in time")
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedResponse(HTTPResponse):
    """A response that must arrive within the timeout of its socket."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        if (seconds := sock.gettimeout()) is not None:
            raw: Any = self.fp.detach()
            self.fp = io.BufferedReader(_TimedReader(raw, sock, monotonic() + seconds))


class _Connection(HTTPConnection):
    response_class = _TimedResponse


class _SecureConnection(HTTPSConnection):
    response_class = _TimedResponse


class TimedHTTPHandler(HTTPHandler):
    def http_open(self, req: Request) -> Any:
        return self.do_open(_Connection, req)


class TimedHTTPSHandler(HTTPSHandler):
    def https_open(self, req: Request) -> Any:
        # From Python 3.12 on, the handler has one: loading the certificates takes 20 ms.
        context = self._context  # type: ignore[attr-defined]
        return self.do_open(_SecureConnection, req, context=context)
