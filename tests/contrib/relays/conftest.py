"""Each broker once for a module, and relays to a place of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from django_mq import handlers
from django_mq.contrib.relays import relay
from django_mq.worker import Worker
from tests.contrib.relays.brokers import SERVERS, Broker, running
from tests.worker.conftest import Running

_numbers = count(1)


@pytest.fixture(scope="module", params=SERVERS)
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """A running broker of each kind."""
    with running(request.param) as broker:
        yield broker


@pytest.fixture(autouse=True)
def registry() -> Iterator[handlers.Registry]:
    """Only the handlers of the test exist."""
    with handlers.isolated() as registry:
        yield registry


@pytest.fixture
def place(broker: Broker) -> str:
    """A topic, stream, subject or path that nothing else uses; also the type of its messages."""
    name = f"shop.test{next(_numbers)}"
    broker.prepare(name)
    return name


@pytest.fixture
def relayed(broker: Broker, place: str, settings: Any) -> Callable[..., None]:
    """Declare a relay of all messages to the place, with further options of the destination."""

    def declare(*, options: dict[str, Any] | None = None, **given: Any) -> None:
        destination = {**broker.destination(place), **(options or {})}
        settings.DJANGO_MQ = {"RELAYS": {"events": destination}}
        relay("#", to="events", **given)

    return declare


def deliver() -> None:
    """Let a worker pass on all due messages."""
    assert Running(Worker(queues=["relay.events"]), until_empty=True).join()
