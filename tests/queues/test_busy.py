"""What runs: the message itself, or those for which a due message waits."""

from __future__ import annotations

import re

import pytest

from django_mq import handlers, queues
from django_mq.conf.local_time import local_text
from tests.queues.explained import why
from tests.rows import add, beat, decide

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("no_handlers")]

BUSY = "; the workers that serve its queue are busy: "


def runs(worker, *seconds, queue="mail", key=None, **given):
    """Insert a worker that runs a message for each of `seconds` (None: of unknown start).

    Where the text is compared, these are whole minutes and more than an hour: a shorter time is
    told to the second, which passes on a busy machine.
    """
    claimed = {"leased": 30, "claimed_by": f"{worker}:1", "handler": "app.slow", "key": key}
    found = [add(queue, **claimed) for _ in seconds]
    ran = {str(each.pk): ran for each, ran in zip(found, seconds, strict=True) if ran is not None}
    beat(worker, **{"running": [each.pk for each in found], "ran": ran, **given})
    return [each.pk for each in found]


def test_running_messages_are_named_longest_first():
    one, two = runs("a7c1585c00000000", 7500.0, 3660.0)
    [three] = runs("b200000000000000", 7980.0, queues=["mail"])
    runs("elsewhere", 9.0, queues=["other"])
    answer = why(add(), "processable", f"and is next to be claimed{BUSY}worker b2000000 has run")
    assert answer.text.partition(BUSY)[2] == (
        f"worker b2000000 has run message {three} (app.slow) for 2 h 13 min,"
        f" worker a7c1585c has run message {one} (app.slow) for 2 h 5 min,"
        f" worker a7c1585c has run message {two} (app.slow) for 1 h 1 min."
    )
    why(add(after=-30), "processable", f"is behind 1 other message of its queue{BUSY}")


def test_no_more_than_three_are_named():
    ids = runs("a7c1585c00000000", 3900.0, 3840.0, 3780.0, 3720.0, 3660.0)
    answer = why(add(), "processable", f"{BUSY}worker a7c1585c has run message {ids[0]} ")
    assert answer.text.endswith(" for 1 h 3 min, and 2 more messages run.")


def test_workers_that_claim_nothing_do_not_count():
    runs("busy", 95.0)
    beat("quiet", quiet=True)
    beat("drains", draining=True)
    beat("gone", seen=-31)
    why(add(), "processable", f"{BUSY}worker busy has run")


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="it runs nothing"),
        pytest.param({"seconds": [95.0, 2.0]}, id="one of its messages has just begun"),
        pytest.param({"seconds": [None]}, id="it does not say since when"),
        pytest.param({"seconds": [95.0], "ran": ["odd"]}, id="it says something else"),
        pytest.param({"seconds": [95.0], "running": ["odd"]}, id="its ids are none"),
        pytest.param({"running": [-1, 2**63 - 1]}, id="its messages have ended"),
    ],
)
def test_worker_that_may_be_free_silences_the_reason(given):
    runs("busy", 95.0)
    odd = {name: value for name, value in given.items() if name != "seconds"}
    if "ran" in odd:
        odd["ran"] = {"odd": odd["ran"]}
    runs("other", *given.get("seconds", ()), **odd)
    assert "busy" not in why(add(), "processable", "is next to be claimed.").text


def test_a_message_that_ended_since_the_heartbeat_made_room():
    [id] = runs("worker", 95.0)
    beat("two", running=[id, 10**9], ran={str(id): 95.0})
    assert "busy" not in why(add(), "processable", "is next to be claimed.").text


def test_a_message_that_has_just_become_due_is_claimed_in_a_moment(settings):
    runs("busy", 95.0)
    why(add(after=-5), "processable", "is next to be claimed.")
    settings.DJANGO_MQ = {"POLL_INTERVAL": 60}
    why(add(after=-90), "processable", "is next to be claimed.")
    why(add(after=-130), "processable", f"is next to be claimed{BUSY}")


def test_other_reasons_come_first():
    runs("busy", 95.0)
    decide(max_in_flight=1)
    assert "busy" not in why(add(), "processable", "reached its limit of messages in").text


