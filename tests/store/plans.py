"""The planner's plan of a statement, and the pages that it touches."""

from __future__ import annotations

from typing import Any

import psycopg
from django.db import DEFAULT_DB_ALIAS

from django_mq.executor.statements import Statements
from tests.database import second_connection
from tests.pages_read import explained, pages_of

Cursor = psycopg.Cursor[Any]

TYPES = {
    "limit": "bigint",
    "window": "bigint",
    "bytes": "bigint",
    "lease": "float8",
    "claimer": "text",
    "admitted": "bool",
    "suspects": "bool",
    "skip_dead": "bool",
    "with_marks": "bool",
    "park": "bool",
}


def plan(cursor: Cursor, statement: str, **params: Any) -> str:
    """Explain it with these values."""
    cursor.execute("explain (costs off) " + statement, params)
    return "\n".join(line for (line,) in cursor.fetchall())


def generic_plan(cursor: Cursor, statement: str, **params: Any) -> str:
    """Explain it as a prepared statement that has run often enough to have a generic plan."""
    names = list(params)
    numbered = statement
    for number, name in enumerate(names, 1):
        numbered = numbered.replace(f"%({name})s", f"${number}")
    numbered = numbered.replace("%%", "%")
    cursor.execute("set plan_cache_mode = force_generic_plan")
    types = ", ".join(TYPES.get(name, "unknown") for name in names)
    cursor.execute("deallocate all")
    cursor.execute(f"prepare it ({types}) as {numbered}")
    with second_connection() as quoting:
        values = ", ".join(psycopg.sql.Literal(params[name]).as_string(quoting) for name in names)
    cursor.execute(f"explain (costs off) execute it ({values})")
    return "\n".join(line for (line,) in cursor.fetchall())


def touched_pages(cursor: Cursor, statement: str, params: Any = None) -> int:
    """Run a statement; return the number of pages that it touches."""
    return pages_of(explained(cursor, statement, params))


def pages(statement: str, params: dict[str, Any]) -> int:
    """Return the number of pages that a worker's statement touches; its changes are undone."""
    statements = Statements(DEFAULT_DB_ALIAS)
    try:
        cursor = statements.cursor()
        with statements.transaction():
            found = touched_pages(cursor, statement, params)
            cursor.execute("rollback and chain")
        return found
    finally:
        statements.close()
