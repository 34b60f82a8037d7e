"""Ordered queues: their owner, and a frozen owner."""

from __future__ import annotations

import threading

import pytest

from django_mq.models import QueueState
from django_mq.store import ordered_queues
from django_mq.store.ordered_queues import OwnedQueue
from tests.database import second_connection, until_blocked
from tests.rows import decide, stored
from tests.store.ordered import Cursor, own

pytestmark = pytest.mark.django_db(transaction=True)


# ---- the owner


def own_while(cursor: Cursor, inserts: str) -> OwnedQueue | None:
    """Own the queue while another session `inserts` its first row, which it then commits."""
    owned: list[OwnedQueue | None] = []
    with second_connection() as other:
        other.execute("begin")
        other.execute(f"insert into django_mq_queuestate {inserts}")
        thread = threading.Thread(target=lambda: owned.append(own(cursor)))
        thread.start()
        until_blocked(cursor.connection.info.backend_pid)
        other.execute("commit")
        thread.join(30)
    return owned[0]


def test_queue_is_owned_despite_a_concurrent_first_row(cursor: Cursor) -> None:
    """The chore that warns of a deep queue does: a worker `--until-empty` would end at once."""
    owned = own_while(cursor, "(queue, warned_at) values ('line', now())")
    assert owned == OwnedQueue(None)
    with second_connection() as other:
        assert own(other.cursor(), "other") is None


def test_of_two_that_own_an_unknown_queue_at_once_the_first_has_it(cursor: Cursor) -> None:
    inserts = "(queue, owner, owned_until) values ('line', 'other', now() + interval '6 s')"
    assert own_while(cursor, inserts) is None
    assert QueueState.objects.get().owner == "other"


@pytest.mark.parametrize(("lease", "owned"), [(6.0, OwnedQueue("me")), (-1.0, None)])
def test_a_queue_whose_row_is_locked_stays_ours_until_it_lapses(
    cursor: Cursor, lease: float, owned: OwnedQueue | None
) -> None:
    own(cursor, lease=lease)
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuestate for no key update")
        assert own(cursor) == owned


def test_one_owns_a_queue(cursor: Cursor) -> None:
    """KAF-12: the second gets it once the first gives it up, and not before."""
    assert own(cursor, "a") == OwnedQueue(None)
    assert own(cursor, "b") is None
    assert own(cursor, "a") == OwnedQueue("a")
    ordered_queues.disown(cursor, worker="b")
    assert own(cursor, "b") is None
    ordered_queues.disown(cursor, worker="a")
    assert own(cursor, "b") == OwnedQueue(None)
    assert own(cursor, "a") is None


def test_owner_that_does_not_renew_loses_the_queue(cursor: Cursor) -> None:
    """KAF-9: the next owner learns the name of the last."""
    own(cursor, "a", lease=-1.0)
    assert own(cursor, "b") == OwnedQueue("a")
    state = QueueState.objects.get()
    assert (state.queue, state.owner) == ("line", "b")


def test_owning_leaves_other_decisions_alone(cursor: Cursor) -> None:
    before = decide("line", paused=-1, max_in_flight=3)
    assert own(cursor) == OwnedQueue(None)
    ordered_queues.disown(cursor, worker="me", queues=["line"])
    after = stored(before)
    assert (after.paused_at, after.max_in_flight) == (before.paused_at, 3)
    assert (after.owner, after.owned_until) == (None, None)


def test_single_queues_are_given_up(cursor: Cursor) -> None:
    for queue in ("x", "y", "z"):
        ordered_queues.own(cursor, queue=queue, worker="me", lease=6.0)
    ordered_queues.disown(cursor, worker="me", queues=["x", "y"])
    assert set(QueueState.objects.filter(owner="me").values_list("queue", flat=True)) == {"z"}
    ordered_queues.disown(cursor, worker="me", queues=[])
    assert QueueState.objects.filter(owner="me").count() == 1
    ordered_queues.disown(cursor, worker="me")
    assert QueueState.objects.filter(owner="me").count() == 0


# ---- a frozen owner