def test_suspects_run_one_after_another_however_short_they_are():
    """The last heartbeat may list one that has ended since, so their rows count."""
    beat("a7c1585c00000000", running=[10**9], ran={str(10**9): 2.0})
    claimed = {"queue": "other", "handler": "app.slow", "suspect": True}
    first = add(leased=20, claimed_by="a7c1585c00000000:4", **claimed)
    text = why(add(), "processable", "is next to be claimed").text
    assert text.endswith(
        f"{BUSY}worker a7c1585c has a suspect, beside which nothing starts: message {first.pk}"
        " (app.slow)."
    )
    add(leased=25, claimed_by="a7c1585c00000000:4", **claimed)
    [long] = runs("b200000000000000", 3660.0)
    text = why(add(), "processable", "is behind 1 other message of its queue").text
    assert text.endswith(
        f"{BUSY}worker a7c1585c has 2 suspects, which run one after another, beside nothing else:"
        f" first message {first.pk} (app.slow), worker b2000000 has run message {long} (app.slow)"
        " for 1 h 1 min."
    )


def test_messages_of_a_lost_host_run_beside_others():
    """Their rows are marked already: if their lease lapses again, they are suspects."""
    beat("worker")
    lapsed = {"suspect": True, "last_error": "WorkerVanished: the lease lapsed"}
    add(leased=20, claimed_by="worker:4", **lapsed)
    assert "busy" not in why(add(), "processable", "is next to be claimed.").text


def test_an_ordered_queue_waits_for_a_free_worker(settings):
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"ordered": True}}}
    runs("busy", 95.0, queue="other")
    why(add(ordered=True), "processable", f"takes ownership in a moment{BUSY}worker busy has")


def handle(timeout):
    handlers.handler("#", name="app.slow", queue="mail", timeout=timeout)(lambda delivery: None)


def test_running_message_shows_its_time_and_how_to_end_it():
    handle(timeout=5400)
    [id] = runs("a7c1585c00000000", 3900.0)
    answer = queues.why(id)
    assert answer.state == "running"
    assert answer.text.endswith(
        " runs now, attempt 0 of 20, for 1 h 5 min, by worker a7c1585c00000000 (host host, process"
        f" 7). Its handler's timeout is 1 h 30 min; mq_stop {id} ends the attempt now."
    )


def test_one_that_has_just_begun_needs_no_end():
    handle(timeout=None)
    [id] = runs("worker", 3.0)
    text = queues.why(id).text
    assert re.search(r", for \d+ s, by worker", text)
    assert text.endswith("7). Its handler's timeout is 5 min.")


def test_an_extended_timeout_is_shown_with_its_end():
    """`extend()` moves the timeout together with the lease."""
    handle(timeout=60)
    message = add(leased=600, claimed_by="w:1", handler="app.slow")
    beat("w", running=[message.pk], ran={str(message.pk): 111.0})
    assert queues.why(message.pk).text.endswith(
        f"7). It has extended its timeout: it may run until {local_text(message.leased_until)};"
        f" mq_stop {message.pk} ends the attempt now."
    )


def test_a_timeout_that_has_passed_was_extended():
    """A coroutine extends it without its lease, so its end is not known."""
    handle(timeout=60)
    [id] = runs("worker", 111.0)
    assert queues.why(id).text.endswith(f"process 7). mq_stop {id} ends the attempt now.")


def test_without_its_handler_no_timeout_is_known():
    [id] = runs("worker", 95.0)
    assert queues.why(id).text.endswith(f"process 7). mq_stop {id} ends the attempt now.")
    [id] = runs("odd", None)
    assert queues.why(id).text.endswith("attempt 0 of 20, by worker odd (host host, process 7).")


def test_the_command_names_a_database_that_is_not_the_default(settings):
    settings.DJANGO_MQ = {"DATABASE": "other"}
    [id] = runs("worker", 95.0)
    text = queues.why(id, using="default").text
    assert text.endswith(f"mq_stop {id} --database default ends the attempt now.")


def test_follower_of_a_running_message_shows_the_same():
    [id] = runs("worker", 3900.0, key="k")
    behind = add(key="k", blocked_by=id, handler="app.slow")
    line = f"message {id} of its key k, which runs now"
    why(behind, "blocked", line, "for 1 h 5 min", f"mq_stop {id}")
