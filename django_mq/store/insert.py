"""Insert rows and return their ids: one statement for one row, one for a few, COPY for many.

Delays in seconds count from the start of the statement, by the database's clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, NamedTuple, Protocol

from django_mq.store import Cursor
from django_mq.store.rows import NewRow, Rows

#: Up to this many rows, one statement is faster than COPY, which needs ids first, and a savepoint.
MAX_INSERT_ROWS = 50
#: Up to this many rows that are not plain, VALUES are faster than a document.
MAX_VALUES_ROWS = 10
#: The maximum numbers of lines and of characters that are passed to COPY at once.
COPY_LINES, COPY_CHARACTERS = 200, 1024 * 1024


class CopyCursor(Cursor, Protocol):
    """A cursor that can COPY: psycopg's, or Django's wrapper of it."""

    def copy(self, statement: Any) -> AbstractContextManager[Any]: ...


class _Columns(NamedTuple):
    """Columns that rows may leave at their defaults; `row[first:end]` are the parameters."""

    names: str
    first: int
    end: int
    values: str = "%s"


#: The fields of a row up to the handler; in a plain row all others have their defaults.
_GIVEN = NewRow._fields.index("handler") + 1
#: The fields from here to the last make up two columns.
_TIMES = NewRow._fields.index("due")
_PLAIN = NewRow("", "", "", 0)
_MOMENT = "coalesce(%s::timestamptz, statement_timestamp() + %s::float8 * interval '1 second')"
TIMES = _Columns(
    "processable_after, expires_at", _TIMES, len(NewRow._fields), f"{_MOMENT}, {_MOMENT}"
)
OPTIONAL = (*(_Columns(NewRow._fields[n], n, n + 1) for n in range(_GIVEN, _TIMES)), TIMES)


def ignore_ids(ids: Sequence[int]) -> None:
    """The default of `on_ids`: do nothing."""


def insert(
    cursor: CopyCursor, rows: Rows, *, on_ids: Callable[[Sequence[int]], None] = ignore_ids
) -> list[int]:
    """Insert the rows and return their ids, which ascend in the order of the rows.

    `on_ids` gets the same ids part by part, while the server is still reading the rows.
    """
    if not rows:
        return []
    if len(rows) > MAX_INSERT_ROWS:
        return copy_many(cursor, rows, on_ids=on_ids)
    return _insert_few(cursor, rows, on_ids)


def _insert_few(cursor: Cursor, rows: Rows, on_ids: Callable[[Sequence[int]], None]) -> list[int]:
    cursor.execute(*one_statement(rows))
    found = cursor.fetchall()
    rows.stored_at = found[0][1]
    # Ids are drawn in the order of the rows; RETURNING promises no order.
    ids = sorted(id for id, _ in found)
    on_ids(ids)
    return ids


def one_statement(rows: Rows) -> tuple[str, Sequence[object]]:
    """Return the statement that inserts a few rows, and its parameters.

    The statement returns the id of each row, and when it was stored.
    """
    used = _used_columns(rows)
    if used and len(rows) > MAX_VALUES_ROWS:
        return INSERT_FEW, (f"[{','.join(map(as_json, rows))}]",)
    row = "(%s, %s, %s, %s, %s" + "".join(f", {column.values}" for column in used) + ")"
    params: list[object] = []
    for template, payload in zip(rows.templates, rows.payloads, strict=True):
        params += (*template[:2], payload, *template[3:_GIVEN])
        for column in used:
            params += template[column.first : column.end]
    return INSERT_VALUES.format(_names(used), ", ".join([row] * len(rows))), params


def _used_columns(rows: Rows) -> list[_Columns]:
    """Return the optional columns that some row sets."""
    # Many rows share few templates.
    templates = {id(each): each for each in rows.templates}.values()
    if all(each[_GIVEN:] == _PLAIN[_GIVEN:] for each in templates):
        return []
    fields = zip(zip(*templates, strict=True), _PLAIN, strict=True)
    is_set = [values.count(default) < len(values) for values, default in fields]
    return [column for column in OPTIONAL if any(is_set[column.first : column.end])]


def _names(columns: Sequence[_Columns]) -> str:
    """Return the names of columns, for a statement that names other columns before them."""
    return "".join(f", {each.names}" for each in columns)


# The default of `created_at`, as a value: a role that may only insert cannot read the column.
_STORED = "returning id, date_part('epoch', statement_timestamp())"

# The server fills in the columns that no row sets, in a third of the time it takes to send and read
# them. VALUES are planned faster than a document: 5 rows with metadata take 0.13 ms less CPU in
# client and server (PostgreSQL 18).
INSERT_VALUES = f"""
insert into django_mq_queuedmessage (queue, type, payload, max_attempts, handler{{}})
values {{}}
{_STORED}
"""


# One document for all rows: 34 us per row, against 76 for VALUES of all columns (50 rows,
# PostgreSQL 15).
INSERT_FEW = f"""
insert into django_mq_queuedmessage (
    queue, type, payload, max_attempts, handler, schema_version, metadata, priority, key, retry,
    wants_result, ordered, processable_after, expires_at
)
select
    queue, type, payload, max_attempts, handler, schema_version, metadata, priority, key, retry,
    wants_result, ordered, coalesce(due, statement_timestamp() + delay * interval '1 second'),
    coalesce(expires, statement_timestamp() + lifetime * interval '1 second')
