"""How many messages one statement may claim, by the sizes of payloads that were claimed before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from django_mq.messages import ClaimedRow
from django_mq.worker.queue_options import ClaimOptions

#: The factor by which the limit of a statement grows at most from one claim to the next.
GROWTH = 4
#: A queue is taken to be like the others if that many claims before, of any queues, were alike.
SIMILAR_CLAIMS = 8


class ClaimSizes:
    """Limits claims so that their payloads probably fit into `batch_bytes`.

    The statement reads and locks all rows up to its limit before `batch_bytes` cuts them: 100
    payloads of 1 MB for the four that fit. The limit is that of the queue with which a statement
    begins: large messages of one must not slow the others down. After large messages it grows step
    by step, because more large ones may come behind a few small ones.
    """

    def __init__(self) -> None:
        self._fitting: dict[tuple[ClaimOptions, str], int] = {}
        self._recent: dict[ClaimOptions, deque[int]] = {}

    def fitting(self, queue: str, options: ClaimOptions) -> int:
        """Return how many messages of `queue` to claim at most.

        If none was claimed yet, this is a batch, or more if all recent claims had small payloads:
        a worker of 1,000 queues with few messages each claims from new queues all the time.
        """
        found = self._fitting.get((options, queue))
        if found is not None:
            return found
        recent = self._recent.get(options, ())
        return max(options.batch_size, min(recent) if len(recent) == SIMILAR_CLAIMS else 0)

    def record(self, queue: str, options: ClaimOptions, rows: Sequence[ClaimedRow]) -> int:
        """Record the size of `rows`, of a claim that began with `queue`; return it in bytes."""
        size = _payload_bytes(rows)
        if size:
            fitting = options.batch_bytes * len(rows) // size
            for each in {queue, *map(attrgetter("queue"), rows)}:
                most = GROWTH * self.fitting(each, options)
                self._fitting[options, each] = max(1, min(fitting, most))
            recent = self._recent.setdefault(options, deque(maxlen=SIMILAR_CLAIMS))
            recent.append(fitting)
        return size


def _payload_bytes(rows: Sequence[ClaimedRow]) -> int:
    payloads = [row.payload for row in rows]
    if all(map(str.isascii, payloads)):
        return sum(map(len, payloads))
    return sum(len(payload.encode()) for payload in payloads)
