"""The tables after tests that commit: emptied quickly, and checked at the end of a file."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import psycopg
from django.apps import apps
from django.contrib.auth.models import Permission
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.db.migrations.recorder import MigrationRecorder

from tests.database import CLEANERS_NAME, open_second, second_connection

#: The tables that `migrate` filled; no test owns their rows.
KEPT = {model._meta.db_table for model in (ContentType, Permission, MigrationRecorder.Migration)}

TABLES = """
select quote_ident(relname) from pg_class
 where relnamespace = 'public'::regnamespace and relkind in ('r', 'p') and not relname = any(%s)
"""
# Dead rows of thousands of messages would change the plans and estimates of the tests that come
# later.
LARGE = """
select string_agg(quote_ident(relname), ', ') from pg_class
 where relnamespace = 'public'::regnamespace and relkind = 'r' and not relname = any(%s)
   and pg_total_relation_size(oid) > 2000000
"""


@cache
def _delete_all() -> str:
    """Return statements that empty all tables of the installed apps.

    Their order does not matter: foreign keys are checked when the transaction ends.
    """
    names = {model._meta.db_table for model in apps.get_models(include_auto_created=True)}
    return "; ".join(f"delete from {name}" for name in names - KEPT)


class Cleaner:
    """A session that stays open between tests: a new one would plan each statement again."""

    def __init__(self) -> None:
        self._session: psycopg.Connection[Any] | None = None

    def run(self) -> None:
        """Empty the tables."""
        self._do(self._empty)

    def shrink(self) -> None:
        """Free the space that rolled back tests have left, in tables that are empty."""
        self._do(self._truncate)

    def _do(self, work: Callable[[psycopg.Connection[Any]], None]) -> None:
        """Work in the open session, or in a new one if a test ended the previous one."""
        session = self._opened()
        try:
            work(session)
        except psycopg.OperationalError:
            if not session.closed:
                raise
            self.close()
            work(self._opened())

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None

    def _opened(self) -> psycopg.Connection[Any]:
        if self._session is None:
            self._session = open_second(application_name=CLEANERS_NAME)
            self._session.execute("set lock_timeout = '60s'")
        return self._session

    def _empty(self, session: psycopg.Connection[Any]) -> None:
        session.execute(_delete_all())
        self._truncate(session)

    def _truncate(self, session: psycopg.Connection[Any]) -> None:
        (large,) = session.execute(LARGE, [list(KEPT)]).fetchone() or ("",)
        if large:
            session.execute(f"truncate {large} cascade")


CLEANER = Cleaner()


def empty_the_tables(case: Any = None) -> None:
    """Delete committed rows, like Django's TransactionTestCase, in 5 ms of its 200."""
    connection.close()  # whatever state the test left it in
    CLEANER.run()


def left() -> dict[str, int]:
    """Return the number of rows of each table that is not empty."""
    with second_connection() as other:
        names = [name for (name,) in other.execute(TABLES, [list(KEPT)]).fetchall()]
        counts = "union all ".join(f"select '{n}', count(*) from {n} " for n in names)
        return {name: count for name, count in other.execute(counts).fetchall() if count}
