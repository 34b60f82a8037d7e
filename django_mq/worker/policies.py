"""Which retry policy a message has: its own, else its handler's, its queue's, the default."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from django_mq import handlers
from django_mq.backoff import RetryPolicy
from django_mq.conf import Settings
from django_mq.messages import ClaimedRow

logger = logging.getLogger("django_mq")


def policies(settings: Settings) -> Callable[[ClaimedRow], RetryPolicy]:
    """Return the function that gives the retry policy of a row."""

    def policy_of(row: ClaimedRow) -> RetryPolicy:
        if row.retry is not None:
            try:
                return RetryPolicy.from_data(json.loads(row.retry))
            except (ValueError, RecursionError) as error:
                logger.warning(
                    "message %s carries a retry policy that is none (%s); its handler's holds",
                    row.id,
                    error,
                    extra={"event": "bad_policy", "message_id": row.id},
                )
        return handlers.retry_of(handlers.get(row.handler), row.queue, settings)

    return policy_of
