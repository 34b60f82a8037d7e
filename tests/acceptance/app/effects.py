"""The table of effects: a handler that ran to its end has a row here for its message."""

from __future__ import annotations

from typing import Any

# No unique constraint: a repeated effect must show, and not be refused.
CREATE = """
create table if not exists acceptance_effect (
    id bigint generated always as identity primary key,
    name text not null,
    attempt int not null,
    pid int not null
)
"""
DROP = "drop table acceptance_effect"
INSERT = "insert into acceptance_effect (name, attempt, pid) values (%s, %s, %s)"
SELECT = "select name, attempt, pid from acceptance_effect order by id"


def rows(cursor: Any) -> list[tuple[str, int, int]]:
    """Return name, attempt and pid of all effects, in the order of their ids."""
    cursor.execute(SELECT)
    return cursor.fetchall()
