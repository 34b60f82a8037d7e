"""The level at which a queue backs off: which ends move it, and how long each level waits.

One level for the queue and the whole fleet, zero at first. While it is above zero nothing of the
queue is claimed but one message after each wait, the probe.
"""

from __future__ import annotations

from enum import IntEnum

from django_mq.backoff import Random
from django_mq.exceptions import Reject, Retry
from django_mq.outcomes import Acked, AttemptEnded, DeadLettered, Outcome, Retried


class Step(IntEnum):
    """What the end of a delivery says about its queue."""

    DOWN = -1
    STAY = 0
    UP = 1


def step_of(outcome: Outcome | None, error: BaseException | None) -> Step:
    """Return where the end of a delivery moves the level of its queue.

    `error` is what the handler raised. Done, or rejected: the handler works, down. Failed, or
    `Retry(backoff=True)`: up. Everything else says nothing about what the handler needs: `Retry`,
    `Snooze`, a timeout, a lost worker, and (no `outcome`) a message that was held or expired.

    >>> step_of(Acked(), None).name, step_of(None, None).name
    ('DOWN', 'STAY')
    """
    if isinstance(outcome, Acked):
        return Step.DOWN
    if isinstance(outcome, Retried):
        return Step.UP if outcome.backoff else Step.STAY
    if not isinstance(outcome, DeadLettered) or error is None:
        return Step.STAY
    if isinstance(error, Reject):
        return Step.DOWN
    if isinstance(error, AttemptEnded):
        return Step.STAY
    if isinstance(error, Retry):  # on its last attempt; one that lost its attributes is an error
        return Step.UP if vars(error).get("backoff", True) else Step.STAY
    return Step.UP


def wait(level: int, *, multiplier: float, maximum: float) -> float:
    """Return how long, in seconds, a queue waits at `level`, without jitter.

    min(multiplier * 2 ** level, maximum).
    Source: the backoff of NSQ's consumers.

    >>> [wait(level, multiplier=1.0, maximum=120.0) for level in (1, 2, 6, 7)]
    [2.0, 4.0, 64.0, 120.0]
    """
    return min(multiplier * 2.0**level, maximum)


def top_level(*, multiplier: float, maximum: float) -> int:
    """Return the level above which no wait is longer, so that the level stops there.

    Zero if `maximum` is zero: such a queue never backs off.

    >>> top_level(multiplier=1.0, maximum=120.0), top_level(multiplier=500.0, maximum=120.0)
    (7, 1)
    >>> top_level(multiplier=1.0, maximum=0.0)
    0
    """
    if maximum <= 0:
        return 0
    level = 1
    while wait(level, multiplier=multiplier, maximum=maximum) < maximum:
        level += 1
    return level


def jittered_waits(
    *, multiplier: float, maximum: float, jitter: float, random: Random
) -> list[float]:
    """Return the waits, in seconds, of the levels from 1 to the top.

    Each is longer or shorter by the same share, `jitter` at most: queues that fail together do
    not probe together for ever. `random` gives a number in [0, 1).

    >>> jittered_waits(multiplier=1.0, maximum=6.0, jitter=0.1, random=lambda: 0.5)
    [2.0, 4.0, 6.0]
    >>> jittered_waits(multiplier=1.0, maximum=6.0, jitter=0.5, random=lambda: 0.0)
    [1.0, 2.0, 3.0]
    """
    share = 1.0 + jitter * (2.0 * random() - 1.0)
    top = top_level(multiplier=multiplier, maximum=maximum)
    levels = range(1, top + 1)
    return [share * wait(level, multiplier=multiplier, maximum=maximum) for level in levels]
