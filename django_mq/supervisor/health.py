"""Pages for probes and for Prometheus, over a minimal HTTP server without a thread."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import NamedTuple

#: Seconds that one client may block the supervisor.
CLIENT_SECONDS = 0.2
#: Seconds without a look at a port at which no client could be accepted, as when the process has
#: no descriptor left: the port stays readable, and the supervisor would spin.
REST_SECONDS = 1.0
#: The maximum number of bytes that are read from a request.
MAX_REQUEST_BYTES = 8192


class HealthResponse(NamedTuple):
    """A response: its body, its status and its media type."""

    body: str
    status: str = "200 OK"
    media_type: str = "text/plain"


FAILED = "503 Service Unavailable"
MISSING = HealthResponse("no\n", "404 Not Found")


def probe_response(failed: Sequence[str]) -> HealthResponse:
    """Return the response of a probe's page: one line per failed part, or ok."""
    return HealthResponse("\n".join(failed) + "\n", FAILED) if failed else HealthResponse("ok\n")


class Endpoint:
    """Answers GET requests; call `answer()` when `fileno()` is readable."""

    def __init__(self, port: int, address: str) -> None:
        """Listen on `port`; raises OSError if it is taken."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, port), family=family)
        self._socket.setblocking(False)
        self._rests_until = float("-inf")

    def rests(self) -> bool:
        """Return whether to leave the port alone for now."""
        return monotonic() < self._rests_until

    def fileno(self) -> int:
        return self._socket.fileno()

    def answer(self, pages: Mapping[str, Callable[[], HealthResponse]]) -> None:
        """Answer one waiting client; a slow client, or one that left, gets no answer."""
        try:
            client, _ = self._socket.accept()
        except OSError:
            self._rests_until = monotonic() + REST_SECONDS
            return
        with contextlib.suppress(OSError), client:
            path = (*_request(client).split(b" ", 2), b"", b"")[1].decode("latin-1")
            make = pages.get(path.partition("?")[0])
            page = make() if make else MISSING
            body = page.body.encode()
            client.settimeout(CLIENT_SECONDS)
            client.sendall(
                f"HTTP/1.1 {page.status}\r\nContent-Type: {page.media_type}\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                + body
            )

    def close(self) -> None:
        """Close the port in this process."""
        self._socket.close()


def _request(client: socket.socket) -> bytes:
    """Read up to the end of the headers; raises TimeoutError if that takes too long."""
    deadline = monotonic() + CLIENT_SECONDS
    data = b""
    while b"\r\n\r\n" not in data and len(data) < MAX_REQUEST_BYTES:
        if (left := deadline - monotonic()) <= 0:  # each byte of a slow client comes in time
            raise TimeoutError
        client.settimeout(left)
        more = client.recv(MAX_REQUEST_BYTES)
        if not more:
            break
        data += more
    return data
