"""docs/relays.md: its settings are valid, its relays are declared, its own relay publishes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from django.db import transaction

from django_mq import Snooze, broadcast, handler, handlers
from django_mq.conf import find_errors
from django_mq.conf.brokers import KINDS, Destination
from django_mq.testing import drain
from tests.docs.pages import DOCS, story

published: list[Any] = []


def publish(*given: Any, **options: Any) -> None:
    published.append((*given, options))


@pytest.fixture
def page() -> Iterator[ModuleType]:
    producer = SimpleNamespace(publish=publish)
    with story("relays.md", handler=handler, Snooze=Snooze, producer=producer) as module:
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


def test_it_names_every_option() -> None:
    text = (DOCS / "relays.md").read_text()
    common = {each.name for each in fields(Destination)}
    for kind, options in KINDS.items():
        [row] = [line for line in text.splitlines() if line.startswith(f"| `{kind}` |")]
        for option in {each.name for each in fields(options)} - common:
            assert f"`{option}`" in row, (kind, option)
    for option in common - {"kind", "url"}:
        assert f"\n| `{option}` |" in text, option
