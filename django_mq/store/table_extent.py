"""The size of a table, and the position of a moment in it, without a scan."""

from __future__ import annotations

from datetime import datetime

from psycopg import sql

from django_mq.store import Cursor

ESTIMATE = """
select c.reltuples::bigint
  from pg_class c
 where c.oid = %(table)s::regclass
"""


def estimated_rows(cursor: Cursor, table: str) -> int | None:
    """Return the planner's estimate of a table's rows; None before its first ANALYZE."""
    cursor.execute(ESTIMATE, {"table": table})
    row = cursor.fetchone()
    return None if row is None or row[0] < 0 else int(row[0])


# A binary search: ids and creation times grow together. Each step is one probe of the primary key,
# so that a million rows take 20 steps.
ID_AT = """
with recursive extent (low, high) as (
    select min(t.{id}), max(t.{id}) from {table} t
), step (low, high, n) as (
    select extent.low, extent.high, 0 from extent where extent.low is not null
    union all
    select case when probe.at < %(at)s then probe.id + 1 else step.low end,
           case when probe.at < %(at)s then step.high else middle.id end,
           step.n + 1
      from step
     cross join lateral (select step.low + (step.high - step.low) / 2 as id) middle
      left join lateral (
        select t.{id} as id, t.{time} as at
          from {table} t
         where t.{id} >= middle.id
         order by t.{id}
         limit 1
     ) probe on true
     where step.low < step.high
)
select step.low from step order by step.n desc limit 1
"""


def id_at(cursor: Cursor, at: datetime, *, table: str, id: str, time: str) -> int | None:
    """Return an id below which the rows were created before `at`; None for an empty table."""
    names = {"table": table, "id": id, "time": time}
    query = sql.SQL(ID_AT).format(**{name: sql.Identifier(it) for name, it in names.items()})
    cursor.execute(query.as_string(cursor.connection), {"at": at})
    row = cursor.fetchone()
    return None if row is None else int(row[0])
