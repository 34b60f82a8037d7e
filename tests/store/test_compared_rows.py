"""Statements about many rows look up each of them, and do not compare each with each.

On a worker's own connection all joins are nested loops. Elsewhere PostgreSQL often chooses them,
too, for a table that was vacuumed while it was empty, since it expects one row. A join of two lists
of 100 rows then makes 10,000 comparisons.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import DEFAULT_DB_ALIAS, connection

from django_mq.executor.statements import Statements
from django_mq.messages import Fence
from django_mq.store import claim_lapsed as lapsed
from django_mq.store import figures, history, promotion, settle
from django_mq.store import unique_ids as unique
from django_mq.store.history import HandledDelivery
from django_mq.store.rows import NewRow
from django_mq.store.settle import FailedDelivery
from django_mq.store.unique_ids import UniqueId, UniqueRow
from tests.database import second_connection
from tests.pages_read import PagesRead
from tests.store.plans import Cursor

pytestmark = pytest.mark.django_db(transaction=True)

#: The rows of each list, and how often a statement may look at each.
ROWS, LOOKS = 100, 40


class Watched:
    """A cursor that counts the rows that each statement looks at, in memory or not."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self.read = PagesRead()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)

    def execute(self, sql: str, params: Any = None) -> Any:
        self.read.add(self._cursor.connection, sql, params)
        return self._cursor.execute(sql, params)


CLAIMED = """
insert into django_mq_queuedmessage
       (queue, type, handler, payload, attempts, max_attempts, claimed_by, leased_until)
select 'mail', 'a', 'h', '{}', 1, 20, 'me:1', now() + %s * interval '1 s'
  from generate_series(1, %s)
returning id
"""
# Of each id, the quiet time is over, or content is put aside.
IDS = """
insert into django_mq_uniquekey (queue, handler, type, unique_id, quiet_until, put_aside)
select 'mail', 'h', 'a', n::text, now() - interval '1 s', null
  from generate_series(1, %(rows)s) n
 union all
select 'mail', 'h', 'a', n::text, null, %(content)s::jsonb
  from generate_series(1, %(aside)s) n
"""
MINUTES = """
insert into django_mq_minutefigures
       (minute, worker, queue, handler, acked, failed, retried, dead, broadcast, waited, ran)
select now() - interval '3 hours', 'w', 'q' || n, 'h', 1, 0, 0, 0, 1, '{"1": 1}', '{"2": 1}'
  from generate_series(1, %s) n
"""


def fill(statement: str, params: Any) -> list[int]:
    with connection.cursor() as cursor:
        cursor.execute(statement, params)
        return [id for (id,) in cursor.fetchall()] if cursor.description else []


def claimed(*, lease: int = 60) -> list[Fence]:
    return [Fence(id, 1, "me:1") for id in fill(CLAIMED, [lease, ROWS])]


def unique_ids(*, aside: int = 0) -> list[UniqueId]:
    content = json.dumps({"payload": {}, "max_attempts": 1})
    fill(IDS, {"rows": ROWS, "aside": aside, "content": content})
    return [UniqueId("mail", "h", "a", str(n + 1)) for n in range(ROWS)]


def ack(cursor: Any) -> int:
    return len(settle.ack(cursor, claimed()))


def move_to_history(cursor: Any) -> int:
    handled = [HandledDelivery(fence, 0.1, 60.0, 2, with_content=True) for fence in claimed()]
    return len(history.ack(cursor, handled))


def fail(cursor: Any) -> int:
    failures = [
        FailedDelivery(fence, None, 1.0, "", "E", "e", "", "E: e", 0.1) for fence in claimed()
    ]
    return len(settle.fail(cursor, failures))


def take_over(cursor: Any) -> int:
    claimed(lease=-1)
    asked: dict[str, Any] = {"claimer": "me:2", "lease": 60.0, "limit": ROWS, "max_bytes": 10**6}
    return len(lapsed.claim_lapsed(cursor, queues=["mail"], **asked).taken)


def take_unique_ids(cursor: Any) -> int:
    ids = unique_ids()
    with connection.cursor() as looking:
        found = unique.read_states(looking, ids)
    row = NewRow("mail", "a", "{}", 1, "h")
    rows = [
        UniqueRow(n, row, id.unique_id, None, seen)
        for n, (id, seen) in enumerate(zip(ids, found, strict=True))
    ]
    return len(unique.add(cursor, rows))


def promote(cursor: Any) -> int:
    return len(promotion.promote_put_aside(cursor, unique_ids(aside=ROWS)))


def roll_up(cursor: Any) -> int:
    fill(MINUTES, [ROWS])
    assert figures.roll_up(cursor)
    [(rows,)] = cursor.execute("select count(*) from django_mq_hourfigures").fetchall()
    return int(rows)


#: Each changes `ROWS` rows and returns their number.
CALLS: dict[str, Callable[[Any], int]] = {
    "ack": ack,
    "move_to_history": move_to_history,
    "take_over": take_over,
    "take_unique_ids": take_unique_ids,
    "promote": promote,
    "roll_up": roll_up,
}


@contextmanager
def worker_cursor() -> Iterator[Cursor]:
    """Yield a cursor of a worker's own connection."""
    statements = Statements(DEFAULT_DB_ALIAS)
    try:
        yield statements.cursor()  # type: ignore[misc]
    finally:
        statements.close()


def empty(messages: int) -> None:
    """Empty the tables; their statistics are from then, their indexes as large as before."""
    fill(CLAIMED, [60, messages])
    unique_ids()
    fill(MINUTES, [ROWS])
    for table in ("queuedmessage", "uniquekey", "minutefigures"):
        fill(f"delete from django_mq_{table}", None)
        fill(f"vacuum analyze django_mq_{table}", None)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_worker_looks_up_each_row(call: Callable[[Any], int]) -> None:
    empty(ROWS)
    with worker_cursor() as cursor:
        watched = Watched(cursor)
        assert call(watched) == ROWS
    assert watched.read.most_rows <= LOOKS * ROWS


@pytest.mark.parametrize("call", [ack, move_to_history, take_unique_ids])
def test_a_handler_looks_up_each_row(call: Callable[[Any], int]) -> None:
    empty(30_000)
    with second_connection() as own:
        watched = Watched(own.cursor())
        assert call(watched) == ROWS
    assert watched.read.most_rows <= LOOKS * ROWS


def test_a_failed_attempt_is_recorded_without_a_second_look_up() -> None:
    """On a worker's connection, each message is still compared with the list of failures, once."""
    empty(ROWS)
    with worker_cursor() as cursor:
        watched = Watched(cursor)
        assert fail(watched) == ROWS
    assert watched.read.most_rows < 1.5 * ROWS * ROWS
