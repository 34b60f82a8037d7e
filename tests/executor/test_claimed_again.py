"""A message may be claimed again here before its earlier claim has fully ended here.

It is retried at once; or a failover lost the claim; or the process was frozen for longer than a
lease, and takes over its own messages.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest
from django.db import transaction
from django.test import override_settings

from django_mq import RetryPolicy, fixed, handler
from django_mq.messages import Delivery
from django_mq.signals import message_retried
from testproject.shop.models import Product
from tests.database import second_connection
from tests.rows import add, insert_all
from tests.slow import mostly_slow
from tests.waiting import until
from tests.worker.conftest import PATIENCE, Running, waiting

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("never_stuck"),
]

Start = Callable[..., Running]

#: It polls often: nothing rings for a retry.
OFTEN = override_settings(DJANGO_MQ={"POLL_INTERVAL": 0.05})
AT_ONCE = RetryPolicy(backoff=fixed(0))


@contextmanager
def slow_receiver(wait: Callable[[], object]) -> Iterator[None]:
    """The receiver of the first retry calls `wait`."""

    def receiver(delivery: Delivery, **data: Any) -> None:
        if delivery.attempt == 1:
            wait()

    message_retried.connect(receiver)
    try:
        yield
    finally:
        message_retried.disconnect(receiver)


LOST_CLAIMS = """
update django_mq_queuedmessage set attempts = 0, claimed_by = null, leased_until = null
 where handler = 'h'
