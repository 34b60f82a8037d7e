"""Counts the database pages that a call reads: unlike time, they do not depend on the load."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from django.db import connection

_EXPLAINED = re.compile(r"\s*(select|with|insert|update|delete)\b", re.IGNORECASE)


def _visited(plan: dict[str, Any]) -> int:
    """Return the number of rows that the nodes of a plan looked at, including those in memory."""
    rows = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)
    return round(rows * plan["Actual Loops"]) + sum(map(_visited, plan.get("Plans", ())))


def explained(cursor: psycopg.Cursor[Any], sql: str, params: Any) -> dict[str, Any]:
    """Run a statement; return its plan with what it did."""
    cursor.execute("explain (analyze, buffers, timing off, format json) " + sql, params)
    [found] = cursor.fetchone() or ()
    plan: dict[str, Any] = (json.loads(found) if isinstance(found, str) else found)[0]["Plan"]
    return plan


def pages_of(plan: dict[str, Any]) -> int:
    """Return the number of pages that a plan touched."""
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


class PagesRead:
    """The pages that the statements touched, and the rows that their plans looked at."""

    def __init__(self) -> None:
        self.total = 0
        self.rows = 0
        #: The maximum over the statements.
        self.most_rows = 0

    def add(self, driver: psycopg.Connection[Any], sql: str, params: Any) -> None:
        """Run the statement once more, in addition to the caller's run, and undo it."""
        with driver.transaction(force_rollback=True):
            plan = explained(driver.cursor(), sql, params)
        self.total += pages_of(plan)
        rows = _visited(plan)
        self.rows += rows
        self.most_rows = max(self.most_rows, rows)


@contextmanager
def pages_read() -> Iterator[PagesRead]:
    """Count the pages that the statements of Django's connection touch in the block."""
    read = PagesRead()

    def explain(
        execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]
    ) -> Any:
        if _EXPLAINED.match(sql):
            read.add(context["connection"].connection, sql, params)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(explain):
        yield read
