"""Handlers that follow instructions in their message; its `name` identifies it to a test."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connection, transaction

from django_mq import Retry, RetryPolicy, broadcast, fixed, handler

from . import effects
from .witness import PATIENCE, Witness

SOON = RetryPolicy(max_attempts=3, backoff=fixed(0.1))
#: Queues for tests that distinguish queues.
OTHERS = ("first", "second", "mail.in", "mail.out")

#: The first imitates a bug in an extension module.
WAYS_TO_DIE: dict[str, Callable[[], object]] = {
    "segv": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}

_hoard: list[bytearray] = []

if extra := os.environ.get("ACCEPTANCE_IMPORT"):
    importlib.import_module(extra)  # a module that a test changes: for --reload


def witness() -> Witness:
    return Witness(Path(os.environ["ACCEPTANCE_DIR"]))


def effect(delivery: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(effects.INSERT, (delivery.payload["name"], delivery.attempt, os.getpid()))


def gate_of(delivery: Any) -> str:
    """Return the gate for this attempt: `{attempt}` in its name distinguishes attempts."""
    gate: str = delivery.payload["gate"]
    return gate.format(attempt=delivery.attempt)


def begin(delivery: Any) -> dict[str, Any]:
    """Report the start of this delivery, and return its payload."""
    witness().saw(delivery.payload["name"], delivery.attempt)
    return delivery.payload


@handler("acceptance.write", queue="work", queues=OTHERS, retry=SOON)
def write(delivery: Any) -> None:
    """Write the effect; `pause` first for that many seconds, if the payload has it."""
    payload = begin(delivery)
    effect(delivery)
    time.sleep(payload.get("pause", 0))


@handler("acceptance.tally", queue="work", retry=SOON)
def tally(delivery: Any) -> None:
    """Read all effects, then write one with the isolation level seen."""
    begin(delivery)
    with connection.cursor() as cursor:
        cursor.execute(
            "select current_setting('transaction_isolation'), count(*) from acceptance_effect"
        )
        level = cursor.fetchone()[0]
    witness().saw(level.replace(" ", "-"), delivery.attempt)
    effect(delivery)


@handler("acceptance.gate", queue="work", queues=OTHERS, retry=SOON)
def gate(delivery: Any) -> None:
    """Write, then wait inside the transaction."""
    begin(delivery)
    effect(delivery)
    witness().wait_at(gate_of(delivery))


@handler("acceptance.late", queue="work", retry=SOON)
def late(delivery: Any) -> None:
    """Wait before the first use of the connection, then write."""
    begin(delivery)
    witness().wait_at(gate_of(delivery))
    effect(delivery)


@handler("acceptance.query", queue="work", timeout=1, retry=SOON)
def query(delivery: Any) -> None:
    """Like `hang`, but inside a statement: the server is busy, and does not listen."""
    payload = begin(delivery)
    effect(delivery)
    if delivery.attempt < payload["until"]:
        with connection.cursor() as cursor:
            cursor.execute("select pg_sleep(60)")


@handler("acceptance.spin", queue="work", timeout=1, retry=SOON)
def spin(delivery: Any) -> None:
    """Like `hang`, but in C code that keeps the interpreter's lock."""
    payload = begin(delivery)
    effect(delivery)
    if delivery.attempt < payload["until"]:
        re.fullmatch("(a+)+", "a" * 60 + "b")


@handler("acceptance.die", queue="work", retry=SOON)
def die(delivery: Any) -> None:
    """Write, then end the process, unless the attempt is the one in `until`.

    `how` is an exit code, or one of `WAYS_TO_DIE`.
    """
    payload = begin(delivery)
    effect(delivery)
    if delivery.attempt == payload.get("until"):
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if payload["how"] in WAYS_TO_DIE:
        WAYS_TO_DIE[payload["how"]]()
    os._exit(payload["how"])