"""
LAPSED_CLAIMS = """
update django_mq_queuedmessage set leased_until = statement_timestamp() where handler = 'h'
"""


class Attempts:
    """Fails the first attempt of a message; the second waits at the `gate`."""

    def __init__(self, gate: threading.Event) -> None:
        self.second = threading.Event()
        self.next = threading.Event()
        self._gate = gate

    def __call__(self, delivery: Delivery) -> None:
        if delivery.payload.get("warms_up"):
            return
        if delivery.attempt == 1:
            raise ValueError
        self.second.set()
        assert self._gate.wait(PATIENCE)

    def handle(self, **options: Any) -> None:
        """Register it, and a handler that the same executor runs next."""
        handler("#", queue="mail", name="h", retry=AT_ONCE, **options)(lambda each: self(each))
        handler("#", queue="mail", name="next")(lambda each: self.next.set())

    def renewed(self, running: Running) -> list[int]:
        """Return the attempts whose leases are renewed, once the first is fully noted."""
        insert_all([{"handler": "next"}])
        assert self.next.wait(PATIENCE)
        assert running.worker._run is not None
        local_queue = running.worker._run.parts.local_queue
        return [each.attempt for each in local_queue.unsettled.all() if each.handler == "h"]


@OFTEN
def test_its_second_lease_is_renewed_whatever_a_receiver_does(
    start: Start, gate: threading.Event
) -> None:
    attempts = Attempts(gate)
    attempts.handle(atomic=False)
    with slow_receiver(lambda: attempts.second.wait(PATIENCE)):
        add(handler="h")
        running = start(threads=2)
        assert attempts.second.wait(PATIENCE)
        assert attempts.renewed(running) == [2]
    gate.set()
    running.stop()
    assert waiting() == set()


@OFTEN
def test_its_second_lease_is_renewed_whatever_the_hook_of_a_neighbour_does(
    start: Start, gate: threading.Event
) -> None:
    """Both are settled by one commit, after which the hooks run."""
    attempts = Attempts(gate)
    attempts.handle()

    @handler("#", queue="mail", name="neighbour")
    def neighbour(delivery: Delivery) -> None:
        if not delivery.payload.get("warms_up"):
            transaction.on_commit(lambda: attempts.second.wait(PATIENCE))

    # A handler that has not run yet gets a slice of its own.
    insert_all({"handler": name, "payload": {"warms_up": True}} for name in ("h", "neighbour"))
    running = start(threads=2)
    until(lambda: not waiting())
    insert_all({"handler": name, "after": at} for name, at in (("h", -60), ("neighbour", -50)))
    assert attempts.second.wait(PATIENCE)
    assert attempts.renewed(running) == [2]
    gate.set()
    running.stop()
    assert waiting() == set()


@OFTEN
def test_no_slot_of_a_coroutine_is_lost(start: Start) -> None:
    """Its second failure may end before its first is noted."""
    ended: list[int] = []

    @handler("#", queue="mail", name="h", retry=AT_ONCE)
    async def h(delivery: Delivery) -> None:
        ended.append(delivery.attempt)
        if delivery.attempt < 3:
            raise ValueError

    def second_has_ended() -> bool:
        run = running.worker._run
        return 2 in ended and run is not None and not run.parts.runner._running

    with slow_receiver(lambda: until(second_has_ended)):
        add(handler="h")
        running = start(async_slots=2)
        until(lambda: not waiting())
    assert running.worker._run is not None
    slots = running.worker._run.parts.local_queue.slots
    until(lambda: slots.room() == 2)
    running.stop()


@OFTEN
@pytest.mark.parametrize(
    ("trouble", "batch"),
    mostly_slow([LOST_CLAIMS, LAPSED_CLAIMS], [False, True]),
    ids=lambda each: {LOST_CLAIMS: "failover", LAPSED_CLAIMS: "freeze"}.get(each),
)
def test_an_earlier_claim_that_still_waits_does_not_run(
    start: Start, gate: threading.Event, batch: bool, trouble: str
) -> None:
    """The two claims would run in one slice, whose messages have different ids."""

    @handler("#", queue="mail", name="h", batch=batch, max_batch=20 if batch else None)
    def h(given: Any) -> None:
        for each in given if batch else [given]:
            Product.objects.create(name=f"{each.id} {uuid4()}", price=1)

    @handler("#", queue="mail", name="waits")
    def waits(delivery: Delivery) -> None:
        at_gate.set()
        assert gate.wait(PATIENCE)

    at_gate = threading.Event()
    insert_all([{"handler": "h"}] * 10)  # a handler that has not run yet gets a slice of its own
    running = start()
    until(lambda: not waiting())
    insert_all([{"handler": "waits"}])
    assert at_gate.wait(PATIENCE)
    ids = insert_all([{"handler": "h"}] * 3)
    until(lambda: len(claims_of(ids)) == 3)
    before = claims_of(ids)
    with second_connection() as other:
        other.execute(trouble)
    until(lambda: len(claims_of(ids) - before) == 3)
    gate.set()
    until(lambda: not waiting())
    running.stop()
    ran = Counter(int(effect.name.split()[0]) for effect in Product.objects.all())
    assert {id: ran[id] for id in ids} == dict.fromkeys(ids, 1)


@OFTEN
@pytest.mark.parametrize("trouble", [LOST_CLAIMS, LAPSED_CLAIMS], ids=["failover", "freeze"])
def test_an_earlier_claim_that_lingers_on_the_loop_does_not_run(start: Start, trouble: str) -> None:
    """After a failover the second claims fill its list; after a freeze they run singly."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h", batch=True, max_batch=6, linger=60.0)
    async def h(deliveries: list[Delivery]) -> None:
        ran.extend(each.id for each in deliveries)

    ids = insert_all([{"handler": "h"}] * 3)
    running = start()
    until(lambda: len(claims_of(ids)) == 3)
    with second_connection() as other:
        other.execute(trouble)
    until(lambda: not waiting())
    running.stop()  # nothing lingers any longer
    assert sorted(ran) == sorted(ids)


def claims_of(ids: list[int]) -> set[tuple[int, str]]:
    """Return the messages that are claimed, with their claimers."""
    with second_connection() as other:
        rows = other.execute("select id, claimed_by from django_mq_queuedmessage").fetchall()
    return {(id, claimer) for id, claimer in rows if id in ids and claimer}
