"""The answer to the ack of a handler outside a transaction is lost: its lease tells the outcome."""

from __future__ import annotations

from typing import Any

import pytest

from django_mq import handler
from django_mq.executor.lease_clock import lease_clock
from django_mq.executor.leased_delivery import leased_at
from django_mq.messages import Delivery
from tests.database import second_connection
from tests.executor.nonatomic.conftest import NonAtomicBench, on
from tests.rows import add
from tests.waiting import until
from tests.worker.conftest import Said, Start, attempts_of, effect, effects, proxied, waiting
from tests.worker.proxy import Proxy

pytestmark = pytest.mark.django_db(transaction=True)

ACK = "delete from django_mq_queuedmessage"
#: Seconds; a third of it passes before a renewal.
LEASE = 5.0


def lost(caplog: pytest.LogCaptureFixture) -> list[int]:
    """Return the ids of the messages whose leases were reported as lost."""
    found = [each for each in caplog.records if getattr(each, "event", "") == "lease_lost"]
    return [each.message_id for each in found]  # type: ignore[attr-defined]


@pytest.fixture
def through(nonatomic: NonAtomicBench, proxy: Proxy) -> NonAtomicBench:
    """The bench, connected through the proxy."""
    nonatomic.wrapper.settings_dict.update(HOST="127.0.0.1", PORT=str(proxy.port))
    return nonatomic


@pytest.mark.parametrize("fresh", [True, False], ids=["claimed", "taken over"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_message_that_is_gone_was_acked(
    through: NonAtomicBench,
    proxy: Proxy,
    said: Said,
    caplog: pytest.LogCaptureFixture,
    fresh: bool,
    count: int,
) -> None:
    """A message whose claim is old, or unknown, has a full lease from its start."""
    through.fresh = fresh

    @on(batch=count > 1)
    def h(argument: Any) -> None:
        proxy.cut_at(ACK, arrives=True)

    messages = [add(handler="h").pk for _ in range(count)]
    assert through.nonatomic.run(through.claim())
    assert proxy.cuts == 1
    assert waiting() == set()
    assert through.settled == said.ids("message_acked") == messages
    assert lost(caplog) == []


def test_a_message_that_is_gone_after_its_lease_is_lost(
    through: NonAtomicBench, proxy: Proxy, said: Said, caplog: pytest.LogCaptureFixture
) -> None:
    """Another worker may have run it, and removed it."""

    @on()
    def h(delivery: Any) -> None:
        task.delivery._leased_at -= 61  # the lease of the bench is 60 s
        proxy.cut_at(ACK, arrives=True)

    message = add(handler="h")
    [task] = through.claim()
    assert through.nonatomic.run([task])
    assert proxy.cuts == 1
    assert said.count("message_acked") == 0
    assert lost(caplog) == [message.pk]


@pytest.mark.parametrize("given", [{}, {"leased": -1, "attempts": 1}], ids=["new", "taken over"])
def test_a_message_of_an_async_handler(
    start: Start, said: Said, proxy: Proxy, caplog: pytest.LogCaptureFixture, given: Any
) -> None:
    @handler("#", queue="mail", name="h")
    async def h(delivery: Any) -> None:
        proxy.cut_at(ACK, arrives=True)

    message = add(handler="h", **given)
    with proxied(proxy):
        running = start()
        said.wait("message_started")
        until(lambda: not waiting(), "it is acked")
        running.stop()
    assert proxy.cuts == 1
    assert said.ids("message_acked") == [message.pk]
    assert lost(caplog) == []


def test_a_routed_message_that_runs_for_longer_than_its_lease(
    start: Start, said: Said, proxy: Proxy, caplog: pytest.LogCaptureFixture, settings: Any
) -> None:
    """Its handler was found at delivery; its renewals count as those of any other message."""
    settings.DJANGO_MQ = {"LEASE": LEASE, "WAKEUP": "poll"}

    @on()
    def h(delivery: Any) -> None:
        delivery._claimed._leased_at -= 10 * LEASE  # that long ago
        until(lambda: leased_at(delivery) > lease_clock() - LEASE, "it is renewed")
        proxy.cut_at(ACK, arrives=True)

    message = add()
    with proxied(proxy):
        running = start()
        said.wait("message_started")
        until(lambda: not waiting(), "it is acked")
        running.stop()
    assert proxy.cuts == 1
    assert said.ids("message_acked") == [message.pk]
    assert lost(caplog) == []


def test_a_connection_that_is_lost_inside_finish(nonatomic: NonAtomicBench) -> None:
    """The failed attempt names that, and does not blame the handler."""

    @on()
    def h(delivery: Delivery) -> None:
        with delivery.finish(), second_connection() as other:
            effect(delivery)
            pid = nonatomic.wrapper.connection.info.backend_pid
            other.execute("select pg_terminate_backend(%s, 10000)", [pid])

    message = add(handler="h")
    assert nonatomic.go() == [True]
    assert attempts_of(message) == ["django.db.utils.OperationalError"]
    assert effects() == set()
