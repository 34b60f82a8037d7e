"""A worker's statements keep the plan of their first runs, often made on an empty table.

PostgreSQL expects no rows in a table that was vacuumed while empty. A plan made then may read the
whole table for each row it is given: releasing a hundred messages among 3,000 took 105 seconds.
Rows are counted here, since their number is the same on a busy machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
from django.db import DEFAULT_DB_ALIAS, connection, transaction

from django_mq.executor.statements import Statements
from django_mq.messages import Fence
from django_mq.models import UniqueKey
from django_mq.store import (
    adopt,
    change_waiting,
    claim,
    expiry,
    free_unique_ids,
    keys,
    leases,
    ordered_queues,
    poll,
    promotion,
    pruning,
    recover,
    settle,
)
from django_mq.store import claim_keyed as keyed
from django_mq.store import claim_lapsed as lapsed
from django_mq.store import put_aside as aside
from django_mq.store.claim import Lane
from django_mq.store.free_unique_ids import EndedMessage
from django_mq.store.keys import KeyLine
from django_mq.store.results import Reply, store
from django_mq.store.rows import NewRow
from django_mq.store.settle import FailedDelivery
from django_mq.store.unique_ids import UniqueId, UniqueRow
from tests.database import lock, second_connection
from tests.store.plans import Cursor

pytestmark = pytest.mark.thorough

#: The rows that a statement is about, and other rows.
MINE, OTHERS = 100, 3000

Call = Callable[[Cursor, list[int]], Any]

FILL = """
insert into django_mq_queuedmessage
       (queue, type, handler, payload, processable_after, attempts, claimed_by, leased_until,
        key, ordered, dead_at)
select %(queue)s, 'a', 'h', '{}', now() - interval '1 h', %(attempts)s, %(claimer)s,
       case when %(claimer)s is not null then now() + %(lease)s * interval '1 s' end,
       %(key)s || n / 10, %(ordered)s, case when %(dead)s then now() end
  from generate_series(1, %(count)s) n
