"""A message that the broker refuses fails alone; servers that ask for time get it."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now

from django_mq.models import FailedAttempt, QueuedMessage
from tests.contrib.relays.brokers import HttpServer, NatsServer, RabbitServer, RedisServer
from tests.contrib.relays.conftest import deliver
from tests.contrib.relays.test_kinds import send
from tests.rows import the_message

pytestmark = pytest.mark.django_db(transaction=True)

Declare = Callable[..., None]


def only(*kinds: type[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "broker", [each.kind for each in kinds], indirect=True, scope="module"
    )


def failures() -> dict[int, str]:
    """Return the error of each failed attempt, by the id of its message."""
    return {each.message_id: each.error_text for each in FailedAttempt.objects.all()}


@pytest.mark.thorough
@only(RabbitServer)
def test_amqp_a_message_that_no_queue_gets_fails_alone(place: str, relayed: Declare) -> None:
    relayed(options={"routing_key": "{type}"})
    lost, ok = send("nobody.hears", 1) + send(place, 2)
    deliver()
    assert {str(id): "routing key" in text for id, text in failures().items()} == {lost: True}
    assert ".MessageRefused: no queue" in the_message().last_error
    assert ok != lost


@pytest.mark.thorough
@only(RabbitServer)
def test_amqp_a_message_that_no_queue_gets_may_be_fine(place: str, relayed: Declare) -> None:
    relayed(options={"routing_key": "{type}", "mandatory": False})
    send("nobody.hears", 1)
    deliver()
    assert not QueuedMessage.objects.exists()


@pytest.mark.slow
@only(RabbitServer)
def test_amqp_a_missing_exchange_is_an_outage(
    place: str, relayed: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    """No message is at fault: an outbox must not die because a broker was rebuilt without it."""
    relayed(options={"exchange": "shop.none"})
    send(place, 1, 2, 3)
    deliver()
    assert failures() == {}
    for message in QueuedMessage.objects.all():
        assert message.attempts == 0
        assert "NOT_FOUND - no exchange 'shop.none'" in message.last_error
    assert [each.event for each in caplog.records if each.event == "relay_away"] == ["relay_away"]


@pytest.mark.thorough
@only(RabbitServer)
@pytest.mark.parametrize("metadata", [{"k" * 250: 1}, {f"k{n}": "y" * 900 for n in range(150)}])
def test_amqp_headers_that_are_too_long_fail_alone(
    place: str, relayed: Declare, metadata: dict[str, Any], settings: Any
) -> None:
    relayed()
    settings.DJANGO_MQ = {**settings.DJANGO_MQ, "MAX_METADATA_BYTES": 1_000_000}
    [first] = send(place, 1)
    [bad] = send(place, 2, metadata=metadata)
    [last] = send(place, 3)
    deliver()
    assert [str(id) for id in failures()] == [bad]
    assert QueuedMessage.objects.count() == 1
    assert int(first) < int(bad) < int(last)


@only(NatsServer)
def test_nats_a_message_that_fits_only_without_its_headers_fails_alone(
    broker: NatsServer, place: str, relayed: Declare, settings: Any
) -> None:
    relayed()
    settings.DJANGO_MQ = {**settings.DJANGO_MQ, "MAX_PAYLOAD_BYTES": 2 * 2**20}
    send(place, 1)
    [bad] = send(place, "x" * (2**20 - 40))  # type: ignore[arg-type]
    send(place, 3)
    deliver()
    assert [str(id) for id in failures()] == [bad]
    assert [each.body["n"] for each in broker.received(place, 2)] == [1, 3]


@only(NatsServer)
def test_nats_a_subject_without_a_stream_is_an_error(place: str, relayed: Declare) -> None:
    relayed(options={"subject": "{type}"})
    [lost] = send("nobody.hears", 1)
    send(place, 2)
    deliver()
    assert [str(id) for id in failures()] == [lost]
    [failed] = FailedAttempt.objects.all()
    assert failed.error_text == "no JetStream stream has the subject nobody.hears: create one"


@only(RedisServer)
def test_redis_a_key_that_is_no_stream_is_an_error(
    broker: RedisServer, place: str, relayed: Declare
) -> None:
    import redis

    with redis.Redis.from_url(broker.url) as client:
        client.set(f"{place}.text", "not a stream")
    relayed(options={"stream": "{type}"})
    [bad] = send(f"{place}.text", 1)
    send(place, 2)
    deliver()
    assert {str(id): text.startswith("WRONGTYPE") for id, text in failures().items()} == {bad: True}


@only(RedisServer)
@pytest.mark.parametrize(
    ("name", "values"),
    [("maxmemory", ("1", "0")), ("min-replicas-to-write", ("3", "0"))],
)
def test_redis_a_server_that_takes_nothing_costs_no_attempt(
    broker: RedisServer, place: str, relayed: Declare, name: str, values: tuple[str, str]
) -> None:
    import redis

    relayed()
    send(place, 1)
    with redis.Redis.from_url(broker.url) as client:
        client.config_set(name, values[0])
        deliver()
        client.config_set(name, values[1])
    assert (the_message().attempts, failures()) == (0, {})


@only(RedisServer)
def test_redis_a_stream_that_the_login_may_not_use_fails_alone(
    broker: RedisServer, place: str, relayed: Declare
) -> None:
    import redis

    with redis.Redis.from_url(broker.url) as client:
        client.acl_setuser(
            "limited", enabled=True, passwords=["+p"], categories=["+@all"], keys=[place]
        )
    relayed(options={"url": broker.url.replace("//", "//limited:p@"), "stream": "{type}"})
    [forbidden] = send("shop.forbidden", 1)
    send(place, 2)
    deliver()
    assert {str(id): " key" in text for id, text in failures().items()} == {forbidden: True}


@only(RedisServer)
def test_redis_a_stream_keeps_about_maxlen_entries(
    broker: RedisServer, place: str, relayed: Declare
) -> None:
    import redis

    relayed(options={"maxlen": 100})
    send(place, *range(300))
    deliver()
    with redis.Redis.from_url(broker.url) as client:
        assert client.xlen(place) < 250


@only(HttpServer)
@pytest.mark.parametrize("status", [301, 400, 404, 410, 500])
def test_webhook_an_error_status_fails_the_message_alone(
    broker: HttpServer, place: str, relayed: Declare, status: int
) -> None:
    relayed()
    bad, good = send(place, 1, 2)
    broker.status = {bad: status}
    deliver()
    assert [(str(id), str(status) in text) for id, text in failures().items()] == [(bad, True)]
    assert [each.native_id for each in broker.received(place, 1)] == [good]


@only(HttpServer)
def test_webhook_the_status_decides_and_not_the_body(
    broker: HttpServer, place: str, relayed: Declare
) -> None:
    relayed()
    send(place, 1)
    broker.answer_headers = {"Content-Length": "1000"}
    deliver()
    broker.answer_headers = {}
    assert not QueuedMessage.objects.exists()


@only(HttpServer)
def test_webhook_malformed_redirect_fails_alone(
    broker: HttpServer, place: str, relayed: Declare
) -> None:
    relayed()
    bad, _ = send(place, 1, 2)
    broker.status = {bad: 302}
    broker.answer_headers = {"Location": "http://["}
    deliver()
    broker.answer_headers = {}
    assert [str(id) for id in failures()] == [bad]
    assert len(broker.received(place, 1)) == 1


@only(HttpServer)
def test_webhook_nothing_overtakes_a_failed_message_of_its_key(
    broker: HttpServer, place: str, relayed: Declare
) -> None:
    """Also if the server was busy for another message of the batch."""
    relayed(options={"concurrency": 1})
    [first] = send(place, 1, key="a")
    [busy] = send(place, 2, key="b")
    [behind] = send(place, 3, key="a")
    broker.status = {first: 400, busy: 503}
    deliver()
    assert [each for each in broker.requests if each[0] == f"/{place}"] == []
    assert list(failures()) == [int(first)]
    attempts = dict(QueuedMessage.objects.values_list("pk", "attempts"))
    assert attempts == {int(first): 1, int(busy): 0, int(behind): 0}


@only(HttpServer)
def test_webhook_unsent_message_is_not_acked(
    broker: HttpServer, place: str, relayed: Declare
) -> None:
    """A message that was stored for a former name is of another line, even with the same key."""
    relayed(aliases=["relay.old"])
    [bad, other] = send(place, 1, 2, key="a")
    QueuedMessage.objects.filter(pk=bad).update(handler="relay.old")
    broker.status = {bad: 400}
    deliver()
    assert list(failures()) == [int(bad)]
    if not QueuedMessage.objects.filter(pk=other).exists():
        assert [each.native_id for each in broker.received(place, 1)] == [other]


@only(HttpServer)
@pytest.mark.parametrize("status", [429, 502, 503, 504])
@pytest.mark.parametrize("after", [None, "600", "0"])
def test_webhook_a_busy_server_costs_no_attempt(
    broker: HttpServer, place: str, relayed: Declare, status: int, after: str | None
) -> None:
    relayed()
    [id] = send(place, 1)
    broker.status = {id: status}
    broker.answer_headers = {} if after is None else {"Retry-After": after}
    deliver()
    broker.answer_headers = {}
    message = the_message()
    assert (message.attempts, failures()) == (0, {})
    waits = message.processable_after - message.created_at
    assert waits >= timedelta(seconds={"600": 600, "0": 1, None: 5}[after])
    assert message.last_error.startswith("Snooze: ")
    assert str(status) in message.last_error


@only(HttpServer)
@pytest.mark.parametrize("status", [502, 0])
def test_webhook_a_message_on_which_the_server_fails_does_not_hold_up_others(
    broker: HttpServer, place: str, relayed: Declare, status: int
) -> None:
    """A gateway answers 502, or the connection is closed: each time, for this message alone."""
    relayed(options={"concurrency": 1})
    bad, *good = send(place, *range(6))
    broker.status = {bad: status}
    deliver()
    assert [each.native_id for each in broker.received(place, 5)] == good
    [[failed, text]] = failures().items()
    assert str(failed) == bad
    assert "the server took later messages" in text
    QueuedMessage.objects.update(processable_after=Now())
    deliver()  # alone: a message that failed comes in no batch
    assert the_message().attempts == 2


@only(HttpServer)
def test_webhook_an_upload_that_the_server_breaks_off_does_not_hold_up_others(
    broker: HttpServer, place: str, relayed: Declare
) -> None:
    relayed(options={"concurrency": 1})
    [bad] = send(place, "x" * 900_000)
    good = send(place, *range(5))
    broker.status = {bad: -1}
    deliver()
    assert [each.native_id for each in broker.received(place, 5)] == good
    assert list(failures()) == [int(bad)]


@only(HttpServer)
def test_webhook_messages_behind_several_bad_ones_are_sent_first_next_time(
    broker: HttpServer, place: str, relayed: Declare
) -> None:
    relayed(options={"concurrency": 1})
    ids = send(place, *range(6))
    broker.status = dict.fromkeys(ids[:3], 502)
    deliver()
    assert failures() == {}
    waits = dict(QueuedMessage.objects.values_list("pk", "processable_after"))
    assert max(map(waits.get, map(int, ids[2:]))) < min(map(waits.get, map(int, ids[:2])))


@only(HttpServer)
def test_webhook_a_request_is_signed_by_each_secret(
    broker: HttpServer, place: str, relayed: Declare
) -> None:
    secrets = ["whsec_" + base64.b64encode(b"new key").decode(), "old key"]
    relayed(options={"secret": secrets, "headers": {"Authorization": "Bearer t"}})
    [id] = send(place, 1)
    deliver()
    [(_, headers, body)] = [each for each in broker.requests if each[0] == f"/{place}"]
    signed = f"{id}.{headers['Webhook-Timestamp']}.".encode() + body
    assert headers["Webhook-Signature"].split() == [
        "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
        for key in (b"new key", b"old key")
    ]
    assert headers["Authorization"] == "Bearer t"