@handler("acceptance.exhaust", queue="work", retry=SOON)
def exhaust(delivery: Any) -> None:
    """Write, then run out of memory or of stack, unless the attempt is the one in `until`."""
    payload = begin(delivery)
    effect(delivery)
    if delivery.attempt < payload["until"]:
        deeper() if payload["how"] == "RecursionError" else bytearray(sys.maxsize)


def deeper() -> None:
    deeper()


@handler("acceptance.list", queue="lists", batch=True, atomic=False, retry=SOON)
def answered_one_by_one(deliveries: list[Any]) -> None:
    """Write for each, fail those with `fails` at their first attempt, then wait at the gate."""
    for delivery in deliveries:
        begin(delivery)
        effect(delivery)
        if delivery.payload.get("fails") and delivery.attempt == 1:
            delivery.fail(ValueError())
    witness().wait_at(gate_of(deliveries[0]))


@handler("acceptance.hang", queue="work", queues=OTHERS, timeout=1, retry=SOON)
def hang(delivery: Any) -> None:
    """Write, then run past the timeout of 1 s, unless the attempt is the one in `until`."""
    payload = begin(delivery)
    effect(delivery)
    if delivery.attempt < payload["until"]:
        witness().wait_at("never")


@handler("acceptance.hook", queue="work", timeout=1, retry=SOON)
def hook(delivery: Any) -> None:
    """Write, and leave an on_commit hook that runs past the timeout of 1 s."""
    begin(delivery)
    effect(delivery)
    transaction.on_commit(lambda: witness().wait_at("never"))


@handler("acceptance.ahang", queue="acalls", timeout=1, retry=SOON)
async def ahang(delivery: Any) -> None:
    """Like `hang`, but async: it can be cancelled."""
    payload = begin(delivery)
    if delivery.attempt < payload["until"]:
        await asyncio.sleep(PATIENCE)
    await delivery.afinish(effect, delivery)


@handler("acceptance.agate", queue="acalls", retry=SOON)
async def agate(delivery: Any) -> None:
    """Like `acall`, but it waits on the loop, where a cancel ends the wait."""
    begin(delivery)
    while not witness().is_open(gate_of(delivery)):
        await asyncio.sleep(0.02)
    await delivery.afinish(effect, delivery)


@handler("acceptance.ablock", queue="acalls", timeout=1, retry=SOON)
async def ablock(delivery: Any) -> None:
    """Like `ahang`, but in a thread: it blocks the thread of all async handlers."""
    payload = begin(delivery)
    if delivery.attempt < payload["until"]:
        await sync_to_async(witness().wait_at)("never")
    await delivery.afinish(effect, delivery)


@handler("acceptance.aclean", queue="acalls", retry=SOON)
async def aclean(delivery: Any) -> None:
    """Wait until the drain cancels it, then clean up."""
    payload = begin(delivery)
    try:
        await asyncio.sleep(PATIENCE)
    finally:
        await asyncio.sleep(0.1)
        witness().saw(f"cleaned-{payload['name']}", delivery.attempt)


@handler("acceptance.athread", queue="acalls", timeout=1, retry=SOON)
async def athread(delivery: Any) -> None:
    """Like `ablock`, but in one of the other threads."""
    payload = begin(delivery)
    if delivery.attempt < payload["until"]:
        await asyncio.to_thread(witness().wait_at, "never")
    await delivery.afinish(effect, delivery)


@handler("acceptance.abrief", queue="acalls", retry=SOON)
async def abrief(delivery: Any) -> None:
    """Async, and finished at once."""
    begin(delivery)


@handler("acceptance.ablockloop", queue="acalls", retry=SOON)
async def ablockloop(delivery: Any) -> None:
    """Wait like a plain function: it blocks the event loop."""
    begin(delivery)
    witness().wait_at(gate_of(delivery))


@handler("acceptance.fail", queue="work", retry=SOON)
def fail(delivery: Any) -> None:
    """Write, then raise, unless the attempt is the one in `until`."""
    payload = begin(delivery)
    effect(delivery)
    if delivery.attempt < payload["until"]:
        raise ValueError(payload["name"])


