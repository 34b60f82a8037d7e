"""Handlers of every mode. Each traces its runs, and raises in the first `fails` attempts."""

from __future__ import annotations

import asyncio
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections

from django_mq import RetryPolicy, broadcast, fixed, handler

from .ledger import ALIAS, effect, sent
from .trace import pass_gate, traced

OFTEN = RetryPolicy(max_attempts=10, backoff=fixed(0.02))
QUEUE, CALLS, ORDERED, EASING = "faults", "faults.calls", "faults.ordered", "faults.easing"


class Refused(Exception):
    """A handler fails because its message says so."""


def may_fail(delivery: Any) -> None:
    if delivery.attempt <= delivery.payload.get("fails", 0):
        raise Refused(delivery.payload["name"])


def look() -> None:
    """Send the server a query."""
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("select count(*) from faults_sent")


@handler("faults.write", queue=QUEUE, retry=OFTEN)
def write(delivery: Any) -> None:
    with traced(delivery):
        effect(delivery)
        may_fail(delivery)


@handler("faults.read", queue=QUEUE, retry=OFTEN)
def read(delivery: Any) -> None:
    with traced(delivery):
        look()
        may_fail(delivery)


@handler("faults.nothing", queue=QUEUE, retry=OFTEN)
def nothing(delivery: Any) -> None:
    with traced(delivery):
        may_fail(delivery)


@handler("faults.choosy", queue=QUEUE, retry=OFTEN)
def choosy(delivery: Any) -> None:
    """Do nothing, or end the transaction of the slice."""
    with traced(delivery):
        if delivery.attempt <= delivery.payload["fails"]:
            connections[ALIAS].close()


@handler("faults.call", queue=CALLS, atomic=False, retry=OFTEN)
def call(delivery: Any) -> None:
    """Not atomic: the effect commits by itself, before the ack."""
    with traced(delivery):
        may_fail(delivery)
        effect(delivery)


@handler("faults.finish", queue=CALLS, atomic=False, retry=OFTEN)
def finish(delivery: Any) -> None:
    """Not atomic: the effect commits with the ack. Some workers wait at the gate before that."""
    with traced(delivery):
        look()
        may_fail(delivery)
        pass_gate()
        with delivery.finish():
            effect(delivery)


@handler("faults.acall", queue=CALLS, retry=OFTEN)
async def acall(delivery: Any) -> None:
    with traced(delivery):
        may_fail(delivery)
        await asyncio.sleep(0)


@handler("faults.afinish", queue=CALLS, retry=OFTEN)
async def afinish(delivery: Any) -> None:
    with traced(delivery):
        may_fail(delivery)
        await delivery.afinish(effect, delivery)


@handler("faults.batch", queue=QUEUE, batch=True, retry=OFTEN)
def batch(deliveries: list[Any]) -> None:
    with traced(*deliveries):
        for delivery in deliveries:
            effect(delivery)
            may_fail(delivery)


@handler("faults.idle_batch", queue=QUEUE, batch=True, retry=OFTEN)
def idle_batch(deliveries: list[Any]) -> None:
    with traced(*deliveries):
        for delivery in deliveries:
            may_fail(delivery)


@handler("faults.list", queue=CALLS, batch=True, atomic=False, retry=OFTEN)
def one_verdict_each(deliveries: list[Any]) -> None:
    """Not atomic: each has its own effect, or the verdict that it failed."""
    with traced(*deliveries) as ended:
        for delivery in deliveries:
            try:
                may_fail(delivery)
                effect(delivery)
            except Refused as error:
                ended(delivery)
                delivery.fail(error)


@handler("faults.alist", queue=CALLS, batch=True, retry=OFTEN)
async def aone_verdict_each(deliveries: list[Any]) -> None:
    with traced(*deliveries) as ended:
        for delivery in deliveries:
            try:
                may_fail(delivery)
                await sync_to_async(effect)(delivery)
            except Refused as error:
                ended(delivery)
                delivery.fail(error)


@handler("faults.ordered", queue=ORDERED, retry=OFTEN)
def ordered(delivery: Any) -> None:
    write(delivery)


@handler("faults.easing", queue=EASING, retry=OFTEN)
def easing(delivery: Any) -> None:
    write(delivery)


@handler("faults.chain", queue=QUEUE, retry=OFTEN)
def chain(delivery: Any) -> None:
    """Write the effect and broadcast a message, which must appear together."""
    with traced(delivery):
        effect(delivery)
        name = f"{delivery.payload['name']}.next"
        sent(name, "once")
        broadcast("faults.write", {"name": name})
        may_fail(delivery)


@handler("faults.answer", queue=QUEUE, retry=OFTEN)
def answer(delivery: Any) -> str:
    with traced(delivery):
        effect(delivery)
        may_fail(delivery)
    name: str = delivery.payload["name"]
    return name


@handler("faults.unique", queue=QUEUE, retry=OFTEN)
def unique(delivery: Any) -> None:
    """Write the effect; with `again`, broadcast a later run under the same unique id."""
    with traced(delivery):
        effect(delivery)
        payload = delivery.payload
        if payload.get("again"):
            name = f"{payload['name']}.again"
            sent(name, "once")
            broadcast(
                "faults.unique",
                {"name": name, "unique": payload["unique"]},
                unique_id=payload["unique"],
                on_duplicate="requeue",
            )
        may_fail(delivery)
