"""The state of a message: every case, its precedence, and one definition for all callers."""

from __future__ import annotations

from typing import Any

import pytest

from django_mq.models import QueuedMessage
from django_mq.states import MessageState
from tests.pages_read import pages_read
from tests.rows import add, beat, decide, insert_all

pytestmark = pytest.mark.django_db

# The conditions of each state, the strongest state first.
SIGNS: dict[str, dict[str, Any]] = {
    "dead": {"dead": -1},
    "running": {"leased": -1},
    "leased": {"leased": 30},
    "blocked": {"blocked_by": 1},
    "held": {"held": -1},
    "expired": {"expires": -1},
    "paused": {"queue": "paused"},
    "retrying": {"attempts": 1, "after": 60},
    "delayed": {"after": 60},
    "processable": {},
}


def row_with(states: list[str]) -> QueuedMessage:
    """Insert a row on which all of `states` hold, and a heartbeat of a worker that runs it."""
    signs: dict[str, Any] = {}
    for state in reversed(states):
        signs |= SIGNS[state]
    if "dead" in states:
        signs.pop("leased", None)  # a CHECK: nothing dead is leased
    message = add(**signs)
    beat(running=[message.pk, message.pk + 1] if "running" in states else [])
    return message


@pytest.fixture(autouse=True)
def _paused_queue():
    decide("paused", paused=-1)


def test_signs_are_all_states_in_their_order():
    assert list(SIGNS) == [state.value for state in MessageState]


@pytest.mark.parametrize("state", SIGNS)
def test_each_state_by_itself(state):
    message = row_with([state])
    assert message.state == state
    assert QueuedMessage.objects.with_state().get().state == state
    assert QueuedMessage.objects.in_state(state).get() == message
    others = [other for other in SIGNS if other != state]
    assert not QueuedMessage.objects.in_state(*others).exists()


@pytest.mark.parametrize("strongest", range(len(SIGNS)), ids=list(SIGNS))
def test_the_first_of_several_counts(strongest):
    """CAR-3: precedence; and each weaker state may hold as well."""
    states = list(SIGNS)[strongest:]
    assert row_with(states).state == states[0]


@pytest.mark.parametrize(
    ("weaker", "columns"),
    [
        ("processable", {"leased": -1}),
        ("processable", {"after": -1, "attempts": 3}),
        ("processable", {"expires": 60}),
        ("retrying", {"leased": -1, "attempts": 1, "after": 60}),
    ],
)
def test_past_and_future_times_do_not_count(weaker, columns):
    """CAR-2: an expired lock or backoff reads as queued, with no sweep needed."""
    assert add(**columns).state == weaker


@pytest.mark.parametrize(
    ("decided", "state"),
    [
        ({"paused": -5}, "paused"),
        ({"paused": -5, "until": 60}, "paused"),
        ({"paused": -5, "until": -1}, "processable"),
        ({"backoff": 60, "backoff_level": 3}, "paused"),
        ({"backoff": -1, "backoff_level": 3}, "processable"),
        ({}, "processable"),
    ],
)
def test_a_queue_is_paused_until_its_end_or_while_it_backs_off(decided, state):
    decide("mail", **decided)
    assert add("mail").state == state


def test_a_pause_is_of_one_queue():
    assert add("paused").state == "paused"
    assert add("mail").state == "processable"


@pytest.mark.parametrize(
    ("seen", "state"), [(-1, "running"), (-29, "running"), (-31, "processable")]
)
def test_a_silent_worker_runs_nothing(seen, state):
    """A lapsed lease is running only while a live worker lists it."""
    message = add(leased=-5)
    beat(running=[message.pk], seen=seen)
    assert message.state == state


def test_a_list_names_whole_ids():
    message = add(leased=30)
    beat(running=[int(f"{message.pk}0"), int(f"1{message.pk}")])
    assert message.state == "leased"


def test_an_unclaimed_message_is_never_running():
    """A heartbeat may be older than the row: a message released since then does not run."""
    message = add()
    beat(running=[message.pk])
    assert message.state == "processable"


def test_state_is_read_again_unless_annotated():
    message = add()
    annotated = QueuedMessage.objects.with_state().get()
    QueuedMessage.objects.update(blocked_by=1)
    assert message.state == "blocked"
    assert annotated.state == "processable"


def test_a_message_that_is_gone_has_no_state():
    """CAR-1, CAR-3: no content, no state."""
    message = add()
    QueuedMessage.objects.all().delete()
    with pytest.raises(QueuedMessage.DoesNotExist):
        message.state  # noqa: B018


def test_states_can_be_counted_and_ordered():
    for columns in ({}, {}, {"after": 60}, {"dead": -1}):
        add(**columns)
    found = QueuedMessage.objects.with_state().values_list("state", flat=True)
    assert sorted(found) == ["dead", "delayed", "processable", "processable"]
    assert QueuedMessage.objects.in_state("dead", "delayed").count() == 2


@pytest.mark.parametrize(
    ("name", "advice"), [("ded", ": did you mean 'dead'?"), ("x" * 9, "."), (["dead"], ".")]
)
def test_a_state_that_does_not_exist_is_refused(name: Any, advice: str) -> None:
    with pytest.raises(ValueError, match="no state is named") as refused:
        QueuedMessage.objects.in_state("dead", name)
    assert str(refused.value) == (
        f"no state is named {name!r}{advice} The states are {', '.join(SIGNS)}"
    )


def test_the_workers_are_read_once_for_all_messages():
    """Looking for each leased message in each heartbeat took half a second for 20,000."""

    def rows(leased: int) -> int:
        insert_all({"leased": 60} for _ in range(leased))
        with pages_read() as read:
            assert set(QueuedMessage.objects.in_state("running")) == {running}
        return read.rows

    running = add(leased=60)
    for n in range(20):
        beat(f"worker{n}", running=[running.pk, "x", None] if n else [])
    few = rows(20)
    assert rows(180) < few + 180 * 3
