"""A health endpoint on the loopback interface; it says nothing about the queues."""

from __future__ import annotations

import contextlib
import socket
from time import monotonic

#: Seconds that one client may block the supervisor.
PATIENCE = 0.2
#: The most bytes that are read of a request.
LONGEST = 8192
#: The status for yes, no, and an unknown path.
STATUS = {True: "200 OK", False: "503 Service Unavailable", None: "404 Not Found"}


class Health:
    """GET /livez and /readyz on 127.0.0.1; call `answer()` when `fileno()` is readable."""

    def __init__(self, port: int) -> None:
        """Listen on `port`; raises OSError if it is taken."""
        self._socket = socket.create_server(("127.0.0.1", port))
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def answer(self, live: bool, ready: bool) -> None:
        """Answer one waiting client; a slow client, or one that left, gets no answer."""
        with contextlib.suppress(OSError):
            client, _ = self._socket.accept()
            with client:
                path = (*_request(client).split(b" ", 2), b"", b"")[1]
                good = {b"/livez": live, b"/readyz": ready}.get(path)
                body = "ok\n" if good else "no\n"
                client.sendall(
                    f"HTTP/1.1 {STATUS[good]}\r\nContent-Type: text/plain\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
                )

    def close(self) -> None:
        """Close the port in this process."""
        self._socket.close()


def _request(client: socket.socket) -> bytes:
    """Read up to the end of the headers; raises TimeoutError if that takes too long."""
    deadline = monotonic() + PATIENCE
    data = b""
    while b"\r\n\r\n" not in data and len(data) < LONGEST:
        client.settimeout(max(0.001, deadline - monotonic()))
        more = client.recv(LONGEST)
        if not more:
            break
        data += more
    return data
