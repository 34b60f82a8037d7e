"""docs/relays.md and inboxes.md: settings are valid, relays are declared, examples run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

import pika
import pytest
from django.db import transaction

from django_mq import Snooze, broadcast, handler, handlers
from django_mq.conf import _read_settings, find_errors
from django_mq.conf.inboxes import KINDS as INBOXES
from django_mq.conf.relays import KINDS, Destination
from django_mq.contrib.relays.consumer import marked
from django_mq.contrib.relays.incoming import Incoming, message_of
from django_mq.testing import drain
from tests.contrib.relays.brokers import RabbitServer, running
from tests.docs.pages import DOCS, passes, story
from tests.waiting import until

published: list[Any] = []


def publish(*given: Any, **options: Any) -> None:
    published.append((*given, options))


def place_order() -> None:
    with transaction.atomic():
        broadcast("shop.orders.placed", {"order_id": 7}, metadata={"partner": True})


@pytest.fixture
def page(settings: Any) -> Iterator[ModuleType]:
    settings.DJANGO_MQ = {}
    producer = SimpleNamespace(publish=publish)
    names: dict[str, Any] = {"handler": handler, "Snooze": Snooze, "place_order": place_order}
    with story("relays.md", producer=producer, **names) as module:
        yield module


def test_its_settings_are_valid(page: ModuleType) -> None:
    assert find_errors(page.DJANGO_MQ) == []


def test_its_relays_are_declared(page: ModuleType) -> None:
    assert {each.name: each.queue for each in handlers.all_handlers()} == {
        "relay.events": "relay.events",
        "relay.partner": "relay.partner",
        "relay.other": "relay.other",
    }


@pytest.mark.django_db
def test_its_own_relay_publishes(page: ModuleType) -> None:
    with transaction.atomic():
        receipt = broadcast("shop.carts.expired", {"n": 1})
    assert drain("relay.other") == 1
    [copy] = receipt.copies
    assert published == [("shop.carts.expired", {"n": 1}, {"message_id": str(copy.id)})]


@pytest.mark.django_db
def test_its_test_publishes_nothing(page: ModuleType) -> None:
    assert passes(page.OrderTest) == 1


def test_it_names_every_option() -> None:
    text = (DOCS / "relays.md").read_text()
    common = {each.name for each in fields(Destination)}
    for kind, options in KINDS.items():
        row = next((line for line in text.splitlines() if line.startswith(f"| `{kind}` |")), None)
        assert row is not None, f"docs/relays.md has no row for the kind {kind}"
        for option in {each.name for each in fields(options)} - common:
            assert f"`{option}`" in row, (kind, option)
    for option in common - {"kind", "url"}:
        assert f"\n| `{option}` |" in text, option


@pytest.mark.django_db
def test_the_page_of_inboxes(capsys: pytest.CaptureFixture[str]) -> None:
    with story("inboxes.md") as page:
        assert find_errors(page.DJANGO_MQ) == []
        settings, _ = _read_settings(page.DJANGO_MQ)
        assert settings is not None
        event = {"specversion": "1.0", "id": "5", "source": "/crm", "type": "won", "data": {"n": 1}}
        raw = Incoming(json.dumps(event).encode(), {}, "application/cloudevents+json", None)
        message = message_of(raw, "crm", settings.inboxes["crm"])
        assert (message.type, message.unique_id) == ("crm.won", "crm:/crm#5")
        with transaction.atomic(), marked("crm"):
            broadcast("crm.event", message.payload)
        assert drain() == 1
    assert capsys.readouterr().out == "{'n': 1} crm\n"


@pytest.mark.django_db
def test_an_inbox_in_tests(settings: Any) -> None:
    with story("inboxes.md") as page:
        settings.DJANGO_MQ = page.DJANGO_MQ
        assert passes(page.CrmTest) == 1


@pytest.mark.thorough
def test_declarations_of_the_inbox_page_work() -> None:
    with story("inboxes.md") as page, running(RabbitServer.kind) as broker:
        for _ in range(2):
            page.declare_at(broker.url)
        with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
            channel = connection.channel()
            channel.basic_publish("shop", "shop.orders.placed", b"{}", mandatory=True)
            until(lambda: channel.basic_get("crm.events")[2] == b"{}", "the queue has it")


def test_the_page_of_inboxes_names_every_option() -> None:
    text = (DOCS / "inboxes.md").read_text()
    options = {each.name for kind in INBOXES.values() for each in fields(kind)}
    for option in options - {"kind", "url", "source"}:
        assert f"\n| `{option}` |" in text, option
    for kind in INBOXES:
        assert f"\n| `{kind}` |" in text, kind
