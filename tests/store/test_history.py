"""The history's table: the ack that fills it, its days, and their deletion."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from django_mq.conf import get_settings
from django_mq.models import HandledMessage, QueuedMessage
from django_mq.store import history, history_days
from django_mq.worker import retention
from tests.database import second_connection, until_blocked
from tests.roles import acting_as, make_role, skip_unless_able
from tests.rows import add

pytestmark = pytest.mark.django_db

DAY = timedelta(days=1)


def handled(
    *rows: QueuedMessage, keep: float = 60.0, whole: bool = False
) -> list[history.HandledDelivery]:
    return [history.HandledDelivery((row.pk, 1, "worker:1"), 0.5, keep, 2, whole) for row in rows]


def ack(rows: list[history.HandledDelivery]) -> set[int]:
    with connection.cursor() as cursor:
        return history.ack(cursor, rows)


def keep(id: int, ended: datetime, **given: Any) -> HandledMessage:
    given = {"queue": "mail", "type": "t", "keep_until": ended + DAY, **given}
    return HandledMessage.objects.create(id=id, ended_at=ended, **given)


def day_of(id: int) -> str:
    """Return the partition that has row `id`."""
    with connection.cursor() as cursor:
        cursor.execute(
            "select tableoid::regclass::text from django_mq_handledmessage where id = %s", [id]
        )
        return str(cursor.fetchone()[0]).removeprefix(history_days.PREFIX)


def days() -> list[date]:
    with connection.cursor() as cursor:
        return history_days.days(cursor).days


def create(*wanted: date) -> list[bool]:
    with connection.cursor() as cursor:
        return [history_days.create_day(cursor, each) for each in wanted]


def maintain_days() -> None:
    with connection.cursor() as cursor:
        at = retention.maintain_days(cursor, get_settings(), None)
        while at is not None:
            at = retention.maintain_days(cursor, get_settings(), at)


def test_ack_moves_only_messages_that_are_still_ours() -> None:
    ours, others = (add(leased=30, attempts=n) for n in (1, 2))
    assert ack(handled(ours, others)) == {ours.pk}
    assert HandledMessage.objects.get().pk == ours.pk
    assert QueuedMessage.objects.get().pk == others.pk


@pytest.mark.parametrize(
    ("metadata", "chain", "cause"),
    [
        ({}, None, None),
        (["mq.causation_id"], None, None),
        ("mq.causation_id", None, None),
        (7, None, None),
        ({"mq.causation_id": "17", "mq.correlation_id": "x" * 500}, "x" * 128, 17),
        ({"mq.causation_id": 17, "mq.correlation_id": 9}, "9", 17),
        ({"mq.causation_id": "9" * 30, "mq.correlation_id": {"a": 1}}, '{"a": 1}', None),
        ({"mq.causation_id": "-1", "mq.correlation_id": None}, None, None),
    ],
)
def test_odd_metadata_refuses_no_settle(metadata: Any, chain: Any, cause: Any) -> None:
    row = add(leased=30, attempts=1, metadata=metadata, claimed_by="worker:1")
    assert ack(handled(row)) == {row.pk}
    found = HandledMessage.objects.get()
    assert (found.correlation_id, found.causation_id, found.worker) == (chain, cause, "worker")


def test_an_odd_row_refuses_no_settle() -> None:
    row = add(leased=30, attempts=1, handler="", key="ä" * 128, priority=-100, after=-9e8)
    QueuedMessage.objects.filter(pk=row.pk).update(claimed_by="x" * 64)
    found = history.HandledDelivery((row.pk, 1, "x" * 64), 9e8, 3e9, 2**31 - 1, True)
    assert ack([found]) == {row.pk}
    assert HandledMessage.objects.get().worker == "x" * 64


def test_a_day_without_a_partition_takes_rows_all_the_same() -> None:
    """Midnight passes without a partition for the day: settles and the next day continue."""
    today = datetime(2030, 5, 5, tzinfo=UTC)
    assert create(today.date()) == [True]
    last, first = today + DAY - timedelta(microseconds=1), today + DAY
    keep(1, last)
    keep(2, first)
    assert (day_of(1), day_of(2)) == ("20300505", "default")
    assert create(date(2030, 5, 6)) == [False]  # it would not fit the rows in the default partition
    assert create(date(2030, 5, 7)) == [True]
    keep(3, today + 2 * DAY)
    assert day_of(3) == "20300507"
    assert HandledMessage.objects.count() == 3


def test_a_day_is_not_created_if_that_would_lock_a_large_partition_for_long(
    monkeypatch: pytest.MonkeyPatch, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Attaching it would scan the default partition while no settle can write there.

    It stays like that until somebody acts: a warning names the page that says how.
    """
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"history": 60}}}
    keep(1, datetime(2030, 5, 5, tzinfo=UTC))
    with connection.cursor() as cursor:  # rows of other tests, rolled back, are in the file as well
        cursor.execute("select pg_relation_size('django_mq_handledmessage_default')")
        size = cursor.fetchone()[0]
    monkeypatch.setattr(history_days, "MAX_SCANNED_BYTES", size - 1)
    maintain_days()
    maintain_days()
    assert days() == []
    [line] = [each for each in caplog.records if getattr(each, "event", "") == "no_history_days"]
    assert line.levelname == "WARNING"
    assert "docs/history.md" in line.getMessage()
    caplog.clear()
    monkeypatch.setattr(history_days, "MAX_SCANNED_BYTES", size)
    maintain_days()
    assert len(days()) == retention.DAYS_AHEAD + 1
    assert caplog.records == []


