"""LISTEN on a connection of its own. A notification is a hint, and only rings the wakeup."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import psycopg

from django_mq.executor.connections import driver_connection
from django_mq.executor.outage import MAX_RECONNECT_WAIT, RECONNECT_WAIT
from django_mq.executor.watchdog import Link
from django_mq.store import commands, notify
from django_mq.store.limits import Limits, set_for_session
from django_mq.store.server_errors import LOST
from django_mq.store.session_facts import is_pooled, notify_arrives
from django_mq.worker.wakeup import Wakeup

#: The minimum number of seconds between two rings, since every role that can log in may NOTIFY.
MIN_RING_INTERVAL = 0.005
#: Seconds between two checks of the link. If a check takes longer, the thread reconnects.
PING_INTERVAL = 10.0
#: Seconds that a NOTIFY may take through a pooler.
NOTIFY_SECONDS = 3.0


class _Deaf(Exception):
    """A transaction pooler keeps the notifications from the link."""


class Listener(threading.Thread):
    """Rings `wakeup` for each notification, and calls `on_command()` for one about a command.

    Reconnects after a lost connection, and then rings, since it may have missed a notification.
    Until then the poll finds what is due. Through a pooler, it tests whether notifications arrive.
    """

    def __init__(
        self,
        alias: str,
        wakeup: Wakeup,
        *,
        link: Link,
        on_command: Callable[[], None],
    ) -> None:
        super().__init__(name="mq-listener", daemon=True)
        self._alias = alias
        self._wakeup = wakeup
        self._on_command = on_command
        self._link = link
        self._link.seconds = PING_INTERVAL
        self._stopping = threading.Event()
        # When the link last answered; before the first attempt inf, while it is dead or deaf -inf.
        self._heard_at = float("inf")
        #: How often it has read the link, or tried to connect: a sign that the thread moves.
        self.steps = 0

    def degraded(self) -> bool:
        """Return whether the link is dead or deaf; not before the first attempt has ended."""
        return monotonic() - self._heard_at >= 3 * PING_INTERVAL

    def run(self) -> None:
        wait = RECONNECT_WAIT
        while not self._stopping.is_set():
            self.steps += 1
            try:
                self._listen()
            except (*LOST, _Deaf) as error:
                self._heard_at = float("-inf")
                self._stopping.wait(PING_INTERVAL if isinstance(error, _Deaf) else wait)
                wait = min(wait * 2, MAX_RECONNECT_WAIT)
            else:
                wait = RECONNECT_WAIT

    def stop(self) -> None:
        """End the thread; shutting down the socket ends even a read on a stalled link."""
        self._stopping.set()
        self._link.shut()

    def _listen(self) -> None:
        with driver_connection(self._alias, self._link) as connection:
            version = connection.info.server_version
            connection.execute(set_for_session(Limits(), server_version=version))
            self.steps += 1
            if is_pooled(connection) and self._is_deaf(connection):
                raise _Deaf
            connection.execute(f"listen {notify.CHANNEL}; listen {commands.CHANNEL}")
            self._wakeup.ring()
            link = select.poll()
            link.register(connection.fileno(), select.POLLIN)
            while not self._stopping.is_set():
                self._heard_at = monotonic()
                self.steps += 1
                announced = 0
                if link.poll(PING_INTERVAL * 1000):
                    self._ring()  # before reading it, so that the claim is not delayed
                    announced = 1
                else:
                    connection.execute("select 1")
                while self._read(connection) > announced:
                    self._ring()
                    announced = 0

    def _read(self, connection: psycopg.Connection[Any]) -> int:
        """Read the notifications that have arrived, and return their number."""
        channels = [each.channel for each in connection.notifies(timeout=0)]
        if commands.CHANNEL in channels:
            self._on_command()
        return len(channels)

    def _ring(self) -> None:
        self._wakeup.ring()
        self._stopping.wait(MIN_RING_INTERVAL)
        self._heard_at = monotonic()

    def _is_deaf(self, connection: psycopg.Connection[Any]) -> bool:
        """Return whether the pooler keeps notifications from the connection.

        False if this cannot be determined, since the pooler may have too few connections.
        """
        try:
            with contextlib.closing(driver_connection(self._alias, Link())) as notifying:
                return notify_arrives(connection, notifying, seconds=NOTIFY_SECONDS) is False
        except LOST:
            return False
