"""The exact reason why a message of a line does not run now."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models.functions import Now

from django_mq import Reject, broadcast, handler, queues, testing
from django_mq.models import QueuedMessage, UniqueKey
from tests.queues.between import ending_after
from tests.queues.explained import why
from tests.rows import add, beat, decide

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_handlers")]


def test_behind_its_key():
    """Guarantee 8; a follower that no worker has met yet, so blocked_by is empty."""
    beat()
    head = add(key="k", leased=60)
    add(key="k", handler="other", leased=60), add("other", key="k", leased=60)
    answer = why(add(key="k"), "processable", f"but waits behind message {head.pk} of its key k")
    assert "which is leased until" in answer.text
    assert answer.behind == head.pk
    answer = why(add(key="k"), "processable", "2 others of its key k; the first, message")
    assert f"message {head.pk}, is leased until" in answer.text


POSITIONS = "with asked as materialized"


def test_the_first_of_its_key_ends_while_it_is_read():
    beat()
    first, second = add(key="k", leased=60), add(key="k", after=60)
    add(key="other"), add("other", key="k")
    message = add(key="k", blocked_by=first.pk)
    with ending_after(POSITIONS, first):
        answer = why(message, "blocked", f"the first, message {second.pk}, is delayed until")
    assert answer.behind == second.pk


def test_the_first_of_its_ordered_queue_ends_while_it_is_read(settings):
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"ordered": True}}}
    beat()
    first, second, message = (add(ordered=True, after=at) for at in (60, 60, -1))
    with ending_after(POSITIONS, first):
        answer = why(message, "processable", f"the first, message {second.pk}, is delayed until")
    assert answer.behind == second.pk


def test_all_before_it_end_while_they_are_read():
    beat()
    first, second = add(key="k", leased=60), add(key="k")
    message = add(key="k", blocked_by=first.pk)
    with ending_after(POSITIONS, first, second):
        why(message, "blocked", "waited behind 2 others of its key k, which are now gone")


def test_a_later_one_of_its_key_that_a_worker_has():
    """An earlier id that became visible later: no row of a key is claimed beside another claim."""
    beat()
    first, later = add(key="k"), add(key="k", leased=60)
    assert why(first, "processable", f"behind message {later.pk} of its key k").behind == later.pk


HEADS = [
    ({"after": 60}, "which is delayed until"),
    ({"after": 60, "attempts": 2}, "which failed attempt 2 of 20 and runs again after"),
    ({"dead": -5, "dead_reason": "exhausted"}, "which has been dead since"),
    (
        {"dead": -5, "dead_reason": "card 4111"},
        "Requeue or discard that message so that the others",
    ),
    ({"leased": 60}, "by worker worker (host host, process 7)"),
    ({"held": -5, "handler": "gone"}, "no handler named gone is registered here"),
    ({"expires": -5}, "which expired at"),
    ({}, "which has been due since"),
]


@pytest.mark.parametrize(("columns", "text"), HEADS)
@pytest.mark.parametrize("parked", [True, False])
def test_reason_of_the_head_is_given(columns, text, parked):
    beat()
    handler = columns.get("handler", "")
    head = add(key="k", **columns)
    message = add(key="k", handler=handler, blocked_by=head.pk if parked else None)
    state = "blocked" if parked else "processable"
    answer = why(message, state, f"waits behind message {head.pk} of its key k, which", text)
    assert answer.behind == head.pk
    assert "4111" not in answer.text


FAILED = {"after": 60, "attempts": 2, "last_error": "ValueError: card 4111"}


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"after": 60, "last_error": "Snooze: card 4111"}, "Snooze: card 4111"),
        (FAILED, "ValueError: card 4111"),
        (FAILED | {"dead": -5, "dead_reason": "exhausted"}, "ValueError: card 4111"),
        (FAILED | {"dead": -5, "dead_reason": "card 4111 refused"}, "card 4111 refused"),
    ],
)
@pytest.mark.parametrize("parked", [True, False])
def test_the_error_of_its_head_is_the_reason(columns, error, parked):
    """S08: with the reason of the head, but not in the text that everybody may read."""
    beat()
    head = add(key="k", **columns)
    answer = queues.why(add(key="k", blocked_by=head.pk if parked else None).pk)
    assert (answer.error, "4111" in answer.text) == (error, False)


def test_its_own_error_goes_before_that_of_its_head():
    add(key="k", **FAILED)
    assert queues.why(add(key="k", after=60).pk).error == "ValueError: card 4111"
    own = add(key="k", after=60, last_error="Snooze: the bank is closed")
    assert queues.why(own.pk).error == "Snooze: the bank is closed"


def test_the_error_of_a_head_whose_queue_backs_off():
    decide(backoff=60, backoff_level=4)
    head = add(key="k", last_error="Snooze: the bank is closed")
    answer = why(add(key="k"), "paused", f"Then it waits behind message {head.pk} of its key k")
    assert answer.error == "Snooze: the bank is closed"


def test_parked_behind_one_that_is_gone():
    """The head is the first of the line, whatever row it was parked behind."""
    beat()
    first = add(key="k", dead=-5)
    for _ in range(3):
        last = add(key="k", blocked_by=10**9)
    answer = why(
        last, "blocked", f"waits behind 3 others of its key k; the first, message {first.pk}"
    )
    assert answer.behind == first.pk
    first.delete()
    QueuedMessage.objects.filter(blocked_by=10**9).exclude(pk=last.pk).delete()
    answer = why(
        last, "blocked", f"is now the first of its key k: message {10**9}, which blocked it"
    )
    assert "The next maintenance run of a worker frees it" in answer.text
    assert answer.behind is None


def test_a_dead_head_that_is_skipped(settings):
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"on_dead_head": "skip"}}}
    beat()
    add(key="k", dead=-5)
    message = add(key="k")
    assert why(message, "processable", "is next to be claimed").behind is None
    follower = add(key="k", blocked_by=message.pk)
    assert why(follower, "blocked", f"behind message {message.pk} of").behind == message.pk


@pytest.mark.parametrize("columns", [{"after": 60}, {"after": 60, "attempts": 1}, {"held": -5}])
def test_its_own_reason_goes_first(columns):
    head = add(key="k", dead=-5)
    message = add(key="k", **columns)
    answer = queues.why(message.pk)
    assert answer.state == message.state.value
    assert (
        f". Then it waits behind message {head.pk} of its key k, which has been dead" in answer.text
    )


@pytest.mark.django_db(transaction=True)
def test_a_dead_head_whose_unique_id_is_taken_cannot_be_requeued(settings, no_handlers):
    """A dead letter holds no unique id, and a message with the same id and key waits behind it."""
    settings.DJANGO_MQ = {"REQUIRE_ATOMIC": False}

    @handler("shop.#", queue="mail", name="h")
    def reject(delivery):
        raise Reject("no")

    same = {"key": "k", "unique_id": "u"}
    head = QueuedMessage.objects.get(pk=broadcast("shop.orders.placed", **same).ids[0])
    testing.drain(errors="keep")
    follower = QueuedMessage.objects.get(pk=broadcast("shop.orders.placed", **same).ids[0])
    taken = f"it cannot be requeued while message {follower.pk} has its unique id."
    why(head, "dead", f"Discard it: {taken}")
    why(follower, "processable", f"Discard that message so that the others proceed: {taken}")
    assert len(queues.requeue([head.pk]).ids) == 0
    queues.cancel([follower.pk])
    why(head, "dead", "Requeue it to run it again, or discard it")
    assert len(queues.requeue([head.pk]).ids) == 1


class TestOrdered:
    """PMQ-42, PMQ-44: the line of an ordered queue, and its owner."""

    @pytest.fixture(autouse=True)
    def _ordered(self, settings):
        settings.DJANGO_MQ = {"QUEUES": {"mail": {"ordered": True}}}
        beat("first", host="web1", pid=5)

    def own(self, worker="first", seconds=60):
        until = Now() + timedelta(seconds=seconds)
        decide(owner=worker, owned_until=until)

    def test_its_owner_takes_it(self):
        self.own()
        why(
            add(ordered=True),
            "processable",
            "next to be claimed by worker first (host web1, process 5)",
        )

    def test_ordered_queue_without_an_owner(self):
        why(add(ordered=True), "processable", "but no worker owns its ordered queue right now")
        self.own(seconds=-1)
        why(
            add(ordered=True, priority=5),
            "processable",
            "which has been due since",
            "no worker owns",
        )

    def test_its_owner_is_silent(self):
        self.own("frozen")
        why(add(ordered=True), "processable", "but worker frozen owns its ordered queue until")

    def test_it_is_not_in_line_yet(self):
        self.own()
        why(add(), "processable", "but is not in line yet: worker first")

    @pytest.mark.parametrize("columns", [{"after": 60, "attempts": 1}, {"dead": -5}])
    def test_behind_its_head(self, columns):
        self.own()
        head = add(ordered=True, **columns)
        add(ordered=True, key="k")
        message = add(ordered=True, priority=100)
        text = f"but waits behind 2 others of its ordered queue; the first, message {head.pk}, "
        assert why(message, "processable", text).behind == head.pk

    def test_message_behind_one_in_flight(self):
        flying = add(leased=60)
        message = add(ordered=True)
        assert why(message, "processable", "of its ordered queue").behind == flying.pk


def test_a_unique_id_is_taken_by_a_live_message_of_its_queue_handler_and_type_alone():
    same = {"queue": "mail", "handler": "h", "type": "shop.orders.placed"}
    dead = add(**same, dead=-1, unique_id="u")
    # The last one is its own: the chores free the id of a dead letter if its end could not.
    for column in ({"queue": "other"}, {"handler": "i"}, {"type": "shop.orders.paid"}, {}):
        holder = add(**same | column).pk if column else dead.pk
        UniqueKey.objects.create(**same | column, unique_id="u", message_id=holder)
    why(dead, "dead", "Requeue it to run it again, or discard it")
