"""The messages sent at each point: a few, on one way through the worker or several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db import transaction

from django_mq import Message, broadcast, broadcast_many, request
from tests.faults.app import ledger
from tests.faults.app.ledger import Promise

#: Seconds until delayed messages fall due: far beyond a point.
LATER = 3600


@dataclass(frozen=True, slots=True)
class Scenario:
    """`send` broadcasts the messages, inside one transaction.

    Without a fault these hold: `fifo`, they start in the order in which they were sent; `once`,
    none runs again except after its own failure. `kinds` limits the scenario to these kinds of
    faults. Where messages run `beside` each other, a fault at one's request may end the process
    just before the first line of another, which the scoreboard lists as running: that one is
    charged. `in_call` is the largest number of messages in one call of a handler. `recorded`: the
    row of a message shows that its handler started, so the loss of a host charges no other message.
    """

    send: Callable[[], None]
    fifo: bool = True
    once: bool = True
    beside: bool = False
    in_call: int = 1
    recorded: bool = False
    kinds: tuple[str, ...] = ()

    def begin(self) -> None:
        """Send the messages and commit."""
        with transaction.atomic(using=ledger.ALIAS):
            self.send()


def _message(
    kind: str,
    name: str,
    promise: Promise = "once",
    *,
    fails: int = 0,
    line: str | None = None,
    **options: Any,
) -> Message:
    """Record a message as sent, and return it."""
    ledger.sent(name, promise, line=line, fails=fails, waits="after" in options)
    return Message(f"faults.{kind}", {"name": name, "fails": fails}, **options)


def writes() -> None:
    """Sent by one statement, so that all are due at the same moment."""
    messages = [_message("write", f"w{number}", fails=int(number == 2)) for number in range(4)]
    broadcast_many([*messages, _message("write", "later", after=LATER)])


def reads() -> None:
    broadcast_many(
        [_message("read", f"r{number}", "run", fails=int(number == 1)) for number in range(4)]
    )


def unused() -> None:
    broadcast_many(
        [_message("nothing", f"n{number}", "run", fails=int(number == 3)) for number in range(5)]
    )


def mixed() -> None:
    messages = []
    for number in range(2):
        messages.append(_message("nothing", f"n{number}", "run"))
        messages.append(_message("write", f"w{number}", fails=number))
        messages.append(_message("read", f"r{number}", "run"))
    broadcast_many(messages)


def calls() -> None:
    broadcast_many(
        [_message("call", f"c{number}", "repeat", fails=int(number == 1)) for number in range(3)]
    )


def finishes() -> None:
    broadcast_many(
        [_message("finish", f"f{number}", fails=int(number == 1)) for number in range(3)]
    )


def coroutines() -> None:
    messages = []
    for number in range(2):
        messages.append(_message("acall", f"a{number}", "run", fails=number))
        messages.append(_message("afinish", f"f{number}", fails=number))
    broadcast_many(messages)


def batches() -> None:
    broadcast_many([_message("batch", f"b{number}", fails=int(number == 3)) for number in range(4)])


def idle_batches() -> None:
    """Lists whose handler leaves its connection alone: they start without a lock."""
    broadcast_many(
        [_message("idle_batch", f"b{number}", "run", fails=int(number == 3)) for number in range(5)]
    )


def lists() -> None:
    """Lists outside any transaction, in which one message gets the verdict that it failed."""
    broadcast_many(
        [_message("list", f"l{number}", "repeat", fails=int(number == 1)) for number in range(5)]
    )


def alists() -> None:
    broadcast_many(
        [_message("alist", f"a{number}", "repeat", fails=int(number == 1)) for number in range(5)]
    )


def keyed() -> None:
    messages = []
    for number in range(3):
        messages.append(_message("write", f"a{number}", line="a", key="a", fails=int(number == 1)))
        messages.append(_message("write", f"b{number}", line="b", key="b"))
    broadcast_many(messages)


def ordered() -> None:
    broadcast_many(
        [
            _message("ordered", f"o{number}", line="ordered", fails=int(number == 1))
            for number in range(3)
        ]
    )


def uniques() -> None:
    for number in range(2):
        name, unique = f"u{number}", f"id{number}"
        ledger.sent(name, "once", fails=number)
        payload = {"name": name, "unique": unique, "again": True, "fails": number}
        broadcast("faults.unique", payload, unique_id=unique)
        broadcast("faults.unique", {"name": "a duplicate"}, unique_id=unique)


def replies() -> None:
    for number in range(3):
        name, fails = f"q{number}", int(number == 1)
        pending = request("faults.answer", {"name": name, "fails": fails})
        ledger.sent(name, "once", fails=fails, request=pending.id)


def easing() -> None:
    broadcast_many(
        [_message("easing", f"e{number}", fails=int(number == 0)) for number in range(3)]
    )


def chains() -> None:
    broadcast_many([_message("chain", f"h{number}", fails=number) for number in range(2)])


def neighbours() -> None:
    """Handlers that use nothing share a slice with one that ends its transaction."""
    broadcast_many(
        [_message("choosy", f"n{number}", "run", fails=int(number == 8)) for number in range(12)]
    )


def long() -> None:
    broadcast_many([_message("finish", "l0")])


SCENARIOS = {
    "writes": Scenario(writes),
    "reads": Scenario(reads),
    "unused": Scenario(unused),
    "mixed": Scenario(mixed),
    "calls": Scenario(calls, recorded=True),
    "finishes": Scenario(finishes, recorded=True),
    "coroutines": Scenario(coroutines, fifo=False, beside=True),
    "batches": Scenario(batches, once=False, in_call=4),
    "idle_batches": Scenario(idle_batches, once=False, in_call=5),
    "lists": Scenario(lists, beside=True),
    "alists": Scenario(alists, fifo=False, beside=True),
    "keyed": Scenario(keyed, fifo=False),
    "ordered": Scenario(ordered),
    "uniques": Scenario(uniques, fifo=False),
    "replies": Scenario(replies),
    "easing": Scenario(easing, fifo=False),
    "chains": Scenario(chains, fifo=False),
    "neighbours": Scenario(neighbours, kinds=("none",)),
    "long": Scenario(long, kinds=("twins",)),
}
