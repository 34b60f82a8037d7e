"""The days of the history: partitions of its table, one per day (UTC) on which messages ended.

Only the owner of the table can add or drop a partition. Rows of a day without one are in the
default partition, from which they are deleted.
"""

from __future__ import annotations

from datetime import date, timedelta
from typing import TYPE_CHECKING, NamedTuple

from psycopg.sql import SQL, Identifier, Literal

from django_mq.store.conditions import BEGINNING

if TYPE_CHECKING:
    from psycopg.sql import Composed

    from django_mq.store import Cursor

PREFIX = "django_mq_handledmessage_"
#: A row is deleted individually only this long after its retention has ended: a day whose rows all
#: have the same retention is dropped as a whole before that.
PARTITION_GRACE = timedelta(hours=26)
#: The size of the default partition up to which a day is created: ATTACH scans the partition, and
#: no settle can write there meanwhile. 1 GiB in memory takes a second.
MAX_SCANNED_BYTES = 1024**3


class Days(NamedTuple):
    """The days that have a partition, `today` by the database's clock, and the table's owner.

    `owned`: this login may act as the owner; `foreign`: the owner is another role.
    """

    today: date
    owner: str
    owned: bool
    foreign: bool
    days: list[date]


# A partition is found by its parent and dated by its name: the text of its bounds depends on the
# session's time zone.
DAYS = """
select (statement_timestamp() at time zone 'UTC')::date,
       pg_get_userbyid(parent.relowner),
       pg_has_role(parent.relowner, 'usage')
           and has_schema_privilege(parent.relnamespace, 'create'),
       pg_get_userbyid(parent.relowner) <> current_user,
       array(
           select to_date(right(part.relname, 8), 'YYYYMMDD')
             from pg_inherits
             join pg_class part on part.oid = pg_inherits.inhrelid
            where pg_inherits.inhparent = parent.oid
              and part.relname ~ '^django_mq_handledmessage_[0-9]{8}$'
            order by 1)
  from pg_class parent
 where parent.oid = 'django_mq_handledmessage'::regclass
"""


def days(cursor: Cursor) -> Days:
    """Return the days that have a partition, in order."""
    cursor.execute(DAYS)
    return Days._make(cursor.fetchone())


# The scan reads the whole file, with or without rows: its size counts, not the number of rows.
IS_TOO_LARGE = "select pg_relation_size('django_mq_handledmessage_default') > %(maximum)s"


def is_too_large(cursor: Cursor) -> bool:
    """Return whether the default partition is too large to create a day."""
    cursor.execute(IS_TOO_LARGE, {"maximum": MAX_SCANNED_BYTES})
    return bool(cursor.fetchone()[0])


HAS_STRAYS = """
select exists (
    select from django_mq_handledmessage_default
     where ended_at >= %(start)s and ended_at < %(end)s)
"""
# CREATE TABLE ... PARTITION OF would lock the whole table against settles. ATTACH locks the default
# partition alone, to look for rows of the day there.
CREATE_DAY = SQL("create table {day} (like django_mq_handledmessage including all)")
# Any member of the owner can then drop it.
SET_DAY_OWNER = SQL("alter table {day} owner to {owner}")
ATTACH_DAY = SQL(
    "alter table django_mq_handledmessage attach partition {day}"
    " for values from ({start}) to ({end})"
)


def create_day(cursor: Cursor, day: date, *, owner: str | None = None) -> bool:
    """Create the partition of `day`; return False if rows of that day are stored already.

    Call it only if the default partition is not too large. `owner`: the role to own the partition,
    if it is not this login.
    """
    start, end = _bounds(day)
    cursor.execute(HAS_STRAYS, {"start": start, "end": end})
    if cursor.fetchone()[0]:
        return False
    name = _partition(cursor, day)
    _run(cursor, CREATE_DAY.format(day=name))
    if owner is not None:
        _run(cursor, SET_DAY_OWNER.format(day=name, owner=Identifier(owner)))
    _run(cursor, ATTACH_DAY.format(day=name, start=Literal(start), end=Literal(end)))
    return True


def was_attached_meanwhile(error: BaseException) -> bool:
    """Return whether `error` refused a row only because its day's partition was being attached.

    A statement that chose the default partition before the ATTACH committed is refused after it,
    as CheckViolation without the name of a constraint. Sent again, it finds the new partition.
    """
    diagnosis = getattr(error, "diag", None)
    return (
        diagnosis is not None
        and diagnosis.sqlstate == "23514"
        and diagnosis.table_name == f"{PREFIX}default"
        and not diagnosis.constraint_name
    )


IS_KEPT = SQL("""
select exists (select from {day} where keep_until >= statement_timestamp())
    or statement_timestamp() < {end}::timestamptz + interval '1 hour'
""")
DROP_DAY = SQL("drop table {day}")


def drop_day(cursor: Cursor, day: date) -> None:
    """Drop the partition of `day` if nothing in it is to be kept.

    It stays for an hour after its end: a settle that began before midnight may still write to it.
    """
    name, (_, end) = _partition(cursor, day), _bounds(day)
    _run(cursor, IS_KEPT.format(day=name, end=Literal(end)))
    if not cursor.fetchone()[0]:
        _run(cursor, DROP_DAY.format(day=name))


PRUNE = """
with removed as (
    delete from django_mq_handledmessage h
     using (select id, ended_at
              from django_mq_handledmessage
             where keep_until < statement_timestamp() - %(grace)s
               and keep_until >= %(after)s::timestamptz
             order by keep_until
             limit %(limit)s) old
     where h.id = old.id and h.ended_at = old.ended_at
    returning h.keep_until
)
select count(*), max(keep_until)::text from removed
"""


def prune(cursor: Cursor, *, limit: int, after: str = BEGINNING) -> str | None:
    """Delete up to `limit` rows that were not dropped with their day, like `pruning.prune()`."""
    cursor.execute(PRUNE, {"grace": PARTITION_GRACE, "limit": limit, "after": after})
    rows, last = cursor.fetchone()
    return last if rows >= limit else None


# The search path may begin with another schema than the table's.
SCHEMA = """
select n.nspname
  from pg_class parent
  left join (pg_inherits join pg_class part on part.oid = pg_inherits.inhrelid)
    on pg_inherits.inhparent = parent.oid and part.relname = %(name)s
  join pg_namespace n on n.oid = coalesce(part.relnamespace, parent.relnamespace)
 where parent.oid = 'django_mq_handledmessage'::regclass
"""


def _partition(cursor: Cursor, day: date) -> Identifier:
    """Return the name of the day's partition; one that does not exist gets the table's schema."""
    name = f"{PREFIX}{day:%Y%m%d}"
    cursor.execute(SCHEMA, {"name": name})
    return Identifier(cursor.fetchone()[0], name)


def _bounds(day: date) -> tuple[str, str]:
    return f"{day} 00:00:00+00", f"{day + timedelta(days=1)} 00:00:00+00"


def _run(cursor: Cursor, statement: Composed) -> None:
    cursor.execute(statement.as_string(cursor.connection))
