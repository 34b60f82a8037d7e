"""LISTEN on a connection of its own. A notification is a hint: all it does is ring the wakeup."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from time import monotonic
from typing import Any

import psycopg
from django.db import connections

from django_mq.worker.database import FIRST_WAIT, LONGEST_WAIT, LOST
from django_mq.worker.wakeup import Wakeup

#: Everybody with a login may NOTIFY, so a ring is obeyed at most so often, in seconds.
REST = 0.005
#: So often, in seconds, the link is tried; it is in doubt when three tries were missed.
PING = 10.0


class Listener(threading.Thread):
    """Rings `wakeup` whenever somebody says that a message was committed.

    When the connection is lost it is made anew, and rings, since a ring may have been missed;
    meanwhile the poll finds what is due.
    """

    def __init__(self, alias: str, wakeup: Wakeup) -> None:
        super().__init__(name="mq-listener", daemon=True)
        self._alias = alias
        self._wakeup = wakeup
        self._stopping = threading.Event()
        self._connection: psycopg.Connection[Any] | None = None
        self._heard_at = float("-inf")

    def healthy(self) -> bool:
        """Say whether the link answered lately."""
        return monotonic() - self._heard_at < 3 * PING

    def run(self) -> None:
        wait = FIRST_WAIT
        while not self._stopping.is_set():
            try:
                self._listen()
            except LOST:
                self._heard_at = float("-inf")
                self._stopping.wait(wait)
                wait = min(wait * 2, LONGEST_WAIT)
            else:
                wait = FIRST_WAIT

    def stop(self) -> None:
        """End the thread: the only way out of a stalled link is to shut its socket down."""
        self._stopping.set()
        connection = self._connection
        if connection is not None and not connection.closed:
            with (
                contextlib.suppress(OSError, *LOST),
                socket.socket(fileno=os.dup(connection.fileno())) as link,
            ):
                link.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        params = connections[self._alias].get_connection_params()
        with psycopg.connect(**{**params, "autocommit": True}) as connection:
            self._connection = connection
            connection.execute("listen django_mq")
            self._wakeup.ring()
            link = select.poll()
            link.register(connection.fileno(), select.POLLIN)
            while not self._stopping.is_set():
                self._heard_at = monotonic()
                announced = 0
                if link.poll(PING * 1000):
                    self._ring()  # before it is read: whoever claims has no time to lose
                    announced = 1
                else:
                    connection.execute("select 1")
                while sum(1 for _ in connection.notifies(timeout=0)) > announced:
                    self._ring()
                    announced = 0

    def _ring(self) -> None:
        self._wakeup.ring()
        self._stopping.wait(REST)
        self._heard_at = monotonic()
