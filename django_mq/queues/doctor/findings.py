"""The findings of the doctor, and the sessions of its checks, which are short and bounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import psycopg
from django.apps import apps

from django_mq.executor.connections import plain_connection
from django_mq.queues.transactions import reading
from django_mq.store.limits import Limits

#: Seconds that one statement of the doctor may take, and seconds that it may wait for a lock.
DOCTOR_LIMITS = Limits(5.0, 1.0)

#: Yields a cursor for short statements; the transaction is rolled back.
short_cursor = partial(reading, limits=DOCTOR_LIMITS)

#: The ids of all findings.
IDS = frozenset(f"D{number:03}" for number in range(1, 36))

Severity = Literal["warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem: its `id` (D001 and so on), a description, and what to do about it."""

    id: str
    level: Severity
    text: str
    hint: str


@contextmanager
def session(alias: str) -> Iterator[psycopg.Connection[Any]]:
    """Yield a separate session on `alias`, in autocommit mode, like those that workers open."""
    wrapper = plain_connection(alias)
    try:
        wrapper.connect()
        wrapper.connection.autocommit = True
        yield wrapper.connection
    finally:
        wrapper.close()


def own_tables() -> list[str]:
    """Return the names of the tables of django_mq; those of a proxy model are its base's."""
    models = apps.get_app_config("django_mq").get_models()
    return list(dict.fromkeys(model._meta.db_table for model in models))
