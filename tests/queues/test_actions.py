"""What operators do: only to what is theirs to touch, and never for long."""

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
from django_mq.outbox import notify as bell
from django_mq.queues import Changed
from django_mq.queues import actions as acting
from django_mq.store import operators as operate
from tests.rows import add, beat, decide

pytestmark = pytest.mark.django_db

WAITING = {
    "processable": {},
    "delayed": {"after": 60},
    "retrying": {"after": 60, "attempts": 2},
    "held": {"held": -5},
    "blocked": {"blocked_by": 1, "key": "k"},
    "expired": {"expires": -1},
}
IN_FLIGHT = {"leased": {"leased": 60}, "lapsed": {"leased": -1}}
DEAD = {"dead": {"dead": -1, "dead_reason": "exhausted", "attempts": 20}}
EVERY = WAITING | IN_FLIGHT | DEAD


@pytest.fixture
def rings(monkeypatch):
    """The connections that were asked to ring after commit."""
    asked = []
    monkeypatch.setattr(bell, "ring_after_commit", asked.append)
    return asked


def add_every():
    return {name: add(**columns).pk for name, columns in EVERY.items()}


def check(action, states):
    """Assert that `action` changes exactly the messages in `states`, and says so."""
    ids = add_every()
    before = dict(QueuedMessage.objects.values_list("pk", "leased_until"))
    changed = action(ids.values())
    assert changed == Changed(tuple(sorted(ids[s] for s in states)), len(EVERY) - len(states))
    for state in IN_FLIGHT:
        assert QueuedMessage.objects.get(pk=ids[state]).leased_until == before[ids[state]]
    return {name: QueuedMessage.objects.filter(pk=id).first() for name, id in ids.items()}


class TestByState:
    """Guarantee 13: conditional, never a message in flight, the skipped are reported."""

    def test_cancel(self):
        rows = check(queues.cancel, WAITING)
        assert {name for name in rows if rows[name] is None} == set(WAITING)

    def test_discard(self):
        rows = check(queues.discard, DEAD)
        assert {name for name in rows if rows[name] is None} == set(DEAD)

    def test_run_now(self, rings):
        rows = check(queues.run_now, WAITING.keys() - {"blocked", "expired"})
        for name in ("processable", "delayed", "retrying", "held"):
            assert rows[name].state == "processable"
        assert rows["retrying"].attempts == 2
        assert rows["blocked"].state == "blocked"
        assert rings == [connection]

    def test_requeue(self, rings):
        rows = check(queues.requeue, DEAD)
        assert rows["dead"].state == "processable"
        assert (rows["dead"].attempts, rows["dead"].max_attempts) == (20, 21)
        assert (rows["dead"].dead_at, rows["dead"].dead_reason) == (None, "")
        assert rings == [connection]


def test_run_now_keeps_the_place_of_what_is_due():
    message = add(after=-500)
    queues.run_now([message.pk])
    assert QueuedMessage.objects.get().processable_after == message.processable_after


@pytest.mark.parametrize(
    ("attempts", "most", "asked", "then"), [(20, 20, 3, 23), (5, 20, 3, 20), (18, 20, 3, 21)]
)
def test_requeue_raises_max_attempts_and_never_lowers_anything(attempts, most, asked, then):
    message = add(dead=-1, attempts=attempts, max_attempts=most)
    assert queues.requeue(message.pk, attempts=asked).ids == (message.pk,)
    message.refresh_from_db()
    assert (message.attempts, message.max_attempts) == (attempts, then)


def test_a_requeued_letter_does_not_die_of_what_it_died_of():
    expired, held, later = (
        add(dead=-1, expires=-9, dead_reason="expired"),
        add(dead=-1, held=-90000),
        add(dead=-1, expires=900, blocked_by=1, key="k"),
    )
    assert len(queues.requeue([expired.pk, held.pk, later.pk]).ids) == 3
    assert [m.state for m in QueuedMessage.objects.with_state()] == ["processable"] * 3
    later.refresh_from_db()
    assert later.expires_at is not None