def test_the_time_zone_of_the_session_moves_no_day() -> None:
    with connection.cursor() as cursor:
        cursor.execute("set local timezone = 'Pacific/Auckland'")
        assert create(date(2030, 5, 5)) == [True]
    keep(1, datetime(2030, 5, 5, tzinfo=UTC))
    keep(2, datetime(2030, 5, 5, 23, 59, tzinfo=UTC))
    assert (day_of(1), day_of(2)) == ("20300505", "20300505")


def test_days_are_created_ahead_only_where_a_history_is_used(settings: Any) -> None:
    maintain_days()
    assert days() == []
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"history": 60}}}
    maintain_days()
    maintain_days()
    with connection.cursor() as cursor:
        today = history_days.days(cursor).today
    assert days() == [today + n * DAY for n in range(retention.DAYS_AHEAD + 1)]


@pytest.mark.django_db(transaction=True)
def test_a_message_that_ends_as_its_day_is_created_stops_no_other_day(settings: Any) -> None:
    """On the first day of a history the workers settle while one of them creates its partition."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"history": 60}}}
    with (
        second_connection() as settling,
        second_connection() as chore,
        ThreadPoolExecutor(1) as pool,
    ):
        today = history_days.days(chore.cursor()).today
        drop_days()
        settling.execute("begin")
        settling.execute(
            "insert into django_mq_handledmessage (id, queue, type, schema_version, handler,"
            " priority, attempts, worker, size, created_at, due_at, started_at,"
            " ended_at, keep_until) values (1, 'mail', 't', 1, 'h', 0, 1, 'w', 2, now(), now(),"
            " now(), now(), now())"
        )
        creating = pool.submit(retention.maintain_days, chore.cursor(), get_settings(), None)
        until_blocked(chore.info.backend_pid)  # it has seen no row of today
        settling.execute("commit")
        assert creating.result() is None
    assert days() == [today + n * DAY for n in range(1, retention.DAYS_AHEAD + 1)]
    assert day_of(1) == "default"
    drop_days()


def drop_days() -> None:
    with connection.cursor() as cursor:
        for day in history_days.days(cursor).days:
            cursor.execute(f"drop table {history_days.PREFIX}{day:%Y%m%d}")


@pytest.mark.parametrize("piece", [1, 2, 50])
def test_a_day_is_dropped_when_its_last_row_may_go(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the next piece, too, where one stays."""
    monkeypatch.setattr(retention, "PIECE_DAYS", piece)
    now = datetime.now(UTC)
    old, older, oldest = (now - n * DAY for n in (3, 4, 5))
    create(old.date(), older.date(), oldest.date())
    keep(1, old, keep_until=now + DAY)
    keep(2, old, keep_until=now - DAY / 2)
    keep(3, older, keep_until=now - timedelta(seconds=1))
    maintain_days()
    assert days() == [old.date()]
    assert set(HandledMessage.objects.values_list("pk", flat=True)) == {1, 2}


def test_a_day_that_is_not_over_is_not_dropped() -> None:
    """Whatever still runs may end in it, and would find no partition."""
    with connection.cursor() as cursor:
        today = history_days.days(cursor).today
        create(today)
        history_days.drop_day(cursor, today)
    assert days() == [today]


