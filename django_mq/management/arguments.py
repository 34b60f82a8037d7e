"""Read arguments of the commands: numbers, ports, durations and moments."""

from __future__ import annotations

import getpass
import re
from argparse import Action, ArgumentError, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from django.core.management.base import CommandError
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from django_mq.conf.local_time import utc_now
from django_mq.policy.column_bounds import FIRST_TIME, MAX_BIGINT, MAX_INTEGER, id_of
from django_mq.policy.plain_text import one_line
from django_mq.values import as_seconds


def wrong_arguments(text: str) -> CommandError:
    """Return the error for arguments that do not go together: exit code 2, like argparse's.

    Not a subclass: Django prints the name of a subclass before the text.
    """
    return CommandError(text, returncode=2)


class OneQueue(Action):
    """Stores the name of a queue, and refuses a second one, which would replace the first.

    `--queue` of `mq_worker` takes several.
    """

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, value: Any, option: str | None = None
    ) -> None:
        first = getattr(namespace, self.dest)
        if first not in (None, value):
            both = f"{one_line(first)} and {one_line(value)}"
            raise ArgumentError(self, f"one queue at a time, not both {both}")
        setattr(namespace, self.dest, value)


#: Seconds in each unit of a duration.
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
#: The least and the largest number of seconds between two looks.
MIN_INTERVAL, MAX_INTERVAL = 0.1, 86_400.0


def whole_number(
    minimum: int = 1, maximum: int = MAX_INTEGER, *, other: str = ""
) -> Callable[[str], int]:
    """Return a function that reads a whole number between the two.

    `other` is the end of its error, such as another value that the argument may have.

    >>> whole_number(1, 1000)("25")
    25
    """

    def read(text: str) -> int:
        number = int(text) if re.fullmatch(r"[0-9]{1,20}", text.strip()) else minimum - 1
        if not minimum <= number <= maximum:
            raise ArgumentTypeError(
                f"{one_line(text)!r} is not a whole number from {minimum} to {maximum:,}{other}"
            )
        return number

    return read


#: Reads how many messages a command acts on or shows.
limit = whole_number(1, MAX_BIGINT)


def message_id(text: str) -> int:
    """Read the id of a message."""
    if (id := id_of(text)) is None:
        raise ArgumentTypeError(f"{one_line(text)!r} is not the id of a message")
    return id


def port_and_address(text: str) -> tuple[int, str]:
    """Read a port, or an address and a port.

    >>> port_and_address("9100"), port_and_address("[::]:9100")
    ((9100, '127.0.0.1'), (9100, '::'))
    """
    address, _, number = text.rpartition(":")
    try:
        port = whole_number(1, 65535)(number)
    except ArgumentTypeError:
        raise ArgumentTypeError(
            f"{one_line(text)!r} is not a port from 1 to 65535, or an address and a port such as"
            " 0.0.0.0:8081"
        ) from None
    return port, address.strip("[]") or "127.0.0.1"


def seconds(text: str) -> float:
    """Read a duration in seconds."""
    try:
        found = as_seconds(float(text))
    except ValueError:
        found = None
    if found is None:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds from 0")
    return found


def duration(text: str) -> float:
    """Read seconds, or a number with a unit, from the command line.

    >>> duration("90"), duration("1.5h"), duration("2d")
    (90.0, 5400.0, 172800.0)
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd]?)", text.strip())
    if found is None and re.fullmatch(r"\d+(\.\d+)?[smhd]?", text.strip()):
        raise ArgumentTypeError(
            f"{one_line(text)!r} is too long: at most 9 digits, and 9 after the point"
        )
    if found is None:
        raise ArgumentTypeError(
            f"{one_line(text)!r} is not a duration such as 90, 90s, 15m, 2h or 1d"
        )
    return float(found[1]) * _UNITS[found[2]]


def interval(text: str) -> float:
    """Read the seconds between two looks; without a pause a command would be a load."""
    found = duration(text)
    if found < MIN_INTERVAL:
        raise ArgumentTypeError(f"{text!r} is too short: at least {MIN_INTERVAL:g} seconds")
    if found > MAX_INTERVAL:
        raise ArgumentTypeError(f"{text!r} is too long: at most one day")
    return found


def moment(text: str) -> datetime:
    """Read an ISO 8601 date and time, in the project's time zone if it has no offset."""
    try:
        found = parse_datetime(text.strip())
    except ValueError:
        found = None
    if found is None:
        raise ArgumentTypeError(
            f"{one_line(text)!r} is not a date and time such as 2026-12-24T18:00+01:00"
        )
    return timezone.make_aware(found) if timezone.is_naive(found) else found


def moment_or_ago(text: str) -> datetime:
    """Read a moment, or a duration with its unit, counted back from now."""
    if re.fullmatch(r"[\d.]+[smhd]", text.strip()):
        now = utc_now()  # no row is older than the first time that the columns accept
        return now - timedelta(seconds=min(duration(text), (now - FIRST_TIME).total_seconds()))
    try:
        return moment(text)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{error}, and no duration such as 1h") from None


def past_moment_or_ago(text: str) -> datetime:
    """Read a moment that has passed, or a duration counted back from now."""
    found = moment_or_ago(text)
    if found > utc_now():
        raise ArgumentTypeError(f"{one_line(text)!r} is in the future")
    return found


def login() -> str:
    """Return the name of the operator's login; empty if there is none, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