returning id
"""


def fill(queue: str, count: int, **given: Any) -> list[int]:
    defaults = {"attempts": 0, "claimer": None, "lease": 60, "key": None, "ordered": False,
                "dead": False}  # fmt: skip
    with connection.cursor() as cursor:
        cursor.execute(FILL, {**defaults, "queue": queue, "count": count, **given})
        return [id for (id,) in cursor.fetchall()]


class Cost(NamedTuple):
    """The rows and pages that a statement reads."""

    rows: int
    buffers: int


def fences(ids: list[int]) -> list[Fence]:
    return [Fence(id, 1, "me:1") for id in ids]


def failures(ids: list[int]) -> list[FailedDelivery]:
    return [
        FailedDelivery(fence, None, 1.0, "", "E", "e", "", "E: e", 0.1) for fence in fences(ids)
    ]


def contents(cursor: Cursor) -> list[tuple[UniqueRow, bool]]:
    """Return new content for waiting messages, of which there may be none."""
    cursor.execute("select id from django_mq_queuedmessage where queue = 'mail' limit %s", [MINE])
    row = NewRow("mail", "a", "{}", 5, "h")
    return [(UniqueRow(id, row, str(id), 60.0), False) for (id,) in cursor.fetchall()]


ASKED: dict[str, Any] = {"claimer": "me:2", "lease": 30.0, "limit": MINE, "max_bytes": 1 << 20}


CALLS: dict[str, Call] = {
    "lock": lambda cursor, ids: lock(cursor, fences(ids)),
    "ack": lambda cursor, ids: settle.ack(cursor, fences(ids)),
    "still_ours": lambda cursor, ids: settle.still_ours(cursor, fences(ids)),
    "release": lambda cursor, ids: settle.release(cursor, fences(ids)),
    "forget_lapse": lambda cursor, ids: lapsed.forget_lapse(cursor, fences(ids)),
    "fail": lambda cursor, ids: settle.fail(cursor, failures(ids)),
    "renew": lambda cursor, ids: leases.renew(cursor, fences(ids), lease=60.0),
    "start": lambda cursor, ids: leases.start(cursor, fences(ids), lease=60.0),
    "start_skipping": lambda cursor, ids: leases.start(
        cursor, fences(ids), lease=60.0, waits=False
    ),
    "lock_running": lambda cursor, ids: recover.lock_running(cursor, fences(ids)),
    "release_all_except": lambda cursor, ids: recover.release_all_except(
        cursor, worker="me", kept=ids[:10]
    ),
    "anything_left": lambda cursor, ids: recover.anything_left(cursor, worker="me"),
    "store": lambda cursor, ids: store(cursor, [Reply(id, "h", "1") for id in ids]),
    "end": lambda cursor, ids: free_unique_ids.end(
        cursor, [EndedMessage(id, UniqueId("mine", "h", "a", str(id)), success=True) for id in ids]
    ),
    "free_put_aside": lambda cursor, ids: aside.free_put_aside(cursor, limit=MINE),
    "promote_put_aside": lambda cursor, ids: promotion.promote_put_aside(
        cursor, [UniqueId("slow", "h", "a", str(n)) for n in range(MINE)]
    ),
    "replace": lambda cursor, ids: change_waiting.replace(cursor, contents(cursor)),
    "prune_quiet": lambda cursor, ids: pruning.prune(cursor, "quiet ids", limit=MINE),
    "expire": lambda cursor, ids: expiry.expire(cursor, limit=MINE),
    "free_next": lambda cursor, ids: keys.free_next(
        cursor, [KeyLine("keyed", "h", f"k{n}") for n in range(MINE)]
    ),
    "free_stranded": lambda cursor, ids: keys.free_stranded(cursor, skipping=[], limit=MINE),
    "claim": lambda cursor, ids: claim.claim(cursor, lanes=[Lane("mail", 0)], **ASKED),
    "claim_keyed": lambda cursor, ids: keyed.claim(
        cursor, lanes=[Lane("keyed", 0)], skip_dead=False, **ASKED
    ),
    "claim_line": lambda cursor, ids: ordered_queues.claim(
        cursor, queue="line", worker="me", skip_dead=False, **ASKED
    ),
    "adopt": lambda cursor, ids: adopt.adopt(cursor, queue="mail", limit=MINE),
    "claim_lapsed": lambda cursor, ids: lapsed.claim_lapsed(cursor, queues=["slow"], **ASKED),
    "claim_lapsed_keys": lambda cursor, ids: lapsed.claim_lapsed(
        cursor, queues=["slow_keys"], **ASKED
    ),
    "claim_lapsed_line": lambda cursor, ids: lapsed.claim_lapsed(
        cursor, queues=["slow_line"], **ASKED
    ),
    "poll": lambda cursor, ids: poll.poll(cursor),
}


UNIQUE = """
insert into django_mq_uniquekey (queue, handler, type, unique_id, message_id, put_aside)
select queue, handler, 'a', id::text, id, null::jsonb
  from django_mq_queuedmessage
 where queue in ('mine', 'mail')
 union all
select 'slow', 'h', 'a', n::text, null, %(aside)s::jsonb
  from generate_series(1, %(count)s) n