def test_a_row_that_outlives_its_time_among_others_is_deleted() -> None:
    now = datetime.now(UTC)
    late = history_days.PARTITION_GRACE + timedelta(minutes=1)
    create((now - 3 * DAY).date())
    keep(1, now - 3 * DAY, keep_until=now - late)
    keep(2, now - 3 * DAY, keep_until=now + DAY)
    keep(3, now - 2 * DAY, keep_until=now - late)  # in the default partition
    keep(4, now - 2 * DAY, keep_until=now - DAY)
    with connection.cursor() as cursor:
        assert history_days.prune(cursor, limit=1) is not None
        assert history_days.prune(cursor, limit=9) is None
    assert set(HandledMessage.objects.values_list("pk", flat=True)) == {2, 4}


def test_old_rows_are_looked_for_behind_those_deleted_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a session holds a snapshot, the index keeps entries of all rows deleted since then."""
    monkeypatch.setattr(retention, "PIECE_ROWS", 1)
    now = datetime.now(UTC)
    for id, days in ((1, 5), (2, 4), (3, 3)):
        keep(id, now - 9 * DAY, keep_until=now - days * DAY)
    with connection.cursor() as cursor:
        at = retention.prune_history(cursor, get_settings(), True)  # the position of other code
        keep(4, now - 9 * DAY, keep_until=now - 6 * DAY)
        while at is not None:
            at = retention.prune_history(cursor, get_settings(), at)
        assert set(HandledMessage.objects.values_list("pk", flat=True)) == {4}
        retention.prune_history(cursor, get_settings(), None)
    assert not HandledMessage.objects.exists()


def test_a_login_that_does_not_own_the_table_leaves_the_days_alone(settings: Any) -> None:
    """Its rows go to the default partition, and are deleted from there."""
    skip_unless_able()
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"history": 60}}}
    now = datetime.now(UTC)
    create((now - 5 * DAY).date())
    make_role(
        "mq_test_worker",
        "grant select, insert, delete on django_mq_handledmessage to {role}",
        "grant select, delete on django_mq_queuedmessage to {role}",
    )
    row = add(leased=30, attempts=1)
    keep(1, now - 5 * DAY, keep_until=now - 4 * DAY)
    with acting_as("mq_test_worker"), transaction.atomic():
        maintain_days()
        assert ack(handled(row)) == {row.pk}
        with connection.cursor() as cursor:
            assert history_days.prune(cursor, limit=1) is not None
    assert set(HandledMessage.objects.values_list("pk", flat=True)) == {row.pk}
    assert (days(), day_of(row.pk)) == ([(now - 5 * DAY).date()], "default")


def test_a_member_of_the_owner_gives_days_to_the_owner(settings: Any) -> None:
    """Whichever login created a day, each member of the owner can drop it."""
    skip_unless_able()
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"history": 60}}}
    make_role("mq_test_owner", "grant create, usage on schema public to {role}")
    make_role("mq_test_heir", "grant mq_test_owner to {role}")
    with connection.cursor() as cursor:
        for table in ("", "_default"):
            cursor.execute(f"alter table django_mq_handledmessage{table} owner to mq_test_owner")
    with acting_as("mq_test_heir"):
        maintain_days()
    with connection.cursor() as cursor:
        cursor.execute(
            "select distinct tableowner from pg_tables where tablename like %s",
            [f"{history_days.PREFIX}2%"],
        )
        assert cursor.fetchall() == [("mq_test_owner",)]


def schema_of(day: date) -> str:
    with connection.cursor() as cursor:
        cursor.execute(
            "select relnamespace::regnamespace::text from pg_class where relname = %s",
            [f"{history_days.PREFIX}{day:%Y%m%d}"],
        )
        return str(cursor.fetchone()[0])


def test_a_day_is_in_the_schema_of_the_table() -> None:
    """Also where the search path begins with another schema, such as that of a tenant.

    Otherwise the day goes with the tenant, and sessions without it on their path do not find it.
    """
    day = date(2001, 1, 1)
    with connection.cursor() as cursor:
        cursor.execute("create schema tenant; set local search_path to tenant, public")
        create(day)
        assert schema_of(day) == "public"
        cursor.execute(f"alter table {history_days.PREFIX}{day:%Y%m%d} set schema tenant")
        cursor.execute("set local search_path to public")
        history_days.drop_day(cursor, day)
    assert day not in days()
