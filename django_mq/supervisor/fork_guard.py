"""Before a fork, close Django's connections, and warn about other open sockets and threads.

Two processes on one socket read each other's results. A fork copies the locks that a thread holds,
but not the thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from django.db import connections

logger = logging.getLogger("django_mq")

#: Descriptors 0 to 2 come from the parent of the process: with systemd they are sockets.
FIRST_OWN = 3


class ForkGuard:
    """Keeps connections, pools and threads of this process out of its children."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def prepare(self) -> None:
        """Close every connection and pool of Django; warn about sockets and threads that remain.

        Call it immediately before each fork: project code may connect at any time, for example
        in `AppConfig.ready()` or in a log handler. Never raises.
        """
        close_databases()
        found = {*_threads(), *_sockets()}
        if new := sorted(found - self._named):
            self._named |= found
            logger.warning(
                "worker processes would inherit these from the supervisor: %s. They would share"
                " the connections, and the threads would not run: open or start these in each"
                " process, for example in a receiver of worker_started",
                ", ".join(new),
                extra={"event": "open_at_fork"},
            )


def close_databases() -> None:
    """Close the connections of this thread and the pools of this process, on every alias."""
    for connection in connections.all(initialized_only=True):
        with contextlib.suppress(Exception):  # a lost server: its socket is closed anyway
            connection.close()
    # A pool belongs to the process, and any thread may have opened it. Django has no public way to
    # ask whether it is open, and `close_pool()` would create one in order to close it.
    for alias in connections:
        with contextlib.suppress(Exception):  # an engine that cannot be imported has none
            connection = connections[alias]
            if alias in getattr(connection, "_connection_pools", ()):
                connection.close_pool()  # type: ignore[attr-defined]


def _threads() -> Iterator[str]:
    own = threading.current_thread()
    for thread in threading.enumerate():
        if thread is not own:
            yield f"thread {thread.name}"


def _sockets() -> Iterator[str]:
    """Yield the connected stream sockets; nothing where the system does not list descriptors."""
    for directory in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            for path in list(Path(directory).iterdir()):
                if peer := _peer(int(path.name)):
                    yield f"connection to {peer}"
            return


def _peer(descriptor: int) -> str:
    """Return the peer of a stream socket; empty for anything else, and for socket pairs."""
    if descriptor < FIRST_OWN:
        return ""
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return ""
        with socket.socket(fileno=os.dup(descriptor)) as link:
            if link.type != socket.SOCK_STREAM:
                return ""
            peer = link.getpeername()
            return ":".join(map(str, peer[:2])) if isinstance(peer, tuple) else os.fsdecode(peer)
    return ""
