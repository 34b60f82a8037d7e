"""Check arguments before the database can refuse them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime, timedelta

from django.db import connections

from django_mq.policy.column_bounds import FIRST_TIME, MAX_BIGINT
from django_mq.policy.message_filter import FINGERPRINT
from django_mq.policy.names import check_name
from django_mq.policy.plain_text import one_line
from django_mq.store import schedules
from django_mq.values import as_seconds, in_utc, short_repr

#: A moment: aware, or seconds or a timedelta ago.
Moment = datetime | timedelta | float
#: Seconds in 5,000 years; `datetime` cannot represent moments much further away.
MAX_SECONDS = 5000 * 365.25 * 86400


def check_names(**names: str | None) -> None:
    """Raise InvalidName unless each is None or a name; the keywords say what is named."""
    for what, name in names.items():
        if name is not None:
            check_name(name, what)


def queue_names(queue: str | Collection[str] | None) -> list[str] | None:
    """Return `queue` as a list of names, or None for all queues; raises InvalidName."""
    if queue is None:
        return None
    return names_in(queue, "queue")


def names_in(value: str | Iterable[str], what: str) -> list[str]:
    """Return one name, or several, as a list; raises InvalidName.

    >>> names_in("mail", "queue"), names_in(("mail", "other"), "queue")
    (['mail'], ['mail', 'other'])
    """
    several = isinstance(value, Iterable) and not isinstance(value, str)
    return [check_name(each, what) for each in (value if several else [value])]


def operator_name(by: str) -> str:
    """Return the name of an operator as one line that can be stored; raise ValueError for no text.

    >>> operator_name("ada\\0")
    'ada\ufffd'
    """
    if not isinstance(by, str):
        raise ValueError(f"by must be text, the name of an operator, not {short_repr(by)}")
    return one_line(by, 150)


def whole_number(value: object, what: str, *, minimum: int = 1, maximum: int = MAX_BIGINT) -> int:
    """Return `value` if it is a whole number between the two; raise ValueError otherwise.

    >>> whole_number(7, "limit")
    7
    """
    if type(value) is not int or not minimum <= value <= maximum:
        raise ValueError(
            f"{what} must be a whole number from {minimum} to {maximum:,}, not {short_repr(value)}"
        )
    return value


def seconds(value: float | timedelta, what: str) -> float:
    """Return a duration in seconds; raise ValueError unless it is from 0 to `MAX_SECONDS`.

    >>> seconds(timedelta(minutes=1), "older_than")
    60.0
    """
    found = as_seconds(value)
    if found is None or found > MAX_SECONDS:
        raise ValueError(
            f"{what} must be seconds or a timedelta, from 0 to 5,000 years, not {short_repr(value)}"
        )
    return found


def check_moment(at: Moment, what: str) -> None:
    """Raise ValueError unless `at` is a moment."""
    if not isinstance(at, datetime):
        seconds(at, what)
    elif at.utcoffset() is None:
        raise ValueError(
            f"{what} must be an aware datetime, not {short_repr(at)}: use timezone.now()"
        )


def past_moment(alias: str, at: Moment, what: str) -> datetime:
    """Return a moment, at the earliest the first that a row can have; raise ValueError for others.

    The database's clock determines a relative moment.
    """
    check_moment(at, what)
    if isinstance(at, datetime):
        return in_utc(at)
    ago = timedelta(seconds=seconds(at, what))
    with connections[alias].cursor() as cursor:
        now = schedules.now(cursor)
    return now - min(ago, now - FIRST_TIME)


def flag(value: object, what: str) -> bool:
    """Return `value` if it is True or False; raise ValueError otherwise.

    >>> flag(False, "waiting")
    False
    """
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be True or False, not {short_repr(value)}")
    return value


def check_fingerprint(value: str) -> None:
    """Raise ValueError unless `value` can be a fingerprint."""
    if not isinstance(value, str) or not FINGERPRINT.fullmatch(value):
        raise ValueError(
            f"{short_repr(value)} is not a fingerprint: mq_errors, queues.errors() and the page"
            " Errors show those of the failed attempts, 16 hexadecimal digits each"
        )
