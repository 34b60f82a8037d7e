"""The backoff level of a queue: which outcomes move it, and how long each level waits.

A queue has one level for the whole fleet, zero at first. While it is above zero, only one message
of the queue is claimed after each wait: the probe.
"""

from __future__ import annotations

from enum import IntEnum
from math import ldexp

from django_mq.exceptions import Reject, Retry, TooManyHops, UnexpectedPayload
from django_mq.policy.backoff import Random
from django_mq.policy.outcomes import AttemptEnded, DeadLettered, Outcome, Retried, Snoozed


class Step(IntEnum):
    """How the outcome of a delivery moves the level of its queue."""

    DOWN = -1
    STAY = 0
    UP = 1


def step_of(outcome: Outcome | None, error: BaseException | None) -> Step:
    """Return how the end of a delivery that was not acked moves the level of its queue.

    `error` is the handler's error. DOWN if the message was rejected: the handler works, as after an
    ack. UP if it failed, or raised `Retry` or `Snooze` with `backoff=True`. STAY if the end says
    nothing about the services that the handler needs: `Retry` and `Snooze` without `backoff=True`,
    a timeout, a lost worker, an unexpected payload, a chain of more than MAX_HOPS, and a message
    that was held or expired (`outcome` is None).

    >>> step_of(None, None).name
    'STAY'
    """
    if isinstance(outcome, Retried | Snoozed):
        return Step.UP if outcome.backoff else Step.STAY
    if not isinstance(outcome, DeadLettered) or error is None:
        return Step.STAY
    kind = type(error)  # not isinstance(), which reads the error's own `__class__`
    if issubclass(kind, Reject):
        return Step.DOWN
    if issubclass(kind, AttemptEnded | UnexpectedPayload | TooManyHops):
        return Step.STAY
    if issubclass(kind, Retry):  # on its last attempt; without its attributes it is an error
        return Step.UP if vars(error).get("backoff", True) else Step.STAY
    return Step.UP


def wait(level: int, *, multiplier: float, maximum: float) -> float:
    """Return how long, in seconds, a queue waits at `level`, without jitter.

    min(multiplier * 2 ** level, maximum).
    Source: the backoff of NSQ consumers.

    >>> [wait(level, multiplier=1.0, maximum=120.0) for level in (1, 2, 6, 7)]
    [2.0, 4.0, 64.0, 120.0]
    """
    return min(ldexp(multiplier, level), maximum)  # 2.0 ** 1024 would overflow


def top_level(*, multiplier: float, maximum: float) -> int:
    """Return the highest level: no wait would be longer above it.

    Zero if `maximum` is zero: the queue never backs off.

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

    All are longer or shorter by the same share, at most `jitter`, so that queues that fail together
    do not always probe together. `random` returns a number in [0, 1).

    >>> jittered_waits(multiplier=1.0, maximum=6.0, jitter=0.1, random=lambda: 0.5)
    [2.0, 4.0, 6.0]
    >>> jittered_waits(multiplier=1.0, maximum=6.0, jitter=0.5, random=lambda: 0.0)
    [1.0, 2.0, 3.0]
    """
    share = 1.0 + jitter * (2.0 * random() - 1.0)
    top = top_level(multiplier=multiplier, maximum=maximum)
    levels = range(1, top + 1)
    return [share * wait(level, multiplier=multiplier, maximum=maximum) for level in levels]
