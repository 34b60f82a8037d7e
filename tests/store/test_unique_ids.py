"""Statements about unique ids: the rows they lock or skip, and the index they use."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from django.db import OperationalError, connection, transaction

from django_mq import broadcast
from django_mq.models import QueuedMessage, UniqueKey
from django_mq.store import backlog, change_waiting, free_unique_ids, limits, promotion, pruning
from django_mq.store import put_aside as aside
from django_mq.store import unique_ids as unique
from django_mq.store.free_unique_ids import EndedMessage
from django_mq.store.put_aside import put_aside
from django_mq.store.rows import NewRow
from django_mq.store.unique_ids import StoredUniqueId, UniqueId, UniqueRow
from tests.database import second_connection, until_blocked
from tests.rows import add, stored
from tests.store.conftest import lock

pytestmark = pytest.mark.django_db(transaction=True)

Cursor = psycopg.Cursor[Any]
ID = UniqueId("mail", "h", "a.b", "u")
ROW = NewRow(queue="mail", type="a.b", payload='{"n": 2}', max_attempts=20, handler="h")
NOTHING = StoredUniqueId(None, None, False, False, False, False, None)


def take(**given: Any) -> QueuedMessage:
    """Insert a message that has the id."""
    message = add("mail", **{"type": "a.b", "handler": "h", "unique_id": "u", **given})
    UniqueKey.objects.create(**ID._asdict(), message_id=message.pk)
    return message


def new(id: int, seen: StoredUniqueId = NOTHING, **given: Any) -> UniqueRow:
    return UniqueRow(id, ROW._replace(**given), "u", None, seen)


def look(cursor: Cursor) -> StoredUniqueId:
    [seen] = unique.read_states(cursor, [ID])
    return seen


def end(cursor: Cursor, message: QueuedMessage, *, success: bool = True) -> list[int]:
    cursor.execute("delete from django_mq_queuedmessage where id = %s", [message.pk])
    return free_unique_ids.end(cursor, [EndedMessage(message.pk, ID, success)])


def test_an_id_is_taken_only_if_it_is_as_it_was_seen(cursor: Cursor) -> None:
    """A session that looked before another one took and freed the id must look again."""
    old = look(cursor)
    assert unique.add(cursor, [new(101, old)]).keys() == {101}
    assert unique.add(cursor, [new(102, old)]).keys() == set()
    [message] = QueuedMessage.objects.all()
    before = look(cursor)
    assert before == StoredUniqueId(message.pk, None, True, False, False, False, before.version)
    cursor.execute("update django_mq_uniquekey set unique_for = interval '1 min'")
    end(cursor, message)
    assert unique.add(cursor, [new(103, before)]).keys() == set()
    quiet = look(cursor)
    assert (quiet.quiet, quiet.alive) == (True, False)
    assert unique.add(cursor, [new(104, quiet)]).keys() == {104}
    assert look(cursor).message_id == 104


def test_new_quiet_time_differs_from_the_seen_one(cursor: Cursor) -> None:
    UniqueKey.objects.create(**ID._asdict(), quiet_until="2020-01-01T00:00:00Z")
    seen = look(cursor)
    UniqueKey.objects.update(quiet_until="2099-01-01T00:00:00Z")
    assert unique.add(cursor, [new(101, seen)]).keys() == set()


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Kolkata"])
def test_seen_quiet_time_matches_in_every_time_zone(cursor: Cursor, zone: str) -> None:
    UniqueKey.objects.create(**ID._asdict(), quiet_until="2020-07-01T00:00:00.123456Z")
    cursor.execute("select set_config('timezone', %s, false)", [zone])
    assert unique.add(cursor, [new(101, look(cursor))]).keys() == {101}


def test_update_of_a_locked_row_changes_nothing(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """It does not wait for a worker, so no deadlock with one is possible."""
    message = take()
    lock(other, message.pk)
    cursor.execute("set statement_timeout = '60s'")
    assert change_waiting.replace(cursor, [(new(message.pk), True)]) == []
    other.rollback()
    assert [each.id for each in change_waiting.replace(cursor, [(new(message.pk), True)])] == [
        message.pk
    ]
    assert stored(message).payload == {"n": 2}


@pytest.mark.parametrize("columns", [{"leased": 30}, {"leased": -30}, {"dead": -1}])
def test_update_changes_only_waiting_messages(cursor: Cursor, columns: dict[str, Any]) -> None:
    message = take(**columns)
    assert change_waiting.replace(cursor, [(new(message.pk), True)]) == []


def test_the_end_of_a_message_that_has_lost_its_id_changes_nothing(cursor: Cursor) -> None:
    """It died, another message took the id, and then it was removed."""
    dead = add("mail", type="a.b", handler="h", unique_id="u", dead=-1)
    holder = take()
    assert end(cursor, dead) == []
    assert UniqueKey.objects.get().message_id == holder.pk


@pytest.mark.parametrize("text", ["null", 'a"b', "a\\b", "{a,b}", "a, b", "'", "ü@%s"])
def test_an_id_is_any_text(cursor: Cursor, text: str) -> None:
    """The array literals of the statements quote it."""
    id = ID._replace(unique_id=text)
    message = add(**id._asdict())
    UniqueKey.objects.create(**id._asdict(), message_id=message.pk)
    [seen] = unique.read_states(cursor, [id])
    assert seen.message_id == message.pk
    put_aside(cursor, [new(0)._replace(unique_id=text)])
    message.delete()
    [next_] = free_unique_ids.end(cursor, [EndedMessage(seen.message_id, id, success=True)])
    assert QueuedMessage.objects.get().pk == next_


def test_ends_wait_for_no_transaction_that_puts_aside(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    message = take(leased=30)
    put_aside(other.cursor(), [new(0)])
    cursor.execute("set statement_timeout = '60s'")
    assert end(cursor, message) == []
    other.commit()
    assert aside.free_put_aside(cursor, limit=10).ids == [ID]
    [id] = promotion.promote_put_aside(cursor, [ID])
    assert promotion.promote_put_aside(cursor, [ID]) == []
    assert QueuedMessage.objects.get().pk == id


def test_ends_wait_for_no_session_that_waits_for_such_a_transaction(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    """A producer looks after its commit while another one replaces what was put aside."""
    message = take(leased=30)
    put_aside(cursor, [new(0)])
    put_aside(other.cursor(), [new(0, priority=7)])
    with second_connection() as third, ThreadPoolExecutor(1) as pool:
        locking = pool.submit(promotion.lock, third.cursor(), [ID])
        try:
            until_blocked(third.info.backend_pid)
            cursor.execute("set lock_timeout = '1s'")
            assert end(cursor, message) == []
        finally:
            other.commit()
        locking.result(60)
    [id] = promotion.promote_put_aside(cursor, [ID])
    assert QueuedMessage.objects.get(priority=7).pk == id


def test_put_aside_message_stays_while_its_id_is_taken(cursor: Cursor) -> None:
    take()
    put_aside(cursor, [new(0)])
    assert promotion.promote_put_aside(cursor, [ID]) == []
    assert aside.free_put_aside(cursor, limit=10).ids == []


def test_coming_forward_rings(cursor: Cursor, other: psycopg.Connection[Any]) -> None:
    """CAR-14."""
    from tests.database import listening

    message = take()
    put_aside(cursor, [new(0)])
    with listening() as listener:
        end(cursor, message)
        assert listener.heard() == [""]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_at_other_isolation_levels(level: str) -> None:
    """Guarantee 17: rows invisible to the snapshot cause an error that asks for another try."""
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(f"set transaction isolation level {level}")
        assert broadcast("a.b", unique_id="mine").outcome == "added"
        assert broadcast("a.b", unique_id="mine").outcome == "duplicate"
        with second_connection() as other:
            unique.add(
                other.cursor(),
                [UniqueRow(77, ROW._replace(queue="default", handler=""), "u", None, NOTHING)],
            )
        with pytest.raises(OperationalError) as caught:
            broadcast("a.b", unique_id="u")
        assert caught.value.__cause__.sqlstate == "40001"  # type: ignore[union-attr]
        assert broadcast("a.b", unique_id="other").outcome == "added"
    assert QueuedMessage.objects.count() == 3


STATEMENTS: dict[str, Callable[[Cursor], object]] = {
    "read_states": lambda cursor: unique.read_states(cursor, [ID]),
    "add": lambda cursor: unique.add(cursor, [new(101)]),
    "replace": lambda cursor: change_waiting.replace(cursor, [(new(101), True)]),
    "move": lambda cursor: change_waiting.move(cursor, [new(101)]),
    "put aside": lambda cursor: put_aside(cursor, [new(0)]),
    "end": lambda cursor: free_unique_ids.end(cursor, [EndedMessage(101, ID, True)]),
    "promote": lambda cursor: promotion.promote_put_aside(cursor, [ID]),
    "lock": lambda cursor: promotion.lock(cursor, [ID]),
    "reacquire": lambda cursor: free_unique_ids.reacquire(cursor, ids=[101]),
    "prune quiet": lambda cursor: pruning.prune(cursor, "quiet ids", limit=10),
    "count": lambda cursor: backlog.count_unblocked(cursor, queue="mail", limit=10),
}


class Explainer:
    """A cursor that explains statements instead of executing them."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self.plan = ""

    def execute(self, statement: str, params: Any) -> None:
        self._cursor.execute("explain " + statement, params)
        self.plan += "\n".join(line for (line,) in self._cursor.fetchall())
        self._cursor.execute(statement, params)

    def fetchall(self) -> list[Any]:
        return self._cursor.fetchall()

    def fetchone(self) -> Any:
        return self._cursor.fetchone()


@pytest.mark.parametrize("statement", STATEMENTS.values(), ids=STATEMENTS)
def test_no_statement_reads_a_whole_table(
    cursor: Cursor, statement: Callable[[Any], object]
) -> None:
    cursor.execute("set enable_seqscan = off")
    explainer = Explainer(cursor)
    statement(explainer)
    assert explainer.plan
    assert not re.findall(r"Seq Scan on django_mq\w+", explainer.plan)


def test_the_limit_of_waits_is_put_back(cursor: Cursor) -> None:
    for limit, maximum, within in [
        ("0", 200, "200ms"),
        ("50ms", 200, "50ms"),
        ("7s", 200, "200ms"),
    ]:
        with cursor.connection.transaction():
            cursor.execute("select set_config('lock_timeout', %s, true)", [limit])
            before = limits.limit_waits(cursor, most_ms=maximum)
            assert cursor.execute("show lock_timeout").fetchone() == (within,)
            limits.restore_waits(cursor, before)
            assert cursor.execute("show lock_timeout").fetchone() == (limit,)
