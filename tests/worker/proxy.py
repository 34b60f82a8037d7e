"""A proxy between a client and PostgreSQL that can be cut, or cut at a chosen word."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any


class Proxy:
    """Passes bytes on, for one database's connection parameters, until told otherwise.

    `cut_at(word, answered=...)`: the next client message that contains `word` is the last one of
    its connection. Either it never arrives, or it does and its answer is lost.
    """

    def __init__(self, params: dict[str, Any]) -> None:
        host, port = params.get("host") or "localhost", int(params.get("port") or 5432)
        #: The server's own address.
        self.address = {"host": host, "port": port}
        self._target: Any = f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._word: bytes | None = None
        self._arrives = False
        self._refusing = False
        self._mute: set[socket.socket] = set()
        self._held_at: bytes | None = None
        self._flows = threading.Event()
        self._flows.set()
        self._frozen: list[threading.Event] = []
        self._links: list[socket.socket] = []
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.getsockname()[1])

    def cut_at(self, word: str, *, arrives: bool) -> None:
        self._arrives = arrives
        self._word = word.encode()

    def refuse(self, refusing: bool) -> None:
        """Cut every link, and accept no new ones while `refusing`."""
        self._refusing = refusing
        if refusing:
            for link in list(self._links):
                _close(link)

    def hold(self, holding: bool) -> None:
        """While `holding`, no link is closed and no data passes: the server hangs."""
        if holding:
            self._flows.clear()
        else:
            self._held_at = None
            self._flows.set()

    def is_holding(self) -> bool:
        return not self._flows.is_set()

    def freeze(self) -> None:
        """Pass no more data on the links that are open now, nor close them; new ones work."""
        self._held_at = None
        self._frozen.append(self._flows)
        self._flows.clear()
        self._flows = threading.Event()
        self._flows.set()

    def hold_at(self, word: str) -> None:
        """Start holding when a client message contains `word`; it does not arrive until later."""
        self._held_at = word.encode()

    def close(self) -> None:
        for flows in (self._flows, *self._frozen):
            flows.set()
        _close(self._server)
        for link in self._links:
            _close(link)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                if self._refusing:
                    _close(client)
                    continue
                server = self._connect()
                self._links += [client, server]
                for passes in (self._up, self._down):
                    threading.Thread(
                        target=passes, args=(client, server, self._flows), daemon=True
                    ).start()

    def _connect(self) -> socket.socket:
        if isinstance(self._target, tuple):
            return socket.create_connection(self._target)
        link = socket.socket(socket.AF_UNIX)
        link.connect(self._target)
        return link

    def _up(self, client: socket.socket, server: socket.socket, flows: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if self._held_at is not None and self._held_at in data:
                    flows.clear()
                flows.wait()
                if self._word is not None and self._word in data:
                    self._word = None
                    self.cuts += 1
                    if self._arrives:
                        self._mute.add(client)  # its answer ends the link
                        server.sendall(data)
                        return
                    break
                server.sendall(data)
        _close(client)
        _close(server)

    def _down(self, client: socket.socket, server: socket.socket, flows: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                flows.wait()
                if client in self._mute:
                    break
                client.sendall(data)
        _close(client)
        _close(server)


def _close(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    link.close()
