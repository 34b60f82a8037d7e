"""Ends of deliveries move the level of a queue that backs off."""

from __future__ import annotations

import random
import threading
from datetime import timedelta
from typing import Any

import pytest

from django_mq import queues
from django_mq.conf.local_time import local_text
from django_mq.exceptions import Reject, Retry, Snooze, UnreadablePayload
from django_mq.models import QueueState
from django_mq.policy.outcomes import TimedOut
from tests.rows import decide
from tests.worker.queue_backoff.conftest import Cursor, Fleet, now

pytestmark = pytest.mark.django_db(transaction=True)


def test_failure_starts_the_backoff(fleet: Fleet, heard: list[tuple[str, int]]) -> None:
    """NSQ-5, NSQ-16: waiting messages are to be released, and the change is announced once."""
    delivery = fleet.claim()
    assert fleet.end(delivery, KeyError("host"))
    assert fleet.stopped == {(0, "mail"): None}
    fleet.write()
    assert fleet.stopped == {(0, "mail"): fleet.state.backoff_changed_at}
    assert fleet.allowance == "none"
    assert heard == [("backoff_started", 1)]
    fleet.write()


@pytest.mark.parametrize(
    "error", [None, Retry(), Retry(5), Snooze(5), Reject("no"), TimedOut("slow"),
              UnreadablePayload("deep")], ids=lambda error: type(error).__name__
)  # fmt: skip
def test_other_ends_at_full_rate_write_nothing(fleet: Fleet, error: BaseException | None) -> None:
    """NSQ-2, NSQ-11, NSQ-12, NSQ-14, NSQ-20: at zero a success changes, and writes, nothing."""
    assert not fleet.end(fleet.claim(), error)
    fleet.write()
    assert not QueueState.objects.exists()


@pytest.mark.parametrize("queue", ["never", "mixed", "unlisted"])
def test_queues_without_backoff_are_ignored(fleet: Fleet, queue: str, settings: Any) -> None:
    """NSQ-3: with a maximum of zero it never backs off."""
    assert not fleet.end(fleet.claim(queue), KeyError("host"))
    fleet.write()
    assert fleet.workers[0].queues == {"mail"}
    settings.DJANGO_MQ = {"QUEUES": {"never": {"backoff": {"maximum": 0}}, "mixed": {}}}
    assert not Fleet(fleet.cursor, 1).workers[0].active
    assert not QueueState.objects.exists()


@pytest.mark.parametrize("error", [None, KeyError("host"), Retry()])
def test_a_backoff_that_the_settings_no_longer_know_ends_with_a_probe(
    fleet: Fleet, settings: Any, error: BaseException | None, heard: list[tuple[str, int]]
) -> None:
    """Otherwise the queue would keep its level for ever."""
    settings.DJANGO_MQ = {}
    fleet = Fleet(fleet.cursor)
    decide(backoff_level=3, backoff=-1, backoff_changed_at=now(fleet.cursor))
    assert not fleet.workers[0].active
    assert fleet.probe(error) == 0
    assert not fleet.workers[0].active
    assert heard == [("backoff_ended", 0)]


def test_the_sequence_of_failures_and_successes(fleet: Fleet, heard: list[tuple[str, int]]) -> None:
    """NSQ-4, NSQ-7, NSQ-8, NSQ-9, NSQ-11: all, none, one, none, one, none, one, all."""
    assert not fleet.end(fleet.claim(), None)
    assert fleet.allowance == "all"
    fleet.end(fleet.claim(), KeyError("host"))
    fleet.write()
    for error, level in ((KeyError("host"), 2), (None, 1), (None, 0)):
        assert fleet.allowance == "none"
        fleet.wait()
        assert fleet.allowance == "one"
        assert fleet.probe(error) == level
    assert fleet.allowance == "all"
    assert heard == [
        ("backoff_started", 1),
        ("backoff_changed", 2),
        ("backoff_changed", 1),
        ("backoff_ended", 0),
    ]


@pytest.mark.parametrize(
    "error",
    [Retry(), Snooze(5), TimedOut("slow"), UnreadablePayload("deep")],
    ids=lambda error: type(error).__name__,
)
def test_inconclusive_probe_starts_a_new_wait(
    fleet: Fleet, heard: list[tuple[str, int]], error: BaseException
) -> None:
    """NSQ-5, NSQ-12, NSQ-20: the same level, with a new wait."""
    fleet.end(fleet.claim(), KeyError("host"))
    fleet.write()
    fleet.wait()
    assert fleet.probe(error) == 1
    assert fleet.allowance == "none"
    assert heard == [("backoff_started", 1)]


