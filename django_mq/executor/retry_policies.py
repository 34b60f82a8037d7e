"""The retry policy of a message: its own, else its handler's, its queue's, or the default."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from django_mq import handlers
from django_mq.conf import Settings
from django_mq.messages import ClaimedRow
from django_mq.policy.backoff import RetryPolicy

logger = logging.getLogger("django_mq")


def policies(settings: Settings, *, floor: float) -> Callable[[ClaimedRow], RetryPolicy]:
    """Return the function from a row to its retry policy.

    From the second retry on, a message waits at least `floor` seconds.
    """

    def policy_of(row: ClaimedRow) -> RetryPolicy:
        return chosen(row).with_floor(floor)

    def chosen(row: ClaimedRow) -> RetryPolicy:
        if row.retry is not None:
            try:
                return RetryPolicy.from_data(json.loads(row.retry))
            except (ValueError, RecursionError) as error:
                logger.warning(
                    "message %s carries an invalid retry policy (%s); its handler's policy applies",
                    row.id,
                    error,
                    extra={"event": "bad_policy", "message_id": row.id, "queue": row.queue},
                )
        return handlers.retry_of(handlers.get(row.handler), row.queue, settings)

    return policy_of
