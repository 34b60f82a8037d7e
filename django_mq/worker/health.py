"""A health end point on the loopback: says yes or no, and nothing of what is in the queues."""

from __future__ import annotations

import contextlib
import socket
from time import monotonic

#: Seconds that one client may keep the supervisor, which has more important things to do.
PATIENCE = 0.2
#: No probe sends more, in bytes.
LONGEST = 8192
#: By what is to be said: yes, no, or that nothing is there.
STATUS = {True: "200 OK", False: "503 Service Unavailable", None: "404 Not Found"}


class Health:
    """GET /livez and /readyz on 127.0.0.1; answered by whoever calls `answer()` when readable."""

    def __init__(self, port: int) -> None:
        """Raises OSError when the port is taken."""
        self._socket = socket.create_server(("127.0.0.1", port))
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def answer(self, live: bool, ready: bool) -> None:
        """Answer one client that waits; one that is slow or went away gets nothing."""
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
        """Let go of the port in this process."""
        self._socket.close()


def _request(client: socket.socket) -> bytes:
    """Read up to the end of the headers; raises TimeoutError when they do not come soon."""
    deadline = monotonic() + PATIENCE
    data = b""
    while b"\r\n\r\n" not in data and len(data) < LONGEST:
        client.settimeout(max(0.001, deadline - monotonic()))
        more = client.recv(LONGEST)
        if not more:
            break
        data += more
    return data
