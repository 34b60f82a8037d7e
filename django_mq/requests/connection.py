"""The connection of a waiter: queries for replies, LISTEN, and a sleep that can be ended."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Sequence
from time import monotonic
from typing import Any

import psycopg
from django.db import connections
from psycopg import sql

from django_mq.conf import get_settings
from django_mq.executor.connections import LOST
from django_mq.store import results
from django_mq.store.results import ReplyState

#: Makes the system give up a silent network link after seconds instead of minutes.
CONNECT_OPTIONS = {"connect_timeout": 10, "tcp_user_timeout": 10_000}
#: Seconds until LISTEN is tried again after it failed.
LISTEN_RETRY_SECONDS = 10.0


class SleepBreaker:
    """Ends the sleep of a link from any thread; several pokes count as one."""

    def __init__(self) -> None:
        self._sender, self.receiver = socket.socketpair()
        self._sender.setblocking(False)
        self.receiver.setblocking(False)

    def __call__(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: earlier pokes are unread
            self._sender.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.receiver.recv(4096):
                pass


class ServerLink:
    """A waiter's link to the server, for one thread.

    Any method may raise an error in LOST; call `close()` then. One connection queries and
    listens, unless WAKEUP names another alias to listen on. If that is lost, or WAKEUP is "poll",
    the link only queries.
    """

    def __init__(self, alias: str, poke: SleepBreaker) -> None:
        self._alias = alias
        self._poke = poke
        self._rang = False
        self._query_connection: psycopg.Connection[Any] | None = None
        self._listen_connection: psycopg.Connection[Any] | None = None
        self._tried_at = float("-inf")

    def query(self, ids: Sequence[int]) -> list[ReplyState]:
        """Return the states of the requests `ids`; LISTEN comes first, so no reply is missed."""
        if self._query_connection is None:
            self._query_connection = _connect(self._alias)
        if self._listen_connection is None and monotonic() - self._tried_at > LISTEN_RETRY_SECONDS:
            self._tried_at = monotonic()
            self._listen(get_settings().wakeup)
        with self._query_connection.cursor() as cursor:
            return results.reply_states(cursor, ids)

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
        self._query_connection = self._listen_connection = None
        self._tried_at = float("-inf")
        self._rang = True  # a notification may be lost with the connection

    def _listen(self, wakeup: str) -> None:
        if wakeup == "poll":
            return
        shared = wakeup in ("notify", self._alias) and self._query_connection
        try:
            self._listen_connection = shared or _connect(wakeup)
            self._listen_connection.add_notify_handler(self._on_notify)
            self._listen_connection.execute(results.LISTEN)
        except LOST:
            if shared:
                raise
            _close(self._listen_connection)
            self._listen_connection = None

    def _on_notify(self, notification: object) -> None:
        self._rang = True


def _close(connection: psycopg.Connection[Any] | None) -> None:
    if connection is not None:
        with contextlib.suppress(*LOST):
            connection.close()


def _connect(alias: str) -> psycopg.Connection[Any]:
    """Return a plain connection in autocommit mode, not from Django's pool."""
    wrapper = connections[alias]
    params = {**CONNECT_OPTIONS, **wrapper.get_connection_params(), "autocommit": True}
    connection: psycopg.Connection[Any] = psycopg.connect(**params)
    if role := wrapper.settings_dict["OPTIONS"].get("assume_role"):
        connection.execute(sql.SQL("set role {}").format(sql.Identifier(role)))
    return connection
