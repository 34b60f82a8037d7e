"""Retry policies: how often a message is tried, and how long it waits after a failed attempt.

A policy made of numbers can be stored in a message as data (`to_data`, `from_data`); a policy with
a callable of yours belongs on a handler or in the settings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, cast

from django_mq.exceptions import InvalidOption
from django_mq.policy.plain_text import one_line
from django_mq.values import Seconds, as_seconds, short_repr

#: Returns a number in [0, 1), like `random.random`; passed in, so that tests can choose it.
Random = Callable[[], float]
Jitter = Literal["equal", "full", "none"]

#: The longest wait, in seconds: a wrong unit must not park a message until the year 9999.
MAX_WAIT = 366 * 86400.0
#: Far more than is useful, and far below the limit of the column, so that a requeue can add to it.
MAX_ATTEMPTS = 1_000_000
#: The maximum number of intervals, all of which each message stores.
MAX_INTERVALS = 100


class BackoffFailed(Exception):
    """The callable of a policy raised, or returned an invalid wait; the cause is chained."""


class BackoffStrategy(ABC):
    """A backoff made of numbers, so that it can be stored and read back."""

    __slots__ = ()
    kind: ClassVar[str]

    @abstractmethod
    def delay(self, attempt: int, random: Random) -> float:
        """Return the seconds to wait after failed attempt `attempt` (the first is 1)."""

    def to_data(self) -> dict[str, Any]:
        """Return the kind and the numbers as JSON data."""
        return {"kind": self.kind, **asdict(cast(Any, self))}


@dataclass(frozen=True, slots=True)
class Exponential(BackoffStrategy):
    """See `exponential()`."""

    kind = "exponential"
    base: float
    factor: float
    cap: float
    jitter: Jitter

    def delay(self, attempt: int, random: Random) -> float:
        try:
            ceiling = min(self.cap, self.base * self.factor ** (attempt - 1))
        except OverflowError:
            ceiling = self.cap
        if self.jitter == "equal":
            return ceiling * (1 + random()) / 2
        if self.jitter == "full":
            return ceiling * (1 - random())  # in (0, ceiling]: no wait at all would be a busy loop
        return ceiling


@dataclass(frozen=True, slots=True)
class Fixed(BackoffStrategy):
    """See `fixed()`."""

    kind = "fixed"
    seconds: float

    def delay(self, attempt: int, random: Random) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class Intervals(BackoffStrategy):
    """See `intervals()`."""

    kind = "intervals"
    seconds: tuple[float, ...]

    def delay(self, attempt: int, random: Random) -> float:
        return self.seconds[min(attempt, len(self.seconds)) - 1]

    def to_data(self) -> dict[str, Any]:
        return {"kind": self.kind, "seconds": list(self.seconds)}


def exponential(
    base: Seconds = 1, factor: float = 2, cap: Seconds = 21600, jitter: Jitter = "equal"
) -> Exponential:
    """Wait longer after each failed attempt: `min(cap, base * factor ** (attempt - 1))`, jittered.

    `base` (above zero) and `cap` are seconds or timedeltas. `jitter` spreads messages that failed
    together: "equal" waits between half and all of that time, "full" between none and all of it,
    "none" exactly that time. Raises ValueError for an invalid argument.
    Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.

    >>> policy = RetryPolicy(backoff=exponential(base=1, factor=2, cap=60))
    >>> [policy.delay(attempt, random=lambda: 0.5) for attempt in (1, 2, 3, 20)]
    [0.75, 1.5, 3.0, 45.0]
    """
    first, maximum = _wait(base, "base"), _wait(cap, "cap")
    if first == 0:
        raise ValueError("base must be above zero; to retry at once use fixed(0)")
    if maximum < first:
        raise ValueError(f"cap ({maximum:g} s) must not be below base ({first:g} s)")
    growth = as_seconds(factor)
    if growth is None or growth < 1:
        raise ValueError(f"factor must be a number of at least 1, not {short_repr(factor)}")
    if jitter not in ("equal", "full", "none"):
        raise ValueError(f'jitter must be "equal", "full" or "none", not {short_repr(jitter)}')
    return Exponential(first, growth, maximum, jitter)


def fixed(seconds: Seconds) -> Fixed:
    """Wait the same time after each failed attempt: seconds or a timedelta, at most 366 days.

    `fixed(0)` retries at once, then after RETRY_FLOOR. Raises ValueError for an invalid argument.

    >>> RetryPolicy(backoff=fixed(30)).delay(7, random=lambda: 0.5)
    30.0
    """
    return Fixed(_wait(seconds, "seconds"))


def intervals(*seconds: Seconds) -> Intervals:
    """Wait these times, one after another; the last repeats.

    Give 1 to 100, each seconds or a timedelta of at most 366 days. Raises ValueError for others.

    >>> from datetime import timedelta
    >>> policy = RetryPolicy(backoff=intervals(15, 30, timedelta(minutes=1)))
    >>> [policy.delay(attempt, random=lambda: 0.5) for attempt in (1, 2, 3, 4)]
    [15.0, 30.0, 60.0, 60.0]
    """
    if not 1 <= len(seconds) <= MAX_INTERVALS:
        raise ValueError(f"give 1 to {MAX_INTERVALS} intervals, as in intervals(15, 30, 60)")
    return Intervals(tuple(_wait(each, "an interval") for each in seconds))


Backoff = BackoffStrategy | Callable[[int], Seconds]
_FACTORIES: tuple[object, ...] = (exponential, fixed, intervals)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a message is tried, and how long it waits after a failed attempt.

    `max_attempts` includes the first attempt. `backoff` is `exponential()`, `fixed()`,
    `intervals()`, or a callable that takes the number of the failed attempt (the first is 1) and
    returns seconds or a timedelta. A message stores only data, so its policy has no callable.
    Raises ValueError for an invalid argument.

    >>> RetryPolicy(max_attempts=3, backoff=fixed(5)).to_data()
    {'max_attempts': 3, 'kind': 'fixed', 'seconds': 5.0}
    """

    max_attempts: int = 20
    backoff: Backoff = field(default_factory=exponential)
    _floor: float = field(default=0.0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        attempts = self.max_attempts
        if type(attempts) is not int or not 1 <= attempts <= MAX_ATTEMPTS:
            raise ValueError(
                f"max_attempts must be 1 to {MAX_ATTEMPTS:,}, not {short_repr(attempts)}"
            )
        if self.backoff in _FACTORIES:
            raise ValueError("backoff must be the function's result: call it, as in exponential()")
        if not isinstance(self.backoff, BackoffStrategy) and not callable(self.backoff):
            raise ValueError(
                "backoff must be exponential(), fixed(), intervals() or a callable"
                f" attempt -> seconds, not {short_repr(self.backoff)}"
            )

    @classmethod
    def never(cls) -> RetryPolicy:
        """Return the policy with a single attempt: a message that fails is dead at once."""
        return cls(max_attempts=1)

    def with_floor(self, seconds: float) -> RetryPolicy:
        """Return this policy with a minimum wait from the second retry on."""
        floored = copy(self)
        object.__setattr__(floored, "_floor", min(seconds, MAX_WAIT))
        return floored

    def min_wait(self, attempt: int) -> float:
        """Return the minimum wait, in seconds, after attempt `attempt`; see `with_floor()`."""
        return self._floor if attempt > 1 else 0.0

    def delay(self, attempt: int, *, random: Random) -> float:
        """Return the seconds to wait after failed attempt `attempt` (the first is 1).

        `random` returns a number in [0, 1). The result is at most 366 days.
        Raises ValueError if `attempt` is below 1, and BackoffFailed if the policy's callable raised
        or returned anything but a finite wait of zero or more.
        """
        if attempt < 1:
            raise ValueError(f"attempts count from 1, not {attempt}")
        if isinstance(self.backoff, BackoffStrategy):
            return max(self.min_wait(attempt), self.backoff.delay(attempt, random))
        try:
            value = self.backoff(attempt)
        except (Exception, SystemExit) as error:  # sys.exit() in a policy must not end the worker
            raise BackoffFailed("the backoff callable raised") from error
        seconds = as_seconds(value)
        if seconds is None:
            raise BackoffFailed(
                f"the backoff callable returned {_shown(value)}; it must return seconds"
                " of zero or more, or a timedelta"
            )
        return max(self.min_wait(attempt), min(seconds, MAX_WAIT))

    def to_data(self) -> dict[str, Any]:
        """Return the policy as JSON data; `from_data()` returns an equal policy.

        Raises InvalidOption if the backoff is a callable: a message stores data, never code.
        """
        if not isinstance(self.backoff, BackoffStrategy):
            raise InvalidOption(
                "the retry policy of a message is stored as data: use exponential(), fixed() or"
                " intervals(); a callable goes on the handler, @handler(retry=...)"
            )
        return {"max_attempts": self.max_attempts, **self.backoff.to_data()}

    @classmethod
    def from_data(cls, data: object) -> RetryPolicy:
        """Return the policy that `to_data()` wrote; missing numbers take their defaults.

        The data is not trusted: nothing that it names is imported. Raises ValueError for other
        data.

        >>> RetryPolicy.from_data({"kind": "intervals", "seconds": [15, 30], "max_attempts": 2})
        RetryPolicy(max_attempts=2, backoff=Intervals(seconds=(15.0, 30.0)))
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"a retry policy must be an object, not {type(data).__name__}")
        numbers_of = dict(data)
        kind = numbers_of.pop("kind", None)
        attempts = numbers_of.pop("max_attempts", 20)
        try:
            if kind not in _KINDS:
                raise ValueError('its kind must be "exponential", "fixed" or "intervals"')
            return cls(attempts, _KINDS[kind](**numbers_of))
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a stored retry policy: {one_line(str(error))}") from error


def _intervals_of(seconds: object) -> Intervals:
    if not isinstance(seconds, list | tuple):
        raise ValueError("the seconds of intervals must be a list")
    return intervals(*seconds)


_KINDS: dict[object, Callable[..., BackoffStrategy]] = {
    "exponential": exponential,
    "fixed": fixed,
    "intervals": _intervals_of,
}


def _wait(value: object, what: str) -> float:
    seconds = as_seconds(value)
    if seconds is None or seconds > MAX_WAIT:
        raise ValueError(
            f"{what} must be seconds or a timedelta, from zero to 366 days, not {short_repr(value)}"
        )
    return seconds


def _shown(value: object) -> str:
    """Return a number as text; for anything else only its type, since its repr is not trusted."""
    return short_repr(value) if type(value) in (int, float) else f"a {type(value).__name__}"
