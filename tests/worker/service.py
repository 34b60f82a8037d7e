"""A service that a test's handlers depend on: it counts its users, and can be down or slow."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connection

from django_mq import handler
from django_mq.messages import Delivery
from django_mq.models import QueuedMessage
from tests.waiting import SOON

IN_FLIGHT = (
    "select count(*) from django_mq_queuedmessage where queue = %s and leased_until is not null"
)

#: Seconds; too long for a test that waits for the poll to end in time.
FAR = {"POLL_INTERVAL": 600, "LEASE": 3600}


class Service:
    """Call it from handlers. `error` is raised while it is set; no call passes a closed `gate`."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._breaks_at: tuple[int, BaseException] | None = None
        self._recovers_at: int | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.pause = 0.0
        #: Id and attempt of each call, in order.
        self.calls: list[tuple[int, int]] = []
        self.failed = 0
        self.running = 0
        #: The highest number of calls that ran here at once.
        self.most = 0
        #: The number of the queue's messages in flight, as each call saw it.
        self.in_flight: list[int] = []
        self._lock = threading.Lock()

    def __call__(self, delivery: Delivery) -> None:
        self._enter(delivery)
        try:
            self._count(delivery)
            assert self.gate.wait(SOON)
            threading.Event().wait(self.pause)
            self._answer()
        finally:
            self._leave()

    async def acall(self, delivery: Delivery) -> None:
        """The same, for a coroutine."""
        self._enter(delivery)
        try:
            await sync_to_async(self._count)(delivery)
            while not self.gate.is_set():
                await asyncio.sleep(0.01)
            await asyncio.sleep(self.pause)
            self._answer()
        finally:
            self._leave()

    def break_at(self, call: int, error: BaseException) -> None:
        """Raise `error` from the call of that number on; the first is 1."""
        self._breaks_at = call, error

    def recover_at(self, failure: int) -> None:
        """Raise nothing more after the failure of that number; the first is 1."""
        self._recovers_at = failure

    @property
    def ids(self) -> list[int]:
        """The ids of the messages that ran, in order."""
        return [id for id, _ in self.calls]

    def handle(self, queue: str = "mail", name: str = "h", **options: Any) -> None:
        """Register a handler that calls the service."""
        handler("#", queue=queue, name=name, **options)(lambda delivery: self(delivery))

    def ahandle(self, **options: Any) -> None:
        """Register a coroutine that calls the service."""

        @handler("#", queue="mail", name="h", **options)
        async def h(delivery: Delivery) -> None:
            await self.acall(delivery)

    def handle_as(self, kind: str) -> None:
        """Register a handler that calls the service: async, batch, unbound, or an atomic one."""
        if kind == "async":
            self.ahandle()
        elif kind == "batch":

            @handler("#", queue="mail", name="h", batch=True)
            def together(deliveries: list[Delivery]) -> None:
                for delivery in deliveries:
                    self(delivery)

        else:
            self.handle(atomic=kind != "unbound")

    def _enter(self, delivery: Delivery) -> None:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.calls.append((delivery.id, delivery.attempt))
            if self._breaks_at and len(self.calls) >= self._breaks_at[0]:
                self.error, self._breaks_at = self._breaks_at[1], None

    def _count(self, delivery: Delivery) -> None:
        with connection.cursor() as cursor:
            cursor.execute(IN_FLIGHT, [delivery.queue])
            self.in_flight.append(cursor.fetchone()[0])

    def _answer(self) -> None:
        with self._lock:
            if (error := self.error) is None:
                return
            self.failed += 1
            if self.failed == self._recovers_at:
                self.error = None
        raise error.with_traceback(None)  # else it grows with each failure

    def _leave(self) -> None:
        with self._lock:
            self.running -= 1


def in_flight(queue: str = "mail") -> int:
    return QueuedMessage.objects.filter(queue=queue, leased_until__isnull=False).count()