def test_requeue_by_queue_and_type_longest_dead_first():
    new, old = add(dead=-1), add(dead=-100)
    add("other", dead=-500)
    add(dead=-500, type="other")
    chosen = {"queue": "mail", "type": "shop.orders.placed"}
    assert queues.requeue(**chosen, dry_run=True) == Changed((old.pk, new.pk))
    assert queues.requeue(**chosen, limit=1) == Changed((old.pk,))
    assert queues.requeue(**chosen) == Changed((new.pk,))
    assert len(queues.requeue().ids) == 2


def test_a_dry_run_of_ids_says_which_are_dead():
    dead, waiting = add(dead=-1), add()
    assert queues.requeue([dead.pk, waiting.pk, 10**9], dry_run=True) == Changed((dead.pk,), 2)
    assert dead.state == "dead"


def test_purge_removes_dead_letters_only():
    """CAR-39; S34: terminal rows only unless told otherwise."""
    ids = add_every()
    other = add("other", dead=-1).pk
    assert queues.purge("mail") == Changed((ids["dead"],))
    assert QueuedMessage.objects.count() == len(EVERY)
    assert queues.purge() == Changed((other,))


def test_purge_of_what_waits_leaves_what_is_in_flight():
    ids = add_every()
    changed = queues.purge("mail", waiting=True)
    assert set(changed.ids) == {ids[name] for name in WAITING | DEAD}
    assert changed.skipped == len(IN_FLIGHT)
    assert set(QueuedMessage.objects.values_list("pk", flat=True)) == {
        ids[name] for name in IN_FLIGHT
    }


def test_purge_of_what_is_older():
    old, new = add(dead=-100), add(dead=-10)
    add(created=-100)
    assert queues.purge(older_than=50, dry_run=True) == Changed((old.pk,))
    assert len(queues.purge(older_than=timedelta(seconds=50), waiting=True).ids) == 2
    assert QueuedMessage.objects.get() == new


def test_chunks(monkeypatch, transactional_db):
    """A chunk is a transaction, so what was done before an error stays done."""
    monkeypatch.setattr(acting, "CHUNK", 2)
    ids = [add(dead=-1).pk for _ in range(5)]
    sizes = []
    remove = acting._remove

    def spy(cursor, chunk, **flags):
        sizes.append(len(chunk))
        if len(sizes) == 3:
            raise RuntimeError
        return remove(cursor, chunk, **flags)

    monkeypatch.setattr(acting, "_remove", spy)
    with pytest.raises(RuntimeError):
        queues.discard(ids)
    assert sizes == [2, 2, 1]
    assert QueuedMessage.objects.get().pk == ids[-1]


def test_a_removed_head_frees_the_next_of_its_key():
    head, second, third = add(key="k"), add(key="k"), add(key="k")
    elsewhere = add(key="k", handler="other", blocked_by=head.pk)
    QueuedMessage.objects.filter(pk__in=[second.pk, third.pk]).update(blocked_by=head.pk)
    queues.cancel([head.pk])
    for message in (second, third, elsewhere):
        message.refresh_from_db()
    assert (second.blocked_by, third.blocked_by) == (None, head.pk)
    assert elsewhere.blocked_by == head.pk


def test_a_dead_letter_of_the_key_is_not_freed_in_its_stead():
    add(key="k", dead=-1)
    head = add(key="k")
    following = add(key="k", blocked_by=head.pk)
    queues.cancel([head.pk])
    following.refresh_from_db()
    assert following.blocked_by is None


