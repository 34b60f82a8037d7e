"""Actions of operators touch only eligible messages, and never take long."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection

from django_mq import queues
from django_mq.models import QueuedMessage, Result
from django_mq.queues import Changed
from django_mq.queues import actions as acting
from tests.rows import add, beat

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
    """Guarantee 13: conditional, never a message in flight, and skipped ones are reported."""

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


def test_run_now_keeps_the_place_of_due_messages():
    message = add(after=-500)
    queues.run_now([message.pk])
    assert QueuedMessage.objects.get().processable_after == message.processable_after


@pytest.mark.parametrize(
    ("attempts", "maximum", "asked", "then"), [(20, 20, 3, 23), (5, 20, 3, 20), (18, 20, 3, 21)]
)
def test_requeue_raises_max_attempts_and_never_lowers_anything(attempts, maximum, asked, then):
    message = add(dead=-1, attempts=attempts, max_attempts=maximum)
    assert queues.requeue(message.pk, attempts=asked).ids == (message.pk,)
    message.refresh_from_db()
    assert (message.attempts, message.max_attempts) == (attempts, then)


def test_requeued_message_does_not_die_of_the_same_cause():
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


def test_dry_run_of_ids_returns_the_dead_ones():
    dead, waiting = add(dead=-1), add()
    assert queues.requeue([dead.pk, waiting.pk, 10**9], dry_run=True) == Changed((dead.pk,), 2)
    assert dead.state == "dead"


def test_purge_removes_dead_letters_only():
    """CAR-39; S34: only terminal rows unless told otherwise."""
    ids = add_every()
    other = add("other", dead=-1).pk
    assert queues.purge("mail") == Changed((ids["dead"],))
    assert QueuedMessage.objects.count() == len(EVERY)
    assert queues.purge() == Changed((other,))


def test_purge_of_waiting_messages_skips_those_in_flight():
    ids = add_every()
    changed = queues.purge("mail", waiting=True)
    assert set(changed.ids) == {ids[name] for name in WAITING | DEAD}
    assert changed.skipped == len(IN_FLIGHT)
    assert set(QueuedMessage.objects.values_list("pk", flat=True)) == {
        ids[name] for name in IN_FLIGHT
    }


def test_purge_of_older_messages():
    old, new = add(dead=-100), add(dead=-10)
    add(created=-100)
    assert queues.purge(older_than=50, dry_run=True) == Changed((old.pk,))
    assert len(queues.purge(older_than=timedelta(seconds=50), waiting=True).ids) == 2
    assert QueuedMessage.objects.get() == new


def test_the_last_of_several_with_one_unique_id_is_requeued_whatever_the_chunks(monkeypatch):
    monkeypatch.setattr(acting, "CHUNK", 2)
    first = add(dead=-100, unique_id="u")
    others = [add(dead=-50, unique_id=f"u{n}") for n in range(2)] + [add(dead=-40)]
    last = add(dead=-10, unique_id="u")
    elsewhere = add(dead=-10, unique_id="u", handler="other")
    requeued = queues.requeue(queue="mail")
    alive = {each.pk for each in (*others, last, elsewhere)}
    assert (set(requeued.ids), requeued.skipped) == (alive, 1)
    assert list(QueuedMessage.objects.dead()) == [first]


def test_letters_of_a_key_stay_in_order_over_the_chunks(monkeypatch):
    """Each chunk is a transaction, after which a worker may claim."""
    monkeypatch.setattr(acting, "CHUNK", 1)
    ids = tuple(add(dead=-9 + n, key="k", unique_id=f"u{n}").pk for n in range(3))
    assert queues.requeue(queue="mail").ids == ids


def test_chunks(monkeypatch, transactional_db):
    """Each chunk is a transaction, so the chunks before an error stay done."""
    monkeypatch.setattr(acting, "CHUNK", 2)
    ids = [add(dead=-1).pk for _ in range(5)]
    sizes = []
    remove = acting.CHANGES["discard"]

    def spy(cursor, chunk):
        sizes.append(len(chunk))
        if len(sizes) == 3:
            raise RuntimeError
        return remove(cursor, chunk)

    monkeypatch.setitem(acting.CHANGES, "discard", spy)
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


@pytest.mark.parametrize("ids", [["7"], [0], [2**63], [None], True, [True], 1.5, [[1]]])
def test_invalid_ids_are_refused(ids):
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


def test_message_running_past_its_lease_is_in_flight():
    message = add(leased=-1)
    beat(running=[message.pk])
    assert queues.cancel(message.pk) == Changed((), 1)


def test_as_many_attempts_as_can_be_do_not_stop_a_requeue():
    """Guarantee 24: no number overflows, and the others are requeued with it."""
    many = add(dead=-1, attempts=2**31 - 2)
    one = add(dead=-1, attempts=20)
    assert queues.requeue([many.pk, one.pk], attempts=1000).ids == (many.pk, one.pk)
    found = dict(QueuedMessage.objects.values_list("pk", "max_attempts"))
    assert found == {many.pk: 2**31 - 2, one.pk: 1020}


def test_a_removal_stores_no_answer_to_a_message_that_is_no_request():
    assert queues.cancel(add().pk)
    assert queues.discard(add(dead=-5).pk)
    assert not Result.objects.exists()
