"""Imitates a pooler at the start of a session: the client gets another process id."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Any

#: The server's message with its process id and secret: type, length 12, and both.
KEY_DATA = b"K\x00\x00\x00\x0c"


class Pooler:
    """Passes bytes on between clients and one database, and changes the process id."""

    def __init__(self, params: dict[str, Any]) -> None:
        host, port = params.get("host") or "localhost", int(params.get("port") or 5432)
        self._target: Any = f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])

    def __enter__(self) -> Pooler:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                family = socket.AF_UNIX if isinstance(self._target, str) else socket.AF_INET
                server = socket.socket(family)
                server.connect(self._target)
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=_pass_on, args=(source, target), daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            start = data.find(KEY_DATA)
            if start >= 0:
                at = start + len(KEY_DATA)
                data = data[:at] + b"\x00\x00\x00\x01" + data[at + 4 :]
            target.sendall(data)
    target.close()
