"""What the asker of a message gets: made where the handler ran, stored where it is settled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

from django_mq.conf import get_settings
from django_mq.encoding import encode
from django_mq.outcomes import DeadLettered
from django_mq.store import results
from django_mq.store.results import Answer
from django_mq.worker import ending  # each imports the other, so neither's names

if TYPE_CHECKING:
    from django_mq.messages import Delivery
    from django_mq.store import Cursor
    from django_mq.worker.ending import Ended


class Encoded(dict[int, str]):
    """What a handler returned, as JSON text, by the message that it answers."""


def encoded(result: Any, argument: Delivery | list[Delivery]) -> Any:
    """Return what a handler returned, `Encoded` where somebody asked for it, else as it is.

    `argument` is what the handler was called with. Of a batch each message gets its own value
    of a list or tuple, which must be as long; anything else answers all of them. Raises
    InvalidPayload for what cannot be stored, ValueError for a list of another length: the
    handler has failed, as if it had raised it.
    """
    deliveries = argument if isinstance(argument, list) else [argument]
    asked = [each for each in deliveries if each._row.wants_result]
    if not asked or getattr(asked[0], "finished", False):  # `finish()` had the last word
        return result
    values: Iterable[Any] = repeat(result)
    if isinstance(argument, list) and isinstance(result, list | tuple):
        if len(result) != len(argument):
            raise ValueError(
                f"the handler of a batch returned {len(result)} results for {len(argument)}"
                " messages: return one for each, or one that is no list for all"
            )
        values = result
    return Encoded(
        (delivery.id, text(value))
        for delivery, value in zip(deliveries, values, strict=False)
        if delivery._row.wants_result
    )


def text(value: Any) -> str:
    """Return what a handler returned as JSON text, within the limits of a payload."""
    settings = get_settings()
    return encode(
        value,
        what="result",
        max_bytes=settings.max_payload_bytes,
        max_depth=settings.max_depth,
        encoder=settings.encoder_class,
    )


def store(cursor: Cursor, answers: Sequence[Answer]) -> None:
    """Store answers in the transaction that settles, and tell whoever waits for them."""
    results.store(cursor, answers, ring=get_settings().wakeup != "poll")


def follow(cursor: Cursor, ended: Sequence[Ended]) -> None:
    """Answer those who asked: with the value, or with the error that was the last."""
    answers = [
        answer for each in ended if each.delivery._row.wants_result and (answer := _answer(each))
    ]
    if answers:
        store(cursor, answers)


def _answer(ended: Ended) -> Answer | None:
    """Return what to store; None while there is hope, and for what answered by itself."""
    delivery, outcome = ended.delivery, ended.outcome
    if isinstance(outcome, DeadLettered):
        failure = outcome.failure
        return Answer(delivery.id, delivery.handler, None, failure.error_class, failure.text)
    if ended.settled is ending.Settled.BURIED:
        return Answer(delivery.id, delivery.handler, None, results.UNANSWERED, ended.reason)
    if isinstance(ended.result, Encoded):
        return Answer(delivery.id, delivery.handler, ended.result[delivery.id])
    return None
