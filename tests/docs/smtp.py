"""A mail server on a free port: it counts connections and keeps letters."""

from __future__ import annotations

import socketserver
import threading
from typing import Any


class MailServer(socketserver.ThreadingTCPServer):
    """Refuses the addresses `bounce@` (550: never) and `busy@` (451: not now).

    For `hangup@` (421) and, without a reply, for a letter to `crash@` it ends the connection.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Session)
        self.connections = 0
        #: The recipients of each letter, in order.
        self.letters: list[str] = []

    def __enter__(self) -> MailServer:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        self.shutdown()
        super().__exit__(*args)


class _Session(socketserver.StreamRequestHandler):
    server: Any

    def handle(self) -> None:
        self.server.connections += 1
        self._say("220 here")
        recipient = ""
        while line := self.rfile.readline():
            words = line.decode().strip()
            verb = words[:4].upper()
            if verb == "RCPT":
                recipient = words.partition("<")[2].partition(">")[0]
                answer = _REFUSED.get(recipient.partition("@")[0], "250 fine")
                self._say(answer)
                if answer.startswith("421"):
                    return
            elif verb == "DATA":
                self._say("354 go on")
                while self.rfile.readline() not in (b".\r\n", b""):
                    pass
                if recipient.startswith("crash@"):
                    return
                self.server.letters.append(recipient)
                self._say("250 taken")
            else:
                self._say("221 bye" if verb == "QUIT" else "250 fine")
            if verb == "QUIT":
                return

    def _say(self, text: str) -> None:
        self.wfile.write(f"{text}\r\n".encode())


_REFUSED = {"bounce": "550 no such mailbox", "busy": "451 come again", "hangup": "421 too many"}