"""


ASIDE = {
    "payload": {},
    "metadata": {},
    "schema_version": 1,
    "max_attempts": 1,
    "priority": 0,
    "wants_result": False,
    "ordered": False,
}


def fill_all() -> list[int]:
    """Fill the table; return the ids of the claimed messages."""
    mine = fill("mine", MINE, attempts=1, claimer="me:1")
    fill("slow", MINE, attempts=1, claimer="gone:1", lease=-1)
    fill("mail", OTHERS)
    fill("keyed", OTHERS, key="k")
    fill("line", OTHERS, ordered=True)
    fill("buried", OTHERS, dead=True)
    fill("slow_keys", MINE, attempts=1, claimer="gone:1", lease=-1, key="k")
    fill("slow_line", MINE, attempts=1, claimer="gone:1", lease=-1, ordered=True)
    with connection.cursor() as cursor:
        cursor.execute(UNIQUE, {"count": MINE, "aside": json.dumps(ASIDE)})
    return mine


@pytest.fixture(autouse=True)
def _emptied(transactional_db: None) -> None:
    """The tables were full once, and were vacuumed while they were empty."""
    fill_all()
    with connection.cursor() as cursor:
        cursor.execute("delete from django_mq_queuedmessage; delete from django_mq_uniquekey")
        cursor.execute("vacuum analyze django_mq_queuedmessage, django_mq_uniquekey")


READ = """
select sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::bigint
  from pg_stat_xact_user_tables
 where relname in ('django_mq_queuedmessage', 'django_mq_uniquekey')
"""
TOUCHED = """
select sum(heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read)::bigint
  from pg_statio_user_tables
 where relname in ('django_mq_queuedmessage', 'django_mq_uniquekey')
"""
#: A session reports its counters at the end of a transaction.
FLUSH = "select pg_stat_force_next_flush()"


def ask(cursor: Any, question: str) -> int:
    cursor.execute(question)
    [number] = cursor.fetchone()
    return int(number)


def cost_of(block: AbstractContextManager[Any], cursor: Any, run: Callable[[], object]) -> Cost:
    """Return the cost of `run` inside the transaction `block`."""
    cursor.execute(FLUSH)
    with second_connection() as other, other.cursor() as watching:
        touched = ask(watching, TOUCHED)
        with block:
            cursor.execute("set local statement_timeout = '10s'")
            before = ask(cursor, READ)
            run()
            rows = ask(cursor, READ) - before
            cursor.execute(FLUSH)
        return Cost(rows, ask(watching, TOUCHED) - touched)


@pytest.fixture
def statements() -> Iterator[Statements]:
    """A worker's own connection."""
    statements = Statements(DEFAULT_DB_ALIAS)
    yield statements
    statements.close()


@pytest.mark.parametrize("name", CALLS)
def test_a_plan_kept_from_an_empty_table_serves_a_full_one(
    statements: Statements, name: str
) -> None:
    call, cursor = CALLS[name], statements.cursor()
    with statements.transaction():
        ordered_queues.own(cursor, queue="line", worker="me", lease=60.0)
    for _ in range(5):
        with statements.transaction():
            call(cursor, [1, 2])
    mine = fill_all()
    cost = cost_of(statements.transaction(), cursor, lambda: call(cursor, mine))
    assert cost.rows <= 15 * MINE
    assert cost.buffers <= 70 * MINE


@pytest.mark.parametrize("name", ["lock", "ack", "release"])
def test_the_statistics_of_an_empty_table_serve_a_full_one(name: str) -> None:
    """Handlers' connections plan each time, with statistics that may be just as old."""
    mine = fill_all()
    with connection.cursor() as cursor:
        cost = cost_of(transaction.atomic(), cursor, lambda: CALLS[name](cursor, mine))
    assert cost.rows <= 15 * MINE
    assert cost.buffers <= 70 * MINE


def test_a_limit_holds_whatever_the_plan(statements: Statements) -> None:
    """A plan that looks repeatedly for the rows to remove finds others each time."""
    cursor = statements.cursor()
    for _ in range(5):
        pruning.prune(cursor, "quiet ids", limit=MINE)
    with connection.cursor() as others:
        others.execute(
            "insert into django_mq_uniquekey (queue, handler, type, unique_id, quiet_until)"
            " select 'mail', 'h', 'a', n::text, now() - interval '1 h'"
            "   from generate_series(1, %s) n",
            [OTHERS],
        )
    pruning.prune(cursor, "quiet ids", limit=MINE)
    assert UniqueKey.objects.count() == OTHERS - MINE
