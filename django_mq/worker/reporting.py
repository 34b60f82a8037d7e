"""What the worker says of each delivery: a count, a signal and a line in the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from django_mq import signals
from django_mq.outcomes import DeadLettered, Retried, one_line
from django_mq.worker import timings
from django_mq.worker.ending import ACKED, Settled
from django_mq.worker.timings import queued_for

if TYPE_CHECKING:
    from django_mq.messages import Delivery
    from django_mq.worker.ending import Ended

logger = logging.getLogger("django_mq")


def started(delivery: Delivery) -> None:
    """A handler is about to get `delivery`."""
    signals.announce(signals.message_started, delivery, "started", queued_for=queued_for(delivery))


def all_ended(ended: Sequence[Ended]) -> None:
    """Several deliveries are settled, and that is committed."""
    timings.count(ended)
    told = ended
    if not signals.wanted(signals.message_acked):
        told = [each for each in ended if each.settled is not ACKED]
    for each in told:
        _say(each)


def one_ended(ended: Ended) -> None:
    """A delivery is settled, and that is committed."""
    all_ended([ended])


def _say(ended: Ended) -> None:
    delivery, outcome = ended.delivery, ended.outcome
    if ended.settled in (Settled.ACKED, Settled.FINISHED):
        if signals.wanted(signals.message_acked):
            signals.announce(
                signals.message_acked,
                delivery,
                f"acked after {ended.seconds:.3f} s",
                duration=ended.seconds,
                queued_for=queued_for(delivery),
                error=ended.error,
            )
    elif ended.settled is Settled.BURIED or isinstance(outcome, DeadLettered):
        reason = outcome.reason if isinstance(outcome, DeadLettered) else ended.reason
        cause = f" ({outcome.failure.summary})" if isinstance(outcome, DeadLettered) else ""
        signals.announce(
            signals.message_dead,
            delivery,
            f"is dead: {reason}{cause}",
            duration=ended.seconds,
            queued_for=queued_for(delivery),
            error=ended.error,
            reason=reason,
        )
    elif isinstance(outcome, Retried):
        if outcome.warning:
            logger.warning(
                "message %s: %s", delivery.id, outcome.warning, extra={"event": "bad_backoff"}
            )
        signals.announce(
            signals.message_retried,
            delivery,
            f"failed ({outcome.failure.summary}); again {_when(outcome.after)}",
            duration=ended.seconds,
            queued_for=queued_for(delivery),
            error=ended.error,
            after=outcome.after,
        )
    elif ended.settled is Settled.HELD:
        logger.warning(
            "message %s (%s, queue %s) is held: %s",
            delivery.id,
            delivery.type,
            delivery.queue,
            ended.reason,
            extra={"event": "message_held", "message_id": delivery.id, "queue": delivery.queue},
        )


def failed_after_finish(delivery: Delivery, error: BaseException) -> None:
    """A handler raised when its message was finished: it is done, and the error is a bug."""
    logger.error(
        "message %s (queue %s, handler %s) is finished, but its handler raised afterwards",
        delivery.id,
        delivery.queue,
        delivery.handler,
        exc_info=error,
        extra={"event": "failed_after_finish", "message_id": delivery.id},
    )


def lease_lost(delivery: Delivery) -> None:
    """A delivery turned out to be no longer ours: what its handler wrote is undone."""
    logger.warning(
        "message %s (queue %s, attempt %s): LeaseLost, it was taken over or removed meanwhile;"
        " nothing of this attempt was kept",
        delivery.id,
        delivery.queue,
        delivery.attempt,
        extra={"event": "lease_lost", "message_id": delivery.id, "queue": delivery.queue},
    )


def refused(ended: Sequence[Ended], error: BaseException) -> None:
    """The database answers, but does not take what became of these deliveries."""
    for each in ended:
        logger.error(
            "message %s (queue %s, attempt %s): the database refuses to settle it (%s); its lease"
            " lapses, and the attempt counts",
            each.delivery.id,
            each.delivery.queue,
            each.delivery.attempt,
            one_line(str(error)),
            extra={
                "event": "settle_refused",
                "message_id": each.delivery.id,
                "queue": each.delivery.queue,
            },
        )


def _when(after: float | datetime) -> str:
    return f"at {after.isoformat()}" if isinstance(after, datetime) else f"in {after:.3g} s"