def test_a_rejected_probe_is_a_handler_that_works(fleet: Fleet) -> None:
    """NSQ-14."""
    fleet.end(fleet.claim(), Retry(60, backoff=True))  # NSQ-13
    fleet.write()
    fleet.wait()
    assert fleet.probe(Reject("no such user")) == 0


@pytest.mark.parametrize("error", [None, KeyError("host")], ids=["success", "failure"])
def test_messages_already_in_flight_move_nothing(fleet: Fleet, error: BaseException | None) -> None:
    early = [fleet.claim(worker=n % 3) for n in range(20)]
    fleet.end(fleet.claim(), KeyError("host"))
    fleet.write()
    until = fleet.state.backoff_until
    for n, delivery in enumerate(early):
        fleet.end(delivery, error, n % 3)
        fleet.write(n % 3)
    assert (fleet.state.backoff_level, fleet.state.backoff_until) == (1, until)


def test_after_the_way_back_a_straggler_moves_nothing(fleet: Fleet) -> None:
    straggler = fleet.claim(worker=1)
    fleet.end(fleet.claim(), KeyError("host"))
    fleet.write()
    fleet.wait()
    assert fleet.probe(None) == 0
    fleet.end(straggler, KeyError("host"), 1)
    fleet.write(1)
    assert fleet.allowance == "all"


def test_a_fleet_that_fails_together_backs_off_once(
    fleet: Fleet, heard: list[tuple[str, int]]
) -> None:
    """64 failures at once, then the service is back: full rate within 5 minutes (here: 3 s)."""
    deliveries = [fleet.claim(worker=n % 3) for n in range(64)]
    threads = [
        threading.Thread(target=fleet.end, args=(each, KeyError("host"), n % 3))
        for n, each in enumerate(deliveries)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for worker in range(3):
        fleet.write(worker)
    assert fleet.state.backoff_level == 1
    fleet.wait()
    assert fleet.probe(None) == 0
    assert fleet.seconds < 3
    assert [name for name, _ in heard] == ["backoff_started", "backoff_ended"]


def test_after_a_long_outage_it_is_at_full_rate_within_five_minutes(fleet: Fleet) -> None:
    """NSQ-6, NSQ-8: 64 failing probes; the way back from the top level takes 246 s and jitter."""
    chance = random.Random(64)
    fleet.end(fleet.claim(), ConnectionError("refused"))
    fleet.write()
    for _ in range(64):
        fleet.wait()
        fleet.probe(ConnectionError("refused"), chance.randrange(3))
    assert fleet.state.backoff_level == 7
    assert fleet.longest <= 132
    fleet.seconds = 0.0
    levels = []
    while not levels or levels[-1]:
        fleet.wait()
        levels.append(fleet.probe(None, chance.randrange(3)))
    assert levels == [6, 5, 4, 3, 2, 1, 0]
    assert 240 * 0.9 < fleet.seconds < 300


def test_queues_that_fail_together_do_not_probe_together(cursor: Cursor, settings: Any) -> None:
    """NSQ-6 as changed: jitter."""
    names = [f"q{n}" for n in range(20)]
    settings.DJANGO_MQ = {"QUEUES": {name: {"backoff": {"multiplier": 60}} for name in names}}
    fleet = Fleet(cursor, 1)
    for name in names:
        fleet.end(fleet.claim(name), KeyError("host"))
    fleet.write()
    ends = [state.backoff_until for state in QueueState.objects.all() if state.backoff_until]
    assert len(ends) == 20
    assert max(ends) - min(ends) > timedelta(seconds=5)


def test_a_pause_and_a_limit_let_nothing_through(fleet: Fleet) -> None:
    """NSQ-10: other decisions about the queue do not change its backoff."""
    fleet.end(fleet.claim(), KeyError("host"))
    fleet.write()
    before = fleet.state
    queues.pause("mail")
    queues.limit("mail", 500)
    queues.resume("mail")
    after = fleet.state
    assert fleet.allowance == "none"
    assert (after.backoff_level, after.backoff_until) == (1, before.backoff_until)


def test_a_change_is_logged(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "django_mq"):
        fleet.end(fleet.claim(), KeyError("host"))
        fleet.workers[0].write(fleet.cursor)
    [record] = caplog.records
    found = vars(record)
    assert (found["event"], found["queue"], found["level"]) == ("backoff_started", "mail", 1)
    assert record.levelname == "WARNING"
    assert found["until"] == fleet.state.backoff_until.isoformat()
    said = f"backs off until {local_text(fleet.state.backoff_until)}, level 1"
    assert said in record.getMessage()
