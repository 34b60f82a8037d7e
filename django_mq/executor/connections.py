"""The worker's own connections: not pooled and not aged, whatever the settings of the alias."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import psycopg
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import Error as DjangoError
from psycopg import sql
from psycopg.pq import Format, PipelineStatus, TransactionStatus

from django_mq.conf.error_logs import error_name, log_failure
from django_mq.executor.created_sessions import settings_of
from django_mq.executor.simple_protocol import simple_query
from django_mq.executor.watchdog import Link
from django_mq.store.driver import DISCARD, THRESHOLD, may_prepare

#: The errors of a statement, through the driver and through Django.
DATABASE_ERRORS = (psycopg.Error, DjangoError)

#: Seconds to connect, unless the alias sets a `connect_timeout`.
CONNECT_SECONDS = 10
#: The advice for a backend that cannot connect for a reason of its own.
WHICH_SERVICE = "Perhaps the service that has the password is away."
#: Seconds of silence after which the kernel sends a packet, unless the alias says otherwise. The
#: default of Linux is two hours, but load balancers and firewalls forget a silent connection after
#: minutes, and then drop its packets without a word.
KEEPALIVE_SECONDS = 30
# By alias: the class of the error that was logged since the last connection was made.
_logged: dict[str, type[Exception]] = {}


class BackendFailed(psycopg.OperationalError):
    """The backend cannot connect for a reason of its own, which is the cause.

    Some backends fetch a password from another service, such as a vault. It may also be a bug.
    """


def plain_connection(alias: str, link: Link | None = None) -> BaseDatabaseWrapper:
    """Return a new connection to `alias` that is not from Django's pool and does not age.

    `link` bounds its waits, including those while it connects. It raises OperationalError if the
    backend cannot connect for a reason of its own.
    """
    original = connections[alias]
    wrapper = type(original)(_plain_settings(original), alias)
    if link is None:
        _convert_failures(wrapper)
        return wrapper
    params_of, connect = wrapper.get_connection_params, wrapper.get_new_connection

    def current_params() -> dict[str, Any]:
        wrapper.settings_dict = _plain_settings(original)  # with a password changed since
        with _logging_failures(alias):
            return params_of()

    def connect_and_attach(params: dict[str, Any]) -> Any:
        if link.max_wait < CONNECT_SECONDS:
            params = {**params, "connect_timeout": max(1, round(link.max_wait))}
        with _logging_failures(alias):
            driver = connect(params)
        _logged.pop(alias, None)
        link.attach(driver)
        return driver

    wrapper.get_connection_params = current_params  # type: ignore[method-assign]
    wrapper.get_new_connection = connect_and_attach  # type: ignore[assignment,method-assign]
    return wrapper


def _plain_settings(original: BaseDatabaseWrapper) -> dict[str, Any]:
    settings: dict[str, Any] = copy.deepcopy(original.settings_dict)
    settings["OPTIONS"].pop("pool", None)
    settings["OPTIONS"].setdefault("connect_timeout", CONNECT_SECONDS)
    if "service" not in settings["OPTIONS"]:  # its file may have them, and would be overruled
        # Linux waits for the first before its first packet, for the second before each further one.
        for name in ("keepalives_idle", "keepalives_interval"):
            settings["OPTIONS"].setdefault(name, KEEPALIVE_SECONDS)
    settings.update(CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=False)
    return settings


@contextlib.contextmanager
def _backend_failures() -> Iterator[None]:
    """Raise BackendFailed for an error that is not one of the database."""
    try:
        yield
    except (*DATABASE_ERRORS, ImproperlyConfigured):
        raise
    except Exception as error:
        raise BackendFailed(f"its backend cannot connect: {error_name(error)}") from error


@contextlib.contextmanager
def _logging_failures(alias: str) -> Iterator[None]:
    """Raise BackendFailed, and log its cause: once per outage and class of error.

    The worker waits as for a lost database: any other error would count as the message's.
    """
    try:
        with _backend_failures():
            yield
    except BackendFailed as failed:
        error = failed.__cause__
        if isinstance(error, Exception) and _logged.get(alias) is not type(error):
            _logged[alias] = type(error)
            log_failure(
                "connect_failed", error, "the backend of the alias %s cannot connect", alias
            )
        raise


@contextlib.contextmanager
def converting_failures(alias: str) -> Iterator[None]:
    """Within the block, `connections[alias]` raises OperationalError if its backend fails."""
    wrapper = connections[alias]
    if "get_connection_params" in vars(wrapper):  # a plain connection
        yield
        return
    _convert_failures(wrapper)
    try:
        yield
    finally:
        del wrapper.get_connection_params, wrapper.get_new_connection


def _convert_failures(wrapper: BaseDatabaseWrapper) -> None:
    params_of, connect = wrapper.get_connection_params, wrapper.get_new_connection
    wrapper.get_connection_params = _backend_failures()(params_of)  # type: ignore[method-assign]
    wrapper.get_new_connection = _backend_failures()(connect)  # type: ignore[method-assign]


def driver_connection(alias: str, link: Link) -> psycopg.Connection[Any]:
    """Return a connection like `plain_connection()`, but the driver's, in autocommit mode.

    The backend of the alias connects it, and may add a fresh password. Receivers of
    `connection_created` are not called: a failing one would fail all waits.
    """
    wrapper = plain_connection(alias, link)
    params = {**wrapper.get_connection_params(), "autocommit": True}
    driver: psycopg.Connection[Any] = wrapper.get_new_connection(params)
    try:
        if role := wrapper.settings_dict["OPTIONS"].get("assume_role"):
            driver.execute(sql.SQL("set role {}").format(sql.Identifier(role)))
    except BaseException:
        driver.close()
        raise
    return driver


@contextlib.contextmanager
def plain_connection_as(alias: str, link: Link | None = None) -> Iterator[BaseDatabaseWrapper]:
    """Within the block, make `connections[alias]` of this thread a plain connection.

    Django code that is given a connection may still look it up by alias, which would open the pool.
    """
    original = connections[alias]
    connections[alias] = plain = plain_connection(alias, link)
    try:
        yield plain
    finally:
        connections[alias] = original
        plain.close()


@contextlib.contextmanager
def closed_if_opened(wrapper: BaseDatabaseWrapper) -> Iterator[None]:
    """Close the connection of `wrapper` after the block if the block has opened it.

    For a thread that has no other use for the connection: nothing tells Django when a thread ends,
    so the session would last until Python's garbage collection finds it.
    """
    was_open = wrapper.connection is not None
    try:
        yield
    finally:
        if not was_open:
            wrapper.close()


def without_pool(alias: str) -> contextlib.AbstractContextManager[object]:
    """Return a block in which `connections[alias]` is not from Django's pool.

    The pool hides why it cannot connect, and gives up only after 30 s. A connection that is already
    open, as in a test, stays.
    """
    connection = connections[alias]
    if connection.connection is None and connection.settings_dict["OPTIONS"].get("pool"):
        return plain_connection_as(alias)
    return contextlib.nullcontext()


def statement_cursor(driver: psycopg.Connection[Any]) -> psycopg.Cursor[Any]:
    """Return a cursor for our own statements on an open connection.

    Rows come in binary: Django's own timestamp loader for text is written in Python, and with it a
    claimed row took 16 us instead of 1.
    """
    cursor = psycopg.Cursor(driver)
    cursor.format = Format.BINARY
    return cursor


def is_idle(driver: psycopg.Connection[Any]) -> bool:
    """Return whether no transaction is open, and the next statement would begin none."""
    return driver.autocommit and driver.info.transaction_status == TransactionStatus.IDLE


def is_in_pipeline(driver: psycopg.Connection[Any]) -> bool:
    """Return whether a pipeline is open, in which no statement of ours would be carried out."""
    return driver.info.pipeline_status != PipelineStatus.OFF


def roll_back(driver: psycopg.Connection[Any]) -> None:
    """Roll back the open transaction, if any; close the connection if the server refuses that."""
    if driver.info.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
        try:
            simple_query(driver, "rollback")
        except BaseException:  # cancelled: else the next statement would fail in this transaction
            driver.close()
            raise


def drop_connection(wrapper: BaseDatabaseWrapper) -> None:
    """Close the connection, whatever state it is in; the next use makes a new one.

    Django forgets open blocks and hooks only when it connects again. Until then `broadcast()` would
    mistake a block that was left open for the caller's, and a durable block could not begin.
    """
    with contextlib.suppress(*DATABASE_ERRORS):
        wrapper.close()
    wrapper.connection = None
    wrapper.in_atomic_block = False
    wrapper.closed_in_transaction = False
    wrapper.needs_rollback = False
    wrapper.savepoint_ids = []
    wrapper.atomic_blocks = []
    wrapper.run_on_commit = []


def prepare_statements(wrapper: BaseDatabaseWrapper) -> bool:
    """Let server-bound cursors on this connection use prepared statements, if that is safe.

    Returns whether it is safe: it is not through a transaction pooler.
    """
    safe = may_prepare(wrapper)
    if safe:
        wrapper.connection.prepare_threshold = THRESHOLD
    return safe


def reset_session(wrapper: BaseDatabaseWrapper) -> None:
    """Reset the session outside a transaction, in one round trip: settings, locks, cursors ...

    Behind a transaction pooler it resets only the settings, since the statements may reach a
    session that other programs use, too. Raises the driver's errors.
    """
    steps = [reset_statements(wrapper)]
    if may_prepare(wrapper):
        steps.append(sql.Composed([sql.SQL(DISCARD)]))
    psycopg.ClientCursor(wrapper.connection).execute(sql.SQL("; ").join(steps))


def reset_statements(wrapper: BaseDatabaseWrapper) -> sql.Composed:
    """Return the statements that reset whatever was SET since this session was created.

    RESET ALL leaves the role as it is. The role is set last, since it may have fewer rights.
    """
    created = dict(settings_of(wrapper.connection))
    role = created.pop("role", None) or wrapper.settings_dict["OPTIONS"].get("assume_role")
    timezone = created.pop("TimeZone", None) or wrapper.timezone_name
    steps = [sql.SQL("reset session authorization; reset role; reset all").format()]
    # In ASCII: these statements must also work after a change of the client's encoding.
    set_config = sql.SQL("select set_config({}, convert_from(decode({}, 'hex'), 'UTF8'), false)")
    steps += [set_config.format(name, value.encode().hex()) for name, value in created.items()]
    if timezone:
        steps.append(sql.SQL("set time zone {}").format(sql.Literal(timezone)))
    if role:
        steps.append(sql.SQL("set role {}").format(sql.Identifier(role)))
    return sql.SQL("; ").join(steps)
