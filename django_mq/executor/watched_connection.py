"""Notice the first use of a connection, however it is used."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any
from weakref import WeakSet

import psycopg
from django.db.backends.base.base import BaseDatabaseWrapper

#: The options of a driver connection that decide how statements run and rows are read.
OPTIONS = (
    "row_factory",
    "cursor_factory",
    "server_cursor_factory",
    "prepare_threshold",
    "isolation_level",
    "read_only",
    "deferrable",
)
_options_of = attrgetter(*OPTIONS)


class WatchedConnection:
    """Calls `on_use` before each use of the connection of `wrapper`, while it is `armed`.

    A driver connection that was made since `take_driver()` is watched only through the wrapper.
    """

    def __init__(self, wrapper: BaseDatabaseWrapper, on_use: Callable[[], None]) -> None:
        if is_watched(wrapper):
            raise RuntimeError("drain() cannot be called by a handler or hook that drain() runs")
        self.armed = False
        self.on_use = on_use
        #: The psycopg connection that `take_driver()` found.
        self.driver: Any = None
        #: The server-side cursors of `iterator()` that may be open.
        self.cursors: WeakSet[psycopg.ServerCursor[Any]] = WeakSet()
        self._known: tuple[Any, tuple[Any, ...]] = None, ()
        self._wrapper = wrapper
        self._plain_class = type(wrapper)
        wrapper.__class__ = _watched(self._plain_class)
        wrapper.__dict__["mq_watched"] = self

    def unwatch(self) -> None:
        """Give the connection back as it was."""
        self.armed = False
        if self.driver is not None:
            self.driver.__dict__.pop("wait", None)
        self._wrapper.__class__ = self._plain_class
        del self._wrapper.__dict__["mq_watched"]

    def take_driver(self) -> bool:
        """Watch the driver connection that the wrapper has now; return whether it is a new one.

        Everything that a psycopg connection sends passes its `wait()`, even from a cursor that was
        created before `armed` was set.
        """
        driver = self._wrapper.__dict__["connection"]
        if driver is self.driver:
            return False
        self.driver = driver
        if driver is None:
            return True
        self.note_options()
        plain_wait = driver.wait

        def wait(*args: Any, **kwargs: Any) -> Any:
            if self.armed and driver is self.driver:
                self.on_use()
            return plain_wait(*args, **kwargs)

        driver.wait = wait
        return True

    def note_options(self) -> None:
        """Note the options of the driver connection that the wrapper has now, unless known."""
        driver = self._wrapper.__dict__["connection"]
        if driver is not self._known[0]:
            self._known = driver, _options_of(driver)

    def restore_driver(self) -> None:
        """Leave the driver connection to the next handler as it was: its cursors and options."""
        if self.cursors:
            self._close_cursors()
        driver, options = self._known
        if driver is self._wrapper.__dict__["connection"] and options != _options_of(driver):
            for name, before in zip(OPTIONS, options, strict=True):
                if getattr(driver, name) != before:
                    with suppress(psycopg.ProgrammingError):  # refused within a transaction
                        setattr(driver, name, before)

    def _close_cursors(self) -> None:
        """Close the server-side cursors that are still open.

        Otherwise an iterator that is collected later, such as that of a loop which raised, closes
        its cursor in the transaction of another handler. There is no such cursor, and that error
        aborts the transaction.
        """
        for cursor in list(self.cursors):
            with suppress(psycopg.Error):
                cursor.close()
        self.cursors.clear()

    def was_replaced(self) -> bool:
        """Return whether the wrapper has another driver connection since `take_driver()`."""
        return self._wrapper.__dict__["connection"] is not self.driver


def is_watched(wrapper: BaseDatabaseWrapper) -> bool:
    """Return whether messages run on this connection."""
    return "mq_watched" in wrapper.__dict__


def _watched(base: type[BaseDatabaseWrapper]) -> type[BaseDatabaseWrapper]:
    """Return a subclass of `base` whose driver connection cannot be reached unnoticed.

    Every cursor, and every request for the driver's connection, passes this property.
    """

    def get(self: BaseDatabaseWrapper) -> Any:
        watched: WatchedConnection | None = self.__dict__.get("mq_watched")
        if watched is not None and watched.armed:
            with self.wrap_database_errors:
                watched.on_use()
        return self.__dict__["connection"]

    def set_(self: BaseDatabaseWrapper, value: Any) -> None:
        self.__dict__["connection"] = value

    def connect(self: BaseDatabaseWrapper) -> None:
        """Connect as `base`, since receivers of `connection_created` may ask for that sender."""
        self.__class__ = base
        try:
            base.connect(self)
        finally:
            self.__class__ = watched_class
        watched: WatchedConnection | None = self.__dict__.get("mq_watched")
        if watched is not None:
            watched.note_options()

    def create_cursor(self: BaseDatabaseWrapper, name: str | None = None) -> Any:
        cursor = base.create_cursor(self, name)
        watched: WatchedConnection | None = self.__dict__.get("mq_watched")
        if watched is not None and name is not None:
            watched.cursors.add(cursor)
        return cursor

    members = {
        "connection": property(get, set_),
        "connect": connect,
        "create_cursor": create_cursor,
        "__module__": base.__module__,
    }
    watched_class = type(base.__name__, (base,), members)
    return watched_class