class TestBesideOthers:
    def test_what_is_locked_is_skipped_at_once(self, lock):
        """Guarantee 13: a claim that is not committed, a handler that runs."""
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

    def test_a_table_lock_is_waited_for_once_and_briefly(self, other, monkeypatch):
        monkeypatch.setattr(acting, "CHUNK", 1)
        ids = [add(dead=-1).pk for _ in range(3)]
        tries = []
        remove = acting._remove
        monkeypatch.setattr(
            acting, "_remove", lambda *a, **flags: tries.append(a) or remove(*a, **flags)
        )
        other.execute("lock table django_mq_queuedmessage in exclusive mode")
        with connection.cursor() as cursor:
            cursor.execute("set lock_timeout = '20ms'")
        try:
            assert queues.discard(ids) == Changed((), 3)
            assert len(tries) == 1
            other.execute("insert into django_mq_queuestate (queue) values ('mail')")
            with pytest.raises(OperationalError, match="lock timeout"):
                queues.pause("mail")
        finally:
            with connection.cursor() as cursor:
                cursor.execute("reset lock_timeout")

    def test_at_any_isolation_level(self, other, transactional_db, monkeypatch):
        """Guarantee 17: what another commits meanwhile is no serialization failure."""
        message = add(dead=-1)
        limit_waits = operate.limit_waits

        def then_somebody_writes(cursor):
            before = limit_waits(cursor)
            other.execute("update django_mq_queuedmessage set suspect = true")
            other.connection.commit()
            return before

        level = IsolationLevel.REPEATABLE_READ
        monkeypatch.setitem(connection.settings_dict["OPTIONS"], "isolation_level", level)
        monkeypatch.setattr(operate, "limit_waits", then_somebody_writes)
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
        remove = acting._remove

        def spy(cursor, chunk, **flags):
            cursor.execute("show lock_timeout")
            seen.append(cursor.fetchone()[0])
            return remove(cursor, chunk, **flags)

        monkeypatch.setattr(acting, "_remove", spy)
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
    def test_what_is_no_end(self, until):
        with pytest.raises(ValueError):  # noqa: PT011
            queues.pause("mail", until=until)
        assert not QueueState.objects.exists()

    @pytest.mark.parametrize("action", [queues.pause, queues.resume, queues.purge])
    def test_a_bad_name(self, action):
        with pytest.raises(InvalidName):
            action("no such name")


def test_nobody_is_woken_where_workers_poll(settings, rings):
    settings.DJANGO_MQ = {"WAKEUP": "poll"}
    assert queues.requeue(add(dead=-1).pk)
    assert rings == []


@pytest.mark.parametrize("ids", [["7"], [0], [2**63], [None], True, [True], 1.5, [[1]]])
def test_what_is_no_id(ids):
    for action in (queues.cancel, queues.discard, queues.run_now, queues.requeue):
        with pytest.raises(ValueError, match="is not the id"):
            action(ids)


@pytest.mark.parametrize(
    "arguments",
    [
        {"ids": [1], "queue": "mail"},
        {"ids": [1], "limit": 5},
        {"attempts": 0},
        {"attempts": 2**31},
        {"attempts": True},
        {"limit": 0},
        {"limit": True},
        {"limit": 2.5},
        {"limit": "5"},
        {"limit": 2**63},
        {"type": "no such type"},
    ],
)
def test_bad_arguments_of_requeue(arguments):
    with pytest.raises(ValueError):  # noqa: PT011
        queues.requeue(**arguments)


def test_an_id_twice_counts_once():
    message = add()
    assert queues.cancel([message.pk, message.pk]) == Changed((message.pk,), 0)


def test_the_log_keeps_a_trace(caplog):
    """Guarantee 14: a row that an operator removed is named."""
    message = add(dead=-1, payload={"secret": "canary"})
    with caplog.at_level(logging.INFO, logger="django_mq"):
        queues.discard([message.pk, 10**9])
    [record] = caplog.records
    assert record.event == "messages_discarded"
    assert record.message_ids == (message.pk,)
    assert str(message.pk) in record.getMessage()
    assert "canary" not in record.getMessage()


def test_what_runs_past_its_lease_is_in_flight():
    message = add(leased=-1)
    beat(running=[message.pk])
    assert queues.cancel(message.pk) == Changed((), 1)


def test_as_many_attempts_as_can_be_do_not_stop_a_requeue():
    """Guarantee 24: no number overflows, and the others come back with it."""
    many = add(dead=-1, attempts=2**31 - 2)
    one = add(dead=-1, attempts=20)
    assert queues.requeue([many.pk, one.pk], attempts=1000).ids == (many.pk, one.pk)
    found = dict(QueuedMessage.objects.values_list("pk", "max_attempts"))
    assert found == {many.pk: 2**31 - 2, one.pk: 1020}
