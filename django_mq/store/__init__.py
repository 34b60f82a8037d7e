"""Every SQL statement and state change: one function each, its statement above it.

Functions take a cursor, Django's or psycopg's, and plain values; they open no transaction.

The planner may think that nothing is in a table, since it was vacuumed while it was empty, and keep
a plan that then reads all of it for each row that is asked for: 105 s to give back 100 messages
among 3,000. So what is known by its id is asked for in forms that leave one way, by the index:
LATERAL with a lock, LIMIT or OFFSET 0; `id = any(array(select ...))` for what is to be changed; a
scalar subquery instead of NOT EXISTS. What gets values of x is joined by `id = any(array[x.id])` in
claims, whose connection scans no table, and by `id = x.id` beside such an array elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from django_mq.messages import PlainFence


class Cursor(Protocol):
    """What a statement needs of a cursor."""

    @property
    def connection(self) -> Any: ...

    @property
    def rowcount(self) -> int: ...

    def execute(self, sql: Any, params: Sequence[Any] | Mapping[str, Any] | None = None) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def fetchone(self) -> Any: ...


def fence_columns(fences: Iterable[PlainFence]) -> dict[str, object]:
    """Return fences as the parameters `ids`, `attempts` and `claimers`: parallel arrays.

    As array literals, which cost a tenth of what the driver needs for lists of text: claimers
    are made of hexadecimal digits, a colon and a number, so nothing in them needs quotes.
    """
    ids, attempts, claimers = tuple(zip(*fences, strict=True)) or ((), (), ())
    return {"ids": array(ids), "attempts": array(attempts), "claimers": array(claimers)}


#: What a row fulfils that has one of the fences which `fence_runs()` gives. Looked up in a table
#: of all fences, each row would cost half as much again. Who waited for somebody else's change
#: looks at it again.
OURS = """id = any(array(select unnest(%(ids)s::bigint[])))
   and attempts = (%(attempts)s::int[])[width_bucket(id, %(firsts)s::bigint[])]
   and claimed_by = (%(claimers)s::text[])[width_bucket(id, %(firsts)s::bigint[])]"""


def fence_runs(fences: Iterable[PlainFence]) -> dict[str, object]:
    """Return fences as the parameters of OURS: ids, and runs of those that are otherwise alike.

    A slice is mostly made of a few claims, and what one claim took has ids beside each other: so
    attempt and claimer are given with the first id from which on they hold. 400 runs of one cost as
    much as a table of fences, and the cost grows with the square. Of one id the last fence counts.

    >>> runs = fence_runs([(7, 1, "me:1"), (8, 1, "me:1"), (3, 1, "me:1"), (9, 2, "me:2")])
    >>> runs["ids"], runs["firsts"], runs["attempts"], runs["claimers"]
    ('{3,7,8,9}', '{3,9}', '{1,2}', '{me:1,me:2}')
    """
    ordered = sorted(fences, key=itemgetter(0))
    runs = [next(run) for _, run in groupby(ordered, itemgetter(1, 2))]
    firsts, attempts, claimers = tuple(zip(*runs, strict=True)) or ((), (), ())
    return {
        "ids": array([fence[0] for fence in ordered]),
        "firsts": array(firsts),
        "attempts": array(attempts),
        "claimers": array(claimers),
    }


def fenced(columns: str = "m.id", *, last: str = "offset 0") -> str:
    """Return the FROM item `m`: `columns` of the messages whose fences are `fence_columns()`.

    `last` closes its subquery: a lock, or OFFSET 0. Either keeps the planner from joining the
    table to the fences the other way round: it would read all of it for them where it thinks that
    little is there, as it does of a table that was vacuumed while it was empty.

    >>> "for no key update" in fenced(last=LOCKED)
    True
    """
    return f"""unnest(%(ids)s::bigint[], %(attempts)s::int[], %(claimers)s::text[])
           as fence (id, attempt, claimer)
     cross join lateral (
        select {columns}
          from django_mq_queuedmessage m
         where m.id = fence.id and m.attempts = fence.attempt and m.claimed_by = fence.claimer
        {last}
     ) m"""  # noqa: S608  (made of our own texts)


#: The `last` of `fenced()` that locks its rows and passes over those that somebody else has.
LOCKED = "for no key update skip locked"


def array(values: Iterable[object]) -> str:
    """Return values, in whose texts nothing needs quotes, as an array literal.

    >>> array([7, 12]), array(())
    ('{7,12}', '{}')
    """
    return "{" + ",".join(map(str, values)) + "}"


def literal(value: object) -> str:
    """Return a literal of a value in whose text nothing needs quotes; ValueError if something does.

    >>> literal(7), literal("worker:7"), literal(array([1, 2]))
    ("'7'", "'worker:7'", "'{1,2}'")
    """
    text = str(value)
    if "'" in text or "\\" in text or "\0" in text:
        raise ValueError(f"{text!r} cannot be written into a statement: give it as a parameter")
    return f"'{text}'"
