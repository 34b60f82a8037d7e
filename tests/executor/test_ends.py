"""How a delivery ends: expired, retried, snoozed, rejected, dead, held."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from django_mq import Reject, Retry, RetryPolicy, Snooze, fixed, handler
from django_mq.messages import Delivery
from django_mq.models import QueuedMessage
from tests.database import second_connection
from tests.rows import add, stored
from tests.worker.conftest import (
    Bench,
    Said,
    attempts_of,
    effect,
    effects,
)

pytestmark = pytest.mark.django_db(transaction=True)


def test_expired_messages_do_not_start(bench: Bench, said: Said) -> None:
    ran: list[str] = []

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.payload)

    add(handler="h", payload="a", expires=60)
    expired = add(handler="h", payload="b", expires=-1)
    bench.run_all(bench.claim())
    assert ran == ["a"]
    stored(expired)
    assert (expired.dead_reason, expired.attempts) == ("expired", 0)
    assert expired.dead_at is not None
    assert said.ids("message_dead") == [expired.pk]
    assert said.count("message_started") == 1


@pytest.mark.parametrize("returned", [None, False, 0, "error", {"status": "retry"}, ValueError()])
def test_whatever_is_returned_is_an_ack(bench: Bench, said: Said, returned: object) -> None:
    """PMQ-32, CAR-27, NSQ-15: no return value means failure; even on the last attempt."""

    @handler("#", queue="mail", name="h", retry=RetryPolicy.never())
    def h(delivery: Delivery) -> object:
        return returned

    message = add(handler="h", max_attempts=1)
    bench.run_all(bench.claim())
    assert said.ids("message_acked") == [message.pk]
    assert not QueuedMessage.objects.exists()


def test_retry_snooze_reject(bench: Bench, said: Said) -> None:
    """CAR-22, CAR-25 as changed, NSQ-12, NSQ-13, NSQ-14, RMQ-9."""
    at = timezone.now() + timedelta(hours=2)
    raised = {
        "policy": Retry(),
        "later": Retry(after=300),
        "then": Retry(after=at),
        "snooze": Snooze(300, reason="the bank is closed"),
        "snooze then": Snooze(at),
        "reject": Reject("no such order"),
    }

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(60)))
    def h(delivery: Delivery) -> None:
        effect(delivery)
        raise raised[delivery.payload]

    messages = {p: add(handler="h", payload=p, after=-60 + n) for n, p in enumerate(raised)}
    bench.run_all(bench.claim())
    assert effects() == set()
    now = timezone.now()
    waits = {}
    for name, message in messages.items():
        stored(message)
        waits[name] = round((message.processable_after - now).total_seconds(), -1)
        assert (message.leased_until, message.claimed_by) == (None, None)
    assert (waits["policy"], waits["later"], waits["snooze"]) == (60, 300, 300)
    assert messages["then"].processable_after == messages["snooze then"].processable_after == at
    assert {name: m.attempts for name, m in messages.items()} == {
        "policy": 1, "later": 1, "then": 1, "snooze": 0, "snooze then": 0, "reject": 1,
    }  # fmt: skip
    assert messages["snooze"].last_error == "Snooze: the bank is closed"
    assert {name: m.dead_reason for name, m in messages.items() if m.dead_at} == {
        "reject": "no such order"
    }
    assert said.count("message_retried") == 3
    assert said.ids("message_dead") == [messages["reject"].pk]
    assert bench.back == [True]


def test_the_last_attempt_is_final(bench: Bench) -> None:
    """NSQ-19: the message sets the number, whatever the handler's policy says."""

    @handler("#", queue="mail", name="h", retry=RetryPolicy(max_attempts=50, backoff=fixed(0)))
    def h(delivery: Delivery) -> None:
        raise Retry(after=0)

    message = add(handler="h", max_attempts=3)
    for _ in range(3):
        bench.run_all(bench.claim())
    stored(message)
    assert (message.attempts, message.dead_reason) == (3, "exhausted")
    assert len(attempts_of(message)) == 3
    assert bench.claim() == []


