"""The error of a broadcast() outside atomic(): it names the block that the caller can use."""

from __future__ import annotations

from django.db import connections

from django_mq.exceptions import NotInTransaction
from django_mq.messages import current_delivery, foreign_alias, is_on_loop
from django_mq.outbox.blocks import in_own_atomic

_ANYWHERE = """\
broadcast() needs an open atomic() block on the database {alias!r}, so that the message commits \
with your data:

    with transaction.atomic(using={alias!r}):
        order.save()
        broadcast("shop.orders.placed", {{"order_id": order.pk}})

A post_save receiver runs after its own save has committed: open the block around the code that \
saves, or set ATOMIC_REQUESTS. In a receiver of a signal that is not yours, open it around \
broadcast() alone: if the sender has no transaction, the message commits right after the data, and \
a process that dies in between leaves the data without its message (see the guide "Signals of code \
that is not yours"). An on_commit() hook runs after the commit: call broadcast() in the block \
itself; no worker sees the message before the commit. The block that TestCase opens does not \
count. In async code, put this into a function and await sync_to_async(function)(), or use \
abroadcast(), which commits by itself. \
DJANGO_MQ = {{"REQUIRE_ATOMIC": False}} turns this check off."""

_ON_ANOTHER = """\
broadcast() writes to the database {alias!r}, but the open atomic() block is on {names}. To commit \
the message with your data, pass using={other!r}, if the tables of django_mq are there too; else \
also open transaction.atomic(using={alias!r}), which commits separately."""


def not_in_transaction(alias: str) -> NotInTransaction:
    """Return the error of a broadcast into `alias` while no block is open there.

    In a handler the text is short: logs and `mq_why` show its first 500 characters.
    """
    if open_on := _open_blocks():
        names = " and ".join(map(repr, open_on))
        return NotInTransaction(_ON_ANOTHER.format(alias=alias, names=names, other=open_on[0]))
    delivery = current_delivery.get()
    if delivery is None:
        return NotInTransaction(_ANYWHERE.format(alias=alias))
    block = "transaction.atomic()"
    if is_foreign := foreign_alias(alias) is not None:
        block = f"transaction.atomic(using={alias!r})"
    if delivery._is_atomic:
        return NotInTransaction(
            f"broadcast() for the handler {delivery.handler}, but outside its transaction, as in an"
            f" on_commit hook: call it in the handler itself, or inside {block}"
        )
    return NotInTransaction(
        f"broadcast() in the handler {delivery.handler}, which is not atomic:"
        f" {_advice(block, finishes=delivery._can_finish and not is_foreign)}"
    )


def _open_blocks() -> list[str]:
    """Return the aliases on which the caller has a block open."""
    return [
        connection.alias
        for connection in connections.all(initialized_only=True)
        if in_own_atomic(connection)
    ]


def _advice(block: str, *, finishes: bool) -> str:
    """Return what a handler outside transactions can do; `finishes`: it may call `finish()`."""
    if is_on_loop():
        advice = "`await abroadcast()`, which commits by itself"
        if finishes:
            return (
                "put it into a function and `await delivery.afinish(function)` (then it commits"
                f" with the ack), or {advice}"
            )
        return advice
    if finishes:
        return (
            "call it inside `with delivery.finish():` (then it commits with the ack), or inside"
            f" {block}"
        )
    return f"call it inside {block}"