@handler("acceptance.chain", queue="work", retry=SOON)
def chain(delivery: Any) -> None:
    """Write, and broadcast a message that writes."""
    payload = begin(delivery)
    effect(delivery)
    broadcast("acceptance.write", {"name": payload["name"] + ".next"})


@handler("acceptance.clock", queue="work", retry=SOON)
def clock(delivery: Any) -> None:
    """Write the message's age, retry once, and broadcast a delayed message and one that expires."""
    payload = begin(delivery)
    name = payload["name"]
    if delivery.attempt == 1:
        raise Retry(0.1)
    effect(delivery)
    witness().saw(f"age-{delivery.age.total_seconds():.0f}", delivery.attempt)
    witness().saw(f"clock-{time.time():.0f}", delivery.attempt)
    broadcast("acceptance.write", {"name": f"{name}.later"}, after=3600)
    broadcast("acceptance.write", {"name": f"{name}.now"}, expires=3600)


@handler("acceptance.echo", queue="answers")
def echo(delivery: Any) -> Any:
    """Return the question."""
    return delivery.payload


@handler("acceptance.twin", queue="work", retry=SOON)
def first_twin(delivery: Any) -> None:
    effect(delivery)


@handler("acceptance.twin", queue="work", retry=SOON)
def second_twin(delivery: Any) -> None:
    effect(delivery)


@handler("acceptance.grow", queue="work", retry=SOON)
def grow(delivery: Any) -> None:
    """Keep the requested megabytes for ever."""
    payload = begin(delivery)
    _hoard.append(bytearray(os.urandom(1024) * 1024 * payload["megabytes"]))
    effect(delivery)


@handler("acceptance.call", queue="calls", atomic=False, retry=SOON)
def call(delivery: Any) -> None:
    """Not atomic: wait outside any transaction, then write with the ack."""
    begin(delivery)
    witness().wait_at(gate_of(delivery))
    with delivery.finish():
        effect(delivery)


@handler("acceptance.acall", queue="acalls", retry=SOON)
async def acall(delivery: Any) -> None:
    """Async: the same."""
    begin(delivery)
    await asyncio.to_thread(witness().wait_at, gate_of(delivery))
    await delivery.afinish(effect, delivery)


@handler(
    "acceptance.line",
    queue="line",
    queues=("keyed",),
    retry=RetryPolicy(max_attempts=1000, backoff=fixed(0.02)),
)
def line(delivery: Any) -> None:
    """Write, unless another of its line writes at the same time; fail `share` of the attempts.

    Messages with the same `line` in the payload must be handled one after another.
    """
    payload = delivery.payload
    with connection.cursor() as cursor:
        cursor.execute(
            "select pg_try_advisory_xact_lock(hashtextextended(%s, 99))", [payload["line"]]
        )
        if not cursor.fetchone()[0]:
            witness().saw(f"overlap-{payload['line']}", delivery.attempt)
    effect(delivery)
    if random.random() < payload.get("share", 0):
        raise ValueError("as asked for")
    time.sleep(payload.get("pause", 0))


@handler(
    "acceptance.service",
    queue="service",
    retry=RetryPolicy(max_attempts=1000, backoff=fixed(0.02)),
)
def service(delivery: Any) -> None:
    """Write the number of messages of the queue that are in flight; fail while `up` is shut.

    It waits at its `gate`, if it has one.
    """
    payload = begin(delivery)
    with connection.cursor() as cursor:
        cursor.execute(
            "select count(*) from django_mq_queuedmessage"
            " where queue = %s and leased_until is not null",
            [delivery.queue],
        )
        witness().saw(f"flying-{cursor.fetchone()[0]}", delivery.attempt)
    effect(delivery)
    time.sleep(payload.get("pause", 0))
    if "gate" in payload:
        witness().wait_at(gate_of(delivery))
    if not witness().is_open("up"):
        raise ConnectionError("the service is down")
