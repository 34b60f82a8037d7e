"""Columns with their own way to read or check values; migrations record Django's own fields."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from django.core.checks import CheckMessage
from django.db import models

if TYPE_CHECKING:
    StockDuration = models.DurationField[Any, Any]
else:
    StockDuration = models.DurationField

#: The shortest and the longest timedelta, in microseconds.
_MIN_MICROSECONDS, _MAX_MICROSECONDS = (
    Decimal(each // timedelta.resolution) for each in (timedelta.min, timedelta.max)
)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The text of a JSON value that this interpreter cannot decode, and the reason.

    PostgreSQL accepts numbers of 131,072 digits and any depth; Python stops at 4,300 digits, and
    at a depth of about a thousand.
    """

    text: str
    reason: str

    def __str__(self) -> str:
        return "(cannot be decoded)"


class JSONColumn(models.JSONField):
    """A JSONField that returns `Unreadable` where Django's raises.

    An error would end the whole query, so that one row would hide all the others.
    """

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        """Return the decoded value, or `Unreadable`."""
        try:
            return super().from_db_value(value, expression, connection)
        except (ValueError, RecursionError) as error:
            return Unreadable(value, str(error))

    def deconstruct(self) -> Any:
        """Return Django's own field."""
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.JSONField", args, kwargs


class DurationColumn(StockDuration):
    """A DurationField that the server sends as seconds.

    psycopg parses intervals only in the default IntervalStyle, and raises for any other style that
    a role or database may have. A value beyond those of Python is read as the nearest that Python
    has.
    """

    def select_format(self, compiler: Any, sql: str, params: Any) -> Any:
        """Select the seconds; inside a subquery the interval, which the outer query expects."""
        if compiler.query.subquery:
            return sql, params
        return f"extract(epoch from {sql})", params

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        """Return seconds as a timedelta, exact to the microsecond.

        Some projects let the driver load every `numeric` as a float.
        """
        if isinstance(value, float):
            value = Decimal(str(value))
        if not isinstance(value, Decimal):
            return value
        microseconds = min(max(value * 1_000_000, _MIN_MICROSECONDS), _MAX_MICROSECONDS)
        return timedelta(microseconds=int(microseconds))

    def deconstruct(self) -> Any:
        """Return Django's own field."""
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.DurationField", args, kwargs


class GeneratedColumn(models.GeneratedField):
    """A stored generated column, which every supported version of PostgreSQL has.

    From version 6.1 on, Django's field connects to the database to check for support, so a command
    could not report an unreachable server in its own words.
    """

    def _check_supported(self, databases: Iterable[str] | None) -> list[CheckMessage]:
        return []

    def deconstruct(self) -> Any:
        """Return Django's own field, for migrations."""
        name, _path, args, kwargs = super().deconstruct()
        return name, "django.db.models.GeneratedField", args, kwargs
