"""What receivers of `connection_created` set in a session, so that a reset does not undo it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from django_mq.store import session_facts

_KEY = "mq_created_settings"


@contextmanager
def remembered() -> Iterator[None]:
    """Within the block, note the settings of each session that this process opens."""

    def remember(*, connection: BaseDatabaseWrapper, **_: Any) -> None:
        driver = connection.__dict__["connection"]  # past a WatchedConnection
        if connection.vendor == "postgresql" and driver.autocommit:
            with suppress(psycopg.Error):  # other databases speak the protocol, and lack the view
                driver.__dict__[_KEY] = session_facts.settings_of(driver)

    connection_created.connect(remember, weak=False)  # last: the receivers of the apps have run
    try:
        yield
    finally:
        connection_created.disconnect(remember)


def settings_of(driver: psycopg.Connection[Any]) -> dict[str, str]:
    """Return the settings, by name, that the session had when it was created."""
    found: dict[str, str] = driver.__dict__.get(_KEY, {})
    return found
