"""The tables after tests that commit: emptied quickly, and looked at when a file has ended."""

from __future__ import annotations

from functools import cache
from typing import Any

from django.apps import apps
from django.contrib.auth.models import Permission
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.db.migrations.recorder import MigrationRecorder

from tests.database import second_connection

#: What `migrate` filled; nothing of it is a test's.
KEPT = {model._meta.db_table for model in (ContentType, Permission, MigrationRecorder.Migration)}

TABLES = """
select quote_ident(relname) from pg_class
 where relnamespace = 'public'::regnamespace and relkind in ('r', 'p') and not relname = any(%s)
"""
# Dead rows of thousands of messages would change the plans of the tests that come later.
LARGE = """
select string_agg(quote_ident(relname), ', ') from pg_class
 where relnamespace = 'public'::regnamespace and relkind = 'r' and not relname = any(%s)
   and pg_total_relation_size(oid) > 2000000
"""


@cache
def _delete_all() -> str:
    """Return statements that empty all tables of the installed apps.

    In any order: foreign keys are checked when the transaction ends.
    """
    names = {model._meta.db_table for model in apps.get_models(include_auto_created=True)}
    return "; ".join(f"delete from {name}" for name in names - KEPT)


def empty_the_tables(case: Any = None) -> None:
    """Delete what tests committed: what Django's TransactionTestCase does, in 5 ms of its 200."""
    connection.close()  # whatever state the test left it in
    with second_connection() as own:
        own.execute("set lock_timeout = '60s'")
        own.execute(_delete_all())
        (large,) = own.execute(LARGE, [list(KEPT)]).fetchone() or ("",)
        if large:
            own.execute(f"truncate {large} cascade")


def left() -> dict[str, int]:
    """Return the number of rows of each table that is not empty."""
    with second_connection() as other:
        names = [name for (name,) in other.execute(TABLES, [list(KEPT)]).fetchall()]
        counts = "union all ".join(f"select '{n}', count(*) from {n} " for n in names)
        return {name: count for name, count in other.execute(counts).fetchall() if count}
