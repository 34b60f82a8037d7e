"""Clean up the connections of a thread after a call, except that of its message.

The next handlers of the thread get these connections: their writes would join an open transaction,
and a setting such as `search_path` would lead them elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeVar

import psycopg
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from psycopg.pq import TransactionStatus

from django_mq.exceptions import HandlerBrokeTransaction
from django_mq.executor import created_sessions, forks
from django_mq.executor.connections import (
    DATABASE_ERRORS,
    drop_connection,
    is_in_pipeline,
    reset_session,
)
from django_mq.store.driver import may_prepare

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def remembering_sessions() -> Iterator[None]:
    """Within the block, note the settings of each session that this process opens.

    A session that a pool lends again is reset: a call may have closed its connection, which returns
    the session to the pool unchanged. If that fails, the pool is asked for another session.
    """

    def created(*, connection: BaseDatabaseWrapper, **_: Any) -> None:
        driver = connection.__dict__["connection"]  # past a WatchedConnection
        if connection.vendor != "postgresql" or not driver.autocommit:
            return
        if not may_prepare(connection):
            return  # behind a transaction pooler, the session has settings of other programs
        if not created_sessions.remember(driver):
            reset(connection)
            if connection.__dict__["connection"] is None:  # the session had ended in its pool
                connection.connect()
        elif created_sessions.settings_of(driver):
            try:
                reset_session(connection)
            except psycopg.Error:  # set by a role with more rights than the current one
                created_sessions.forget(driver)

    connection_created.connect(created, weak=False)  # last: the receivers of the apps have run
    try:
        yield
    finally:
        connection_created.disconnect(created)


def open_aliases(*, excluding: str) -> set[str]:
    """Return the other aliases on which this thread has a transaction open, or autocommit off."""
    every = connections.all(initialized_only=True)
    return {each.alias for each in every if each.alias != excluding and is_open(each)}


def clean_up(*, excluding: Collection[str] = (), resets: bool = True) -> list[str]:
    """Roll back the transactions of this thread, and return the aliases that had one open.

    Also closes connections on which only autocommit was left off, or is off by the project's
    settings, or whose driver connection was closed. With `resets`, the sessions of the others are
    reset. The aliases in `excluding` stay as they are.
    """
    left = []
    for wrapper in connections.all(initialized_only=True):
        if wrapper.alias in excluding:
            continue
        if is_open(wrapper):
            if not _is_idle(wrapper):
                left.append(wrapper.alias)
            drop_connection(wrapper)
        elif not wrapper.settings_dict["AUTOCOMMIT"] or _is_closed(wrapper):
            drop_connection(wrapper)  # this rolls back what was not committed, as after a request
        elif resets:
            reset(wrapper)
    return left


def blocking_call(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of `fn(...)`, a call of an async handler, in whose thread others follow.

    Raises HandlerBrokeTransaction if the call left a transaction open. A process that `fn` forks
    ends here, not in our thread.
    """
    try:
        with forks.ForkBarrier():
            result = fn(*args, **kwargs)
    finally:
        left_open = clean_up(resets=False)
    if left_open:
        raise HandlerBrokeTransaction(
            "a blocking call of an async handler left a transaction open; it was rolled back:"
            " begin and end it in one function"
        )
    return result


def close_all() -> None:
    """Close the connections of this thread, outside any transaction.

    A session that goes back to a pool is reset first: idle, it would keep its locks, and who gets
    it next need not be one of ours.
    """
    for wrapper in connections.all(initialized_only=True):
        if wrapper.settings_dict["OPTIONS"].get("pool"):
            reset(wrapper)
        with suppress(*DATABASE_ERRORS):
            wrapper.close()


class _UseWatch:
    """Replaces `wait()` of a driver connection, through which everything that it sends passes."""

    def __init__(self, driver: psycopg.Connection[Any]) -> None:
        self.used = False
        self._wait = driver.wait

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.used = True
        return self._wait(*args, **kwargs)


def reset(wrapper: BaseDatabaseWrapper) -> None:
    """Reset what calls left in the session since the last reset, unless a transaction is open.

    If no call used the session, this takes no round trip.
    """
    driver = wrapper.connection
    if wrapper.vendor != "postgresql" or driver is None or driver.closed or is_open(wrapper):
        return
    watch = driver.wait
    if not isinstance(watch, _UseWatch):
        watch = driver.wait = _UseWatch(driver)
    elif not watch.used:
        return
    try:
        reset_session(wrapper)
        watch.used = False
    except psycopg.Error:
        driver.close()  # else a pool would lend the session again, as it is
        wrapper.close()


def is_open(wrapper: BaseDatabaseWrapper) -> bool:
    """Return whether a transaction is open (by Django or by a raw statement), or would be.

    With autocommit off the next statement would begin one.
    """
    if wrapper.connection is None or not wrapper.settings_dict["AUTOCOMMIT"]:
        return wrapper.in_atomic_block
    return not (wrapper.autocommit and _is_idle(wrapper))


def _is_closed(wrapper: BaseDatabaseWrapper) -> bool:
    driver = wrapper.connection
    return wrapper.vendor == "postgresql" and driver is not None and bool(driver.closed)


def _is_idle(wrapper: BaseDatabaseWrapper) -> bool:
    if wrapper.in_atomic_block:
        return False
    driver = wrapper.connection
    if wrapper.vendor != "postgresql" or driver is None or driver.closed:
        return wrapper.autocommit and not getattr(driver, "in_transaction", False)  # sqlite3's
    idle: bool = driver.info.transaction_status == TransactionStatus.IDLE
    return idle and not is_in_pipeline(driver)
