"""`relay()` declares a handler; wrong settings are told before anything runs."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from django.core import checks
from django.test import override_settings

from django_mq import InvalidHandler, handlers
from django_mq.conf import find_errors, inboxes, relays
from django_mq.conf.broker_options import PACKAGES
from django_mq.contrib.relays import links, relay
from django_mq.contrib.relays.envelope import Outgoing
from django_mq.contrib.relays.sending import Relay, waves
from tests.contrib.relays.brokers import SERVERS, HttpServer
from tests.contrib.relays.conftest import deliver
from tests.contrib.relays.test_kinds import send
from tests.rows import add

HOOK = {"kind": "webhook", "url": "http://127.0.0.1:9/"}
SECRET = "hunter2"
ROOT = Path(__file__).parents[3]


def complaints(**relays: Any) -> list[str]:
    with override_settings(DJANGO_MQ={"RELAYS": relays}):
        found = checks.run_checks(tags=["django_mq"])
    return [f"{each.id}: {each.msg}" for each in found if each.id.startswith("django_mq.E")]


def test_it_is_a_batch_handler_in_a_queue_of_its_own() -> None:
    relay("shop.#", "crm.*", to="events", max_batch=7)
    found = handlers.get("relay.events")
    assert found is not None
    assert (found.patterns, found.queue) == (("shop.#", "crm.*"), "relay.events")
    assert (found.batch, found.atomic, found.max_batch) == (True, False, 7)
    relay("shop.#", to="events", queue="out", name="out", where={"tier": "gold"})
    other = handlers.get("out")
    assert other is not None
    assert (other.queue, other.where) == ("out", {"tier": "gold"})


def test_a_kind_of_broker_is_known_everywhere() -> None:
    """A kind that one of them lacks is refused by the settings, or stops a worker."""
    kinds = set(links.KINDS)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(relays.KINDS) == kinds, "KINDS of conf/relays.py"
    assert set(inboxes.KINDS) == {kind for kind in kinds if links.KINDS[kind].source}, (
        "KINDS of conf/inboxes.py, and the sources of links.KINDS"
    )
    assert set(SERVERS) == kinds, "SERVERS of brokers.py: a kind without one keeps no promise"
    assert set(PACKAGES) == kinds - {"webhook"}, "PACKAGES: only webhooks need none"
    assert set(PACKAGES) <= set(extras), "the extras of pyproject.toml"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"to": ""}, "name a destination"),
        ({"to": None}, "name a destination"),
        ({"to": "events", "atomic": True}, "decides atomic itself"),
        ({"to": "events", "batch": False}, "decides batch itself"),
        ({"to": "two words"}, "name"),
    ],
)
def test_invalid_relay_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidHandler, match=text):
        relay("shop.#", **given)


def test_two_relays_to_one_destination_need_two_names() -> None:
    relay("shop.#", to="events")
    with pytest.raises(InvalidHandler, match=r"relay\.events"):
        relay("crm.#", to="events")


def test_without_patterns_it_is_refused() -> None:
    with pytest.raises(InvalidHandler, match="subscribes to"):
        relay(to="events")


def test_an_unknown_destination_is_a_check_error() -> None:
    relay("shop.#", to="evnts")
    assert complaints(events=HOOK) == [
        "django_mq.E014: relay(to='evnts'): DJANGO_MQ['RELAYS'] has no such destination (it has"
        " 'events')."
    ]


def test_a_missing_package_is_a_check_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_mq.conf.broker_options.find_spec", lambda name: None)
    assert complaints(events={"kind": "amqp", "url": "amqp://localhost/"}) == [
        "django_mq.E007: DJANGO_MQ['RELAYS']['events'] is of the kind 'amqp', and it needs the"
        " package pika: pip install 'django-mq[amqp]'."
    ]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kind": "amqp"}, "has no 'url'"),
        ({"url": "amqp://localhost"}, "['kind'] is None: must be 'amqp' or"),
        ({"kind": "smtp", "url": "smtp://x"}, "['kind'] is 'smtp': must be 'amqp' or"),
        ({"kind": "amqp", "url": f"http://u:{SECRET}@x"}, "must be a URL that begins with amqp"),
        ({"kind": "amqp", "url": 5}, "must be a URL"),
        ({"kind": "amqp", "url": "amqp://x", "exchang": "y"}, "Did you mean 'exchange'?"),
        ({"kind": "redis", "url": "redis://x", "maxlen": 0}, "['maxlen'] is 0"),
        ({**HOOK, "secret": [SECRET, 5]}, "['secret'] must be a text, or a list of texts"),
        ({**HOOK, "secret": []}, None),
        ({**HOOK, "headers": {"a": 5}}, "['headers'] must be a dict of texts"),
        ({**HOOK, "headers": {"a": f"{SECRET}\n"}}, "without line breaks"),
        ({**HOOK, "secret": f"whsec_{SECRET}!"}, "must have base64 after whsec_"),
        ({**HOOK, "secret": "whsec_"}, "must have base64 after whsec_"),
        ({**HOOK, "url": f"https://u:{SECRET}@x/"}, "must have no user and password"),
        ({"kind": "kafka", "url": f"kafka://u:{SECRET}@x"}, "must have no user and password"),
        ({"kind": "amqp", "url": f"amqp://u:{SECRET}#@x:y"}, "must be a URL"),
        ({**HOOK, "timeout": 0}, "['timeout'] is 0"),
        ({**HOOK, "envelope": "xml"}, "must be 'binary' or 'structured' or 'raw'"),
        ({"kind": "kafka", "url": "kafka://x", "config": {5: 5}}, "must be a dict whose keys"),
        (f"redis://:{SECRET}@localhost", "must be a dict"),
        ({"kind": "redis", "url": "unix:///run/redis.sock"}, None),
        ({"kind": "kafka", "url": "kafka://a:9092,b:9092"}, None),
        ({"kind": "nats", "url": "nats://u:p@a:4222,b:4222"}, None),
        ({"kind": "redis", "url": "redis://a,b"}, "must have one host"),
        ({"kind": "redis", "url": "REDIS://a"}, "must be a URL that begins with redis"),
    ],
)
def test_bad_options_are_reported_without_passwords(options: Any, text: str | None) -> None:
    told = "\n".join(map(str, find_errors({"RELAYS": {"events": options}})))
    assert SECRET not in told
    assert (text in told) if text else (told == "")


def test_no_repr_shows_a_password() -> None:
    from django_mq.conf import get_settings

    url = f"redis://:{SECRET}@localhost"
    with override_settings(DJANGO_MQ={"RELAYS": {"events": {"kind": "redis", "url": url}}}):
        assert SECRET not in repr(get_settings())


def test_a_wave_has_one_message_of_a_key() -> None:
    def message(id: str, key: str | None) -> Outgoing:
        return Outgoing(id, "a.b", key, None, "", b"", {}, "")  # type: ignore[arg-type]

    batch = [
        message(*each) for each in [("1", "a"), ("2", None), ("3", "a"), ("4", "b"), ("5", "a")]
    ]
    assert [[each.id for each in wave] for wave in waves(batch, together=False)] == [
        ["1", "2", "4"],
        ["3"],
        ["5"],
    ]
    assert [len(wave) for wave in waves(batch, together=True)] == [5]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("broker", ["webhook"], indirect=True)
def test_inbox_messages_are_relayed_only_on_request(
    broker: HttpServer, place: str, relayed: Any, asked: bool
) -> None:
    relayed(inbox=asked)
    add("relay.events", type=place, handler="relay.events", metadata={"mq.inbox": "crm"})
    send(place, 2)
    deliver()
    assert len(broker.received(place, 1)) == 1 + asked


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("broker", ["webhook"], indirect=True)
def test_of_a_key_nothing_is_sent_past_a_message_that_fails(
    broker: HttpServer, place: str, relayed: Any
) -> None:
    relayed()
    ids = [*send(place, 1, 2, 3, key="a"), *send(place, 4, key="b")]
    broker.status = {ids[1]: 500}
    deliver()
    assert sorted(each.body["n"] for each in broker.received(place, 2)) == [1, 4]


def test_the_handler_of_a_relay_is_known_by_its_object() -> None:
    relay("shop.#", to="events")
    found = handlers.get("relay.events")
    assert isinstance(getattr(found.function if found else None, "__self__", None), Relay)
