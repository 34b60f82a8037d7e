"""The planner's plan of a statement."""

from __future__ import annotations

from typing import Any

import psycopg

from tests.database import second_connection

Cursor = psycopg.Cursor[Any]

TYPES = {
    "limit": "bigint",
    "window": "bigint",
    "bytes": "bigint",
    "lease": "float8",
    "claimer": "text",
    "admitted": "bool",
    "skip_dead": "bool",
    "with_marks": "bool",
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
