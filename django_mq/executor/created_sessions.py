"""Remember what receivers of `connection_created` set, so that a reset can restore it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psycopg

from django_mq.store import session_facts

_KEY = "mq_created_settings"


def remember(driver: psycopg.Connection[Any]) -> bool:
    """Note the settings of a new session; return False for one that a pool lends again."""
    if _KEY in driver.__dict__:
        return False
    driver.__dict__[_KEY] = {}
    with suppress(psycopg.Error):  # other databases speak the protocol, but lack the view
        driver.__dict__[_KEY] = session_facts.settings_of(driver)
    return True


def forget(driver: psycopg.Connection[Any]) -> None:
    """Drop the settings of a session that cannot set them again."""
    driver.__dict__[_KEY] = {}


def keep(driver: psycopg.Connection[Any], name: str, value: str) -> None:
    """Let each reset of the session restore this setting, too."""
    driver.__dict__.setdefault(_KEY, {})[name] = value


def settings_of(driver: psycopg.Connection[Any]) -> dict[str, str]:
    """Return the settings, by name, that a reset of the session restores."""
    found: dict[str, str] = driver.__dict__.get(_KEY, {})
    return found
