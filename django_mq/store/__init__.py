"""Every SQL statement and state change of the package: one function each, its SQL above it.

Functions take a cursor (Django's, psycopg's or the worker's `RepeatingCursor`) and plain values,
and open no transaction. Functions of `session_facts` and `driver` take a connection instead. A few
functions take neither and return SQL text for the simple protocol:

- `ack_alone()`, `start_alone()` and `frozen_owner.record()` are transactions of their own;
- `limits` begins a transaction, or sets the limits of one or of a session;
- `row_locks` locks rows in the open transaction.

Savepoints, and most LISTENs, are written where they are used.

A queue table is often vacuumed while it is empty. The planner then assumes that the table stays
empty, and may keep a plan that reads the whole table for each row looked up: releasing 100 messages
among 3,000 took 105 s. Statements therefore look rows up by id in forms that only the index can
serve:

- to read or lock rows: LATERAL with a lock, LIMIT or OFFSET 0;
- to change rows: `id = any(array(select ...))`;
- to test for absence: a scalar subquery instead of NOT EXISTS;
- to delete rows by fence: `MATCHES_FENCE`; to lock or update them: `fenced()`;
- to change rows with values from `x`: in claims, whose connection disables sequential scans, join
  by `id = any(array[x.id])`; elsewhere join by `id = x.id` next to such an array.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from django_mq.messages import PlainFence


class Cursor(Protocol):
    """The part of a cursor that statements use."""

    @property
    def connection(self) -> Any: ...

    @property
    def rowcount(self) -> int: ...

    def execute(self, sql: Any, params: Sequence[Any] | Mapping[str, Any] | None = None) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def fetchone(self) -> Any: ...


def fence_values(fence: PlainFence) -> dict[str, object]:
    """Return one fence as the parameters `id`, `attempt` and `claimer`."""
    return dict(zip(("id", "attempt", "claimer"), fence, strict=True))


def fence_columns(fences: Iterable[PlainFence]) -> dict[str, object]:
    """Return fences as the parameters `ids`, `attempts` and `claimers`: parallel arrays.

    They are array literals, which take a tenth of the driver's time for lists of text. A
    claimer is hexadecimal digits, a colon and a number, so it never needs quotes.
    """
    ids, attempts, claimers = tuple(zip(*fences, strict=True)) or ((), (), ())
    return {"ids": array(ids), "attempts": array(attempts), "claimers": array(claimers)}


def arrays_of(kind: Any, rows: Iterable[Any]) -> dict[str, Any]:
    """Return the fields of `rows`, NamedTuples of `kind`, as arrays for unnest().

    Columns of texts are array literals: the driver takes 50 us to escape a traceback in a list.

    >>> from django_mq.store.results import Reply
    >>> arrays = arrays_of(Reply, [Reply(1, "h", "{}"), Reply(2, "h", None)])
    >>> arrays["handler"], arrays["value"]
    ('{"h","h"}', ['{}', None])
    """
    rows = list(rows)
    columns = {name: [getattr(row, name) for row in rows] for name in kind._fields}
    return {name: texts(each) if _are_texts(each) else each for name, each in columns.items()}


def _are_texts(values: Sequence[object]) -> bool:
    """Return whether these are texts that `texts()` can write; the driver refuses one with NUL.

    An empty column stays a list: it may be one of fences.
    """
    return bool(values) and all(isinstance(each, str) and "\0" not in each for each in values)


def fenced(columns: str = "m.id", *, last: str = "offset 0") -> str:
    """Return the FROM item `m`: `columns` of the messages that match `fence_columns()`.

    `last` ends the subquery: a locking clause, or OFFSET 0. Either keeps the planner from starting
    the join with a scan of the whole table, which it prefers if its statistics say that the table
    is empty.

    >>> "for no key update" in fenced(last=LOCK_SKIPPING)
    True
    """
    return f"""unnest(%(ids)s::bigint[], %(attempts)s::int[], %(claimers)s::text[])
           as fence (id, attempt, claimer)
     cross join lateral (
        select {columns}
          from django_mq_queuedmessage m
         where m.id = fence.id and m.attempts = fence.attempt and m.claimed_by = fence.claimer
        {last}
     ) m"""


#: The condition that message `m` matches one of `fence_columns()`. `any()` leaves the planner only
#: the index. IS TRUE keeps IN a look-up in a hash table: as a join, with the statistics of a table
#: that was vacuumed while it was empty, it compares each row with each fence, and acking 100
#: messages takes 0.9 ms instead of 0.2.
MATCHES_FENCE = """m.id = any(%(ids)s::bigint[])
       and ((m.id, m.attempts, m.claimed_by) in (
            select fence.id, fence.attempt, fence.claimer
              from unnest(%(ids)s::bigint[], %(attempts)s::int[], %(claimers)s::text[])
                   as fence (id, attempt, claimer))) is true"""

#: The `last` of `fenced()` that locks its rows, and skips rows that another session has locked.
LOCK_SKIPPING = "for no key update skip locked"


def array(values: Iterable[object]) -> str:
    """Return values as an array literal; the text of a value must not need quotes.

    >>> array([7, 12]), array(())
    ('{7,12}', '{}')
    """
    return "{" + ",".join(map(str, values)) + "}"


def names(values: Iterable[str]) -> str:
    """Return names of queues or handlers as an array literal; one may be `null`.

    >>> names(["null", "mail"])
    '{"null","mail"}'
    """
    return array(f'"{value}"' for value in values)


def texts(values: Sequence[str]) -> str:
    """Return texts of any content as an array literal.

    >>> texts(["a", 'b"'])
    '{"a","b\\\\""}'
    """
    joined = "\0".join(values).replace("\\", r"\\").replace('"', r"\"")
    return '{"' + joined.replace("\0", '","') + '"}' if values else "{}"


def literal(value: object) -> str:
    """Return a value as a literal; raise ValueError if its text needs escaping.

    >>> literal(7), literal("worker:7"), literal(array([1, 2]))
    ("'7'", "'worker:7'", "'{1,2}'")
    """
    text = str(value)
    if "'" in text or "\\" in text or "\0" in text:
        raise ValueError(f"{text!r} cannot be written into a statement: pass it as a parameter")
    return f"'{text}'"


def literals(params: Mapping[str, object]) -> dict[str, str]:
    """Return parameters as literals.

    Writing them with the driver would take as long as the server needs for the statement.
    """
    return {name: literal(value) for name, value in params.items()}