from jsonb_to_recordset(%s::jsonb) as row (
    queue text, type text, payload jsonb, max_attempts integer, handler text,
    schema_version integer, metadata jsonb, priority smallint, key text, retry jsonb,
    wants_result boolean, ordered boolean, due timestamptz, delay float8, expires timestamptz,
    lifetime float8
)
{_STORED}
"""
_JSON_COLUMNS = ("payload", "metadata", "retry")


def as_json(row: NewRow, **more: object) -> str:
    """Return the row and `more` as a JSON object; fields that are JSON text go in unchanged."""
    values = {**row._asdict(), **more}
    texts = [f'"{name}":{values.pop(name) or "null"}' for name in _JSON_COLUMNS]
    return f"{{{','.join(texts)},{json.dumps(values, default=datetime.isoformat)[1:]}"


# The rows come later, so the transaction gets its own id first: the marks of ordered queues wait
# for it. The sequence is looked up once, not per id. A timestamp without time zone is read the same
# way whatever USE_TZ says. COPY refuses a table whose row-level security applies to the login.
DRAW = """
with ids as materialized (
    select pg_current_xact_id() as transaction,
           pg_get_serial_sequence('django_mq_queuedmessage', 'id')::regclass as sequence
)
select statement_timestamp() at time zone 'UTC',
    array(select nextval(ids.sequence) from ids, generate_series(1, %s)
           where ids.transaction is not null),
    row_security_active('django_mq_queuedmessage')
"""


class DrawnIds(NamedTuple):
    """New ids, ascending, drawn at `now`; `secured`: row-level security applies to this login."""

    now: datetime
    ids: list[int]
    secured: bool


def draw(cursor: Cursor, count: int) -> DrawnIds:
    """Return the database's time and `count` new ids."""
    cursor.execute(DRAW, (count,))
    clock, ids, secured = cursor.fetchone()
    return DrawnIds(clock.replace(tzinfo=UTC), ids, secured)


# The server fills in the defaults in half the time it takes to read them.
COPY = """
copy django_mq_queuedmessage (id, queue, type, payload, max_attempts, handler{}) from stdin
"""


def copy_many(
    cursor: CopyCursor, rows: Rows, *, on_ids: Callable[[Sequence[int]], None] = ignore_ids
) -> list[int]:
    """Insert the rows by COPY and return their ids in the order of the rows; see `insert()`.

    One statement fetches ids and the time first: COPY returns nothing and computes nothing. Under
    row-level security the rows are inserted by INSERT, with other ids.
    """
    now, ids, secured = draw(cursor, len(rows))
    if secured:
        return [id for part in _parts(rows) for id in _insert_few(cursor, part, on_ids)]
    used = _used_columns(rows)
    names = _names(used) + (", created_at" if TIMES in used else "")
    line = _line_maker(used, now)
    with cursor.copy(COPY.format(names)) as copy:
        for start in range(0, len(rows), COPY_LINES):
            these = ids[start : start + COPY_LINES]
            part = rows[start : start + COPY_LINES]
            lines = map(line, these, part.templates, part.payloads)
            long = sum(map(len, part.payloads)) > COPY_CHARACTERS
            for text in lines if long else ("".join(lines),):
                copy.write(text)
            on_ids(these)
    return ids


def _parts(rows: Rows) -> Iterator[Rows]:
    """Yield the rows in parts of at most `COPY_LINES` rows, cut after `COPY_CHARACTERS`."""
    start = size = 0
    for end, row in enumerate(rows, 1):
        size += len(row.payload) + len(row.metadata)
        if end - start == COPY_LINES or size > COPY_CHARACTERS or end == len(rows):
            yield rows[start:end]
            start, size = end, 0


def _line_maker(used: Sequence[_Columns], now: datetime) -> Callable[[int, NewRow, str], str]:
    """Return a function that makes a line of COPY text; `used` follow the columns of all rows.

    The rows of one call differ in little besides the payload, so the rest is rendered once per
    template: 2 us per row, where the driver's own `write_row` takes 8.
    """
    last: NewRow | None = None
    before = after = ""

    def line(id: int, template: NewRow, payload: str) -> str:
        nonlocal last, before, after
        if template is not last and template != last:
            before, after = around(template)
        last = template
        return f"{id}{before}{_escaped(payload)}{after}"

    @cache
    def around(template: NewRow) -> tuple[str, str]:
        values: list[object] = [*template[3:_GIVEN]]
        for each in used:
            values += _moments(template, now) if each is TIMES else template[each.first : each.end]
        return (
            "".join(f"\t{_copied(value)}" for value in template[:2]) + "\t",
            "".join(f"\t{_copied(value)}" for value in values) + "\n",
        )

    return line


def _moments(row: NewRow, now: datetime) -> tuple[datetime, datetime | None, datetime]:
    """Return when the row is due, when it expires and when it was created."""
    due = now + timedelta(seconds=row.delay) if row.due is None else row.due
    expires = row.expires
    if expires is None and row.lifetime is not None:
        expires = now + timedelta(seconds=row.lifetime)
    return due, expires, now


def _copied(value: object) -> str:
    if value is None:
        return "\\N"
    return _escaped(value.isoformat() if isinstance(value, datetime) else str(value))


def _escaped(text: str) -> str:
    """Escape the characters that are special in COPY's text format."""
    if "\\" in text:
        text = text.replace("\\", "\\\\")
    if text.isprintable():
        return text
    return text.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
