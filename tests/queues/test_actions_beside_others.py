"""Actions of operators beside workers and in callers' transactions, and pauses."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta, timezone

import pytest
from django.db import OperationalError, connection, transaction
from django.db.models.functions import Now
from psycopg import IsolationLevel

from django_mq import queues
from django_mq.exceptions import InvalidName
from django_mq.models import QueuedMessage, QueueState
from django_mq.queues import Changed, transactions
from django_mq.queues import actions as acting
from django_mq.store import message_changes
from tests.rows import add, decide

pytestmark = pytest.mark.django_db


class TestBesideOthers:
    def test_locked_messages_are_skipped_at_once(self, lock):
        """Guarantee 13: a claim that is not committed, or a running handler."""
        rows = [add(), add(dead=-1), add(after=60)]
        free = [add(), add(dead=-1), add(after=60)]
        for row in rows:
            lock(row)
        ids = [row.pk for row in rows + free]
        assert queues.run_now(ids) == Changed((free[0].pk, free[2].pk), 4)
        assert queues.requeue(ids) == Changed((free[1].pk,), 5)
        assert queues.cancel(ids) == Changed(tuple(row.pk for row in free), 3)
        assert queues.discard(ids) == Changed((), 6)
        assert not queues.discard(ids)

    def test_a_unique_id_that_another_session_has_is_skipped(self, other):
        """The session may be a broadcast or a settle: it says nothing about other messages."""
        message = add(dead=-1, handler="h", unique_id="u")
        other.execute(
            "insert into django_mq_uniquekey (queue, handler, type, unique_id, message_id)"
            " values (%s, 'h', %s, 'u', 1)",
            [message.queue, message.type],
        )
        assert queues.requeue(message.pk) == Changed((), 1)

    def test_a_table_lock_is_waited_for_once_and_briefly(self, other, monkeypatch):
        monkeypatch.setattr(acting, "CHUNK", 1)
        ids = [add(dead=-1).pk for _ in range(3)]
        tries = []
        remove = message_changes.remove
        monkeypatch.setattr(
            message_changes, "remove", lambda *a, **flags: tries.append(a) or remove(*a, **flags)
        )
        other.execute("lock table django_mq_queuedmessage in exclusive mode")
        with connection.cursor() as cursor:
            cursor.execute("set lock_timeout = '20ms'")
        try:
            with pytest.raises(OperationalError, match="lock timeout"):
                queues.discard(ids)
            assert len(tries) == 1
            other.execute("insert into django_mq_queuestate (queue) values ('mail')")
            with pytest.raises(OperationalError, match="lock timeout"):
                queues.pause("mail")
        finally:
            with connection.cursor() as cursor:
                cursor.execute("reset lock_timeout")

    def test_changes_made_before_a_table_lock_are_reported(self, other, monkeypatch):
        monkeypatch.setattr(acting, "CHUNK", 1)
        ids = [add(dead=-1).pk for _ in range(3)]
        remove = message_changes.remove

        def remove_and_lock(*args, **flags):
            transaction.on_commit(
                lambda: other.execute("lock table django_mq_queuedmessage in share mode")
            )
            return remove(*args, **flags)

        monkeypatch.setattr(message_changes, "remove", remove_and_lock)
        assert queues.discard(ids) == Changed((ids[0],), 2)

    def test_at_any_isolation_level(self, other, transactional_db, monkeypatch):
        """Guarantee 17: concurrent commits cause no serialization failure."""
        message = add(dead=-1)
        limit_waits = transactions.limit_waits

        def then_somebody_writes(cursor):
            before = limit_waits(cursor)
            other.execute("update django_mq_queuedmessage set suspect = true")
            other.connection.commit()
            return before

        level = IsolationLevel.REPEATABLE_READ
        monkeypatch.setitem(connection.settings_dict["OPTIONS"], "isolation_level", level)
        monkeypatch.setattr(transactions, "limit_waits", then_somebody_writes)
        connection.close()
        try:
            assert queues.requeue(message.pk) == Changed((message.pk,))
        finally:
            connection.close()


class TestInTheCallersTransaction:
    def test_it_commits_and_rolls_back_with_it(self, transactional_db):
        message = add()
        with transaction.atomic():
            assert queues.cancel([message.pk])
            transaction.set_rollback(True)
        assert QueuedMessage.objects.get() == message

    @pytest.mark.parametrize(("before", "within"), [("0", "1s"), ("200ms", "200ms"), ("5s", "1s")])
    def test_the_callers_lock_timeout_is_put_back(self, monkeypatch, before, within):
        seen = []
        remove = message_changes.remove

        def spy(cursor, **flags):
            cursor.execute("show lock_timeout")
            seen.append(cursor.fetchone()[0])
            return remove(cursor, **flags)

        monkeypatch.setattr(message_changes, "remove", spy)
        with connection.cursor() as cursor:
            cursor.execute(f"set local lock_timeout = '{before}'")
            queues.cancel([add().pk])
            cursor.execute("show lock_timeout")
            assert cursor.fetchone() == (before,)
        assert seen == [within]


class TestPause:
    def test_for_good_and_back(self, rings):
        assert queues.pause("mail") is None
        assert queues.state("mail").paused
        assert rings == [connection]
        assert queues.resume("mail") is True
        assert not queues.state("mail").paused
        assert rings == [connection] * 2
        assert queues.resume("mail") is False
        assert rings == [connection] * 2

    @pytest.mark.parametrize("until", [60, 60.0, timedelta(minutes=1)])
    def test_for_a_while(self, until):
        end = queues.pause("mail", until=until)
        now = QueueState.objects.annotate(now=Now()).get().now
        assert timedelta(seconds=30) < end - now <= timedelta(seconds=60)
        assert QueueState.objects.get().paused_until == end

    def test_until_a_moment(self):
        end = datetime(2999, 1, 1, tzinfo=UTC)
        assert queues.pause("mail", until=end) == end

    def test_a_second_pause_replaces_the_first(self):
        queues.pause("mail", until=60)
        assert queues.pause("mail") is None
        assert queues.state("mail").paused

    def test_a_pause_changes_nothing_else(self):
        decide(backoff_level=3, max_in_flight=5)
        queues.pause("mail")
        queues.resume("mail")
        state = QueueState.objects.get()
        assert (state.backoff_level, state.max_in_flight) == (3, 5)

    @pytest.mark.parametrize(
        "until",
        [
            0,
            -1,
            datetime(2020, 1, 1, tzinfo=UTC),
            datetime(2999, 1, 1),
            "soon",
            1e12,
            10**400,
            timedelta.max,
            datetime.max.replace(tzinfo=timezone(timedelta(hours=-5))),
        ],
    )
    def test_invalid_end_is_refused(self, until):
        with pytest.raises(ValueError):  # noqa: PT011
            queues.pause("mail", until=until)
        assert not QueueState.objects.exists()

    @pytest.mark.parametrize("action", [queues.pause, queues.resume, queues.purge])
    def test_a_bad_name(self, action):
        with pytest.raises(InvalidName):
            action("no such name")


@pytest.mark.parametrize(("wakeup", "count"), [("poll", 0), ("notify", 1)])
def test_actions_ring_only_with_notify(settings, django_capture_on_commit_callbacks, wakeup, count):
    settings.DJANGO_MQ = {"WAKEUP": wakeup}
    with django_capture_on_commit_callbacks() as rings:
        assert queues.requeue(add(dead=-1).pk)
    assert len(rings) == count


def test_the_log_keeps_a_trace(caplog):
    """Guarantee 14: the log names a row that an operator removed."""
    message = add(dead=-1, payload={"secret": "canary"})
    with caplog.at_level(logging.INFO, logger="django_mq"):
        queues.discard([message.pk, 10**9])
    [record] = caplog.records
    assert record.event == "messages_discarded"
    assert record.message_ids == (message.pk,)
    assert str(message.pk) in record.getMessage()
    assert "canary" not in record.getMessage()


def test_the_log_names_the_first_of_many_and_counts_them_all(caplog):
    with caplog.at_level(logging.INFO, logger="django_mq"):
        acting.log_changed(
            "messages_purged", acting.Changed(tuple(range(1, 2001)), 3), alias="default"
        )
    [record] = caplog.records
    first = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"
    assert record.getMessage() == f"messages purged: 2000, skipped 3 (first ids: {first})"
    assert record.message_ids == tuple(range(1, 1001))


@pytest.mark.parametrize("error", [KeyboardInterrupt, OperationalError])
@pytest.mark.django_db(transaction=True)
def test_the_log_keeps_a_trace_of_an_action_that_was_interrupted(caplog, monkeypatch, error):
    """Guarantee 14: chunks that are committed are logged, though the next one fails."""
    monkeypatch.setattr(acting, "CHUNK", 1)
    first, second = add(dead=-1).pk, add(dead=-1).pk
    remove = acting.changes.remove

    def remove_one(cursor, ids, **options):
        if second in ids:
            raise error
        return remove(cursor, ids, **options)

    monkeypatch.setattr(acting.changes, "remove", remove_one)
    with caplog.at_level(logging.INFO, logger="django_mq"), pytest.raises(error):
        queues.purge(ids=[first, second])
    assert list(QueuedMessage.objects.values_list("pk", flat=True)) == [second]
    [record] = caplog.records
    assert (record.event, record.message_ids) == ("messages_purged", (first,))
    assert "interrupted" in record.getMessage()


def test_a_failed_action_in_the_callers_transaction_leaves_no_trace(caplog, monkeypatch):
    """Nothing of it is committed."""
    monkeypatch.setattr(acting, "CHUNK", 1)
    ids = [add(dead=-1).pk, add(dead=-1).pk]
    remove = acting.changes.remove

    def remove_one(cursor, chunk, **options):
        if ids[1] in chunk:
            raise KeyboardInterrupt
        return remove(cursor, chunk, **options)

    monkeypatch.setattr(acting.changes, "remove", remove_one)
    caplog.set_level(logging.INFO, logger="django_mq")
    with pytest.raises(KeyboardInterrupt), transaction.atomic():
        queues.purge(ids=ids)
    assert not caplog.records
    assert QueuedMessage.objects.count() == 2
