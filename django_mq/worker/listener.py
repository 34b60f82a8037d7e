"""LISTEN on a connection of its own. A notification is a hint, and only rings the wakeup."""

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

from django_mq.executor.connections import FIRST_WAIT, LONGEST_WAIT, LOST
from django_mq.worker.wakeup import Wakeup

#: Seconds between two rings at least, since every role that can log in may NOTIFY.
REST = 0.005
#: Seconds between two checks of the link; after three missed ones it counts as broken.
PING = 10.0


class Listener(threading.Thread):
    """Rings `wakeup` for each notification of a committed message.

    Reconnects after a lost connection, and then rings, since it may have missed a notification.
    Until then the poll finds what is due.
    """

    def __init__(self, alias: str, wakeup: Wakeup) -> None:
        super().__init__(name="mq-listener", daemon=True)
        self._alias = alias
        self._wakeup = wakeup
        self._stopping = threading.Event()
        self._connection: psycopg.Connection[Any] | None = None
        self._heard_at = float("-inf")

    def healthy(self) -> bool:
        """Say whether the link has answered recently."""
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
        """End the thread; shutting down the socket ends even a read on a stalled link."""
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
                    self._ring()  # before reading it, so that the claim is not delayed
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
