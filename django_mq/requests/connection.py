"""The connection of a waiter: queries for replies, LISTEN, and a sleep that can be ended."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Sequence
from time import monotonic
from typing import Any

import psycopg

from django_mq.conf import get_settings
from django_mq.executor.connections import driver_connection
from django_mq.executor.statements import RepeatingCursor
from django_mq.executor.timed_link import TimedLink
from django_mq.executor.watchdog import STALL_MARGIN, Link
from django_mq.store import results
from django_mq.store.limits import Limits, set_for_session
from django_mq.store.results import ReplyState
from django_mq.store.server_errors import LOST
from django_mq.store.session_facts import is_pooled

#: The server's limits for a query. With STALL_MARGIN they stay below the default timeout of
#: `ask()`, so that a reply still arrives in time if the connection stalls.
LIMITS = Limits(statement=5.0, lock=5.0)
#: Seconds until LISTEN is tried again after it failed, and between two LISTENs on a connection
#: without other use: each shows whether the connection still answers.
LISTEN_INTERVAL = 10.0


class SleepBreaker:
    """Ends the sleep of a link from any thread; several pokes count as one."""

    def __init__(self) -> None:
        self._sender, self.receiver = socket.socketpair()
        self._sender.setblocking(False)
        self.receiver.setblocking(False)

    def __call__(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: earlier pokes have not been read yet
            self._sender.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.receiver.recv(4096):
                pass


class ServerLink:
    """A waiter's link to the server, for one thread.

    Any method may raise an error in LOST; call `close()` then, unless the server refused the query.
    One connection queries and listens, unless WAKEUP names another alias to listen on. If the
    listening connection is lost, or WAKEUP is "poll", the link only queries. Every wait for the
    server is bounded.
    """

    def __init__(self, alias: str, poke: SleepBreaker) -> None:
        self._alias = alias
        self._poke = poke
        self._rang = False
        self._query_connection: psycopg.Connection[Any] | None = None
        self._cursor: RepeatingCursor | None = None
        self._listen_connection: psycopg.Connection[Any] | None = None
        self._tried_at = float("-inf")

    def query(self, ids: Sequence[int]) -> list[ReplyState]:
        """Return the states of the requests `ids`; listens first, so that no reply is missed."""
        if self._cursor is None:
            self._cursor = self._connect()
        listens_apart = self._listen_connection is not self._query_connection
        if listens_apart and monotonic() - self._tried_at > LISTEN_INTERVAL:
            try:
                self._listen(get_settings().listen_alias(self._alias))
            finally:
                self._tried_at = monotonic()
        return results.reply_states(self._cursor, ids)

    def is_listening(self) -> bool:
        return self._listen_connection is not None

    def sleep(self, seconds: float) -> bool:
        """Sleep until a poke or notification, at most `seconds`; return whether it was notified."""
        if self._rang:
            seconds = 0.0  # notified during the last query
        with selectors.DefaultSelector() as selector:
            selector.register(self._poke.receiver, selectors.EVENT_READ)
            if self._listen_connection is not None:
                selector.register(self._listen_connection.fileno(), selectors.EVENT_READ)
            selector.select(max(0.0, seconds))
        self._poke.clear()
        if self._listen_connection is not None:
            server = self._listen_connection.pgconn
            server.consume_input()
            while server.notifies():
                self._rang = True
        rang, self._rang = self._rang, False
        return rang

    def close(self) -> None:
        _close(self._query_connection)
        _close(self._listen_connection)
        self._query_connection = self._listen_connection = self._cursor = None
        self._tried_at = float("-inf")
        self._rang = True  # a notification may be lost with the connection

    def _connect(self) -> RepeatingCursor:
        link = TimedLink(LIMITS.statement + STALL_MARGIN)
        self._query_connection = connection = driver_connection(self._alias, link)
        # Through a pooler the limits are sent with each query, which takes 0.6 ms instead of 0.2:
        # the application may use the session, too. The settings of an alias do not always show a
        # pooler.
        pooled = is_pooled(connection)
        if not pooled:
            version = connection.info.server_version
            connection.execute(set_for_session(LIMITS, server_version=version))
        return RepeatingCursor(connection, LIMITS, limited=pooled)

    def _listen(self, alias: str | None) -> None:
        if alias is None:
            return
        shared = alias == self._alias and self._query_connection
        try:
            if self._listen_connection is None:
                self._listen_connection = shared or driver_connection(alias, _listen_link())
                self._listen_connection.add_notify_handler(self._on_notify)
            self._listen_connection.execute(results.LISTEN)
        except LOST:
            refused, self._listen_connection = self._listen_connection, None
            if shared:
                raise
            _close(refused)

    def _on_notify(self, notification: object) -> None:
        self._rang = True


def _close(connection: psycopg.Connection[Any] | None) -> None:
    if connection is not None:
        with contextlib.suppress(*LOST):
            connection.close()


def _listen_link() -> Link:
    """Return the link of a connection that only listens, and delays queries while it stalls."""
    link = TimedLink(STALL_MARGIN)
    link.max_wait = STALL_MARGIN
    return link