@pytest.mark.parametrize(
    "backoff", [lambda attempt: 1 / 0, lambda attempt: -5, lambda attempt: "soon"]
)
def test_a_policy_that_fails_counts_as_one_second(
    bench: Bench, backoff: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """PMQ-54 as changed: with a line in the log, and for that message alone (PMQ-55)."""

    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=backoff))
    def h(delivery: Delivery) -> None:
        if delivery.payload == "bad":
            raise ValueError
        effect(delivery)

    message, neighbour = (add(handler="h", payload=payload) for payload in ("bad", "good"))
    bench.run_all(bench.claim())
    wait = stored(message).processable_after - timezone.now()
    assert timedelta(0) < wait <= timedelta(seconds=1)
    assert effects() == {neighbour.pk}
    assert not QueuedMessage.objects.filter(pk=neighbour.pk).exists()
    (line,) = warnings_of_waits(caplog)
    assert line.startswith(f"message {message.pk}: the backoff callable ")
    assert line.endswith("; waiting 1.0 s")


def warnings_of_waits(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if getattr(r, "event", "") == "bad_backoff"]


@pytest.mark.parametrize("error", [Retry(1e300), Snooze(timedelta(days=1000))])
def test_a_wait_beyond_the_maximum_is_cut_with_a_warning(
    bench: Bench, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """NSQ-18."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        raise error

    message = add(handler="h")
    bench.run_all(bench.claim())
    wait = stored(message).processable_after - timezone.now()
    assert timedelta(days=365) < wait <= timedelta(days=366)
    (line,) = warnings_of_waits(caplog)
    assert line.startswith(f"message {message.pk}: a wait of ")
    assert "was cut to" in line


def test_valid_retry_policy_of_the_message_takes_precedence(bench: Bench) -> None:
    @handler("#", queue="mail", name="h", retry=RetryPolicy(backoff=fixed(1000)))
    def h(delivery: Delivery) -> None:
        raise ValueError

    own = add(handler="h", retry={"kind": "fixed", "seconds": 100})
    bad = [
        add(handler="h", retry=retry)
        for retry in ([], 5, "fixed", {}, {"kind": "fixed"}, {"kind": "fixed", "x": 1},
                      {"kind": "exponential", "base": {}, "cap": []},
                      {"kind": "fixed", "seconds": 1e400 if False else "x"})
    ]  # fmt: skip
    bench.run_all(bench.claim())
    now = timezone.now()
    assert round((stored(own).processable_after - now).total_seconds(), -1) == 100
    for each in bad:
        assert round((stored(each).processable_after - now).total_seconds(), -1) == 1000


def test_a_payload_that_cannot_be_decoded_is_held(bench: Bench) -> None:
    """Guarantee 14: held, not burned."""

    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        assert delivery.payload

    message = add(handler="h")
    with second_connection() as other:
        other.execute("update django_mq_queuedmessage set payload = %s::jsonb", ["1" * 5000])
    bench.run_all(bench.claim())
    found = QueuedMessage.objects.values("held_since", "last_error").get(
        pk=message.pk, dead_at=None, attempts=0
    )
    assert found["held_since"] is not None
    assert "cannot be decoded" in found["last_error"]


def test_a_held_message_that_runs_after_all_is_held_no_more(bench: Bench) -> None:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        raise ValueError

    message = add(handler="h", held=-100)
    bench.run_all(bench.claim())
    assert stored(message).held_since is None


def test_snoozing_has_bounds(bench: Bench) -> None:
    """S15, S17: no loop without a wait, and no message that is due in the year 9999."""

    @handler("now", queue="mail", name="now")
    def now(delivery: Any) -> None:
        raise Snooze(0)

    @handler("never", queue="mail", name="never")
    def never(delivery: Any) -> None:
        raise Snooze(datetime(9999, 12, 31, tzinfo=UTC))

    soon, far = add(handler="now", type="now"), add(handler="never", type="never")
    before = timezone.now()
    bench.run_all(bench.claim())
    soon.refresh_from_db()
    far.refresh_from_db()
    assert soon.processable_after >= before + timedelta(seconds=0.09)
    assert far.processable_after < timezone.now() + timedelta(days=367)
