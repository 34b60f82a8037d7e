"""A column of durations that can be read whatever the server's IntervalStyle is."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from django.db import models

if TYPE_CHECKING:
    StockField = models.DurationField[Any, Any]
else:
    StockField = models.DurationField

#: The shortest and the longest timedelta, in microseconds.
_LEAST, _MOST = (Decimal(each // timedelta.resolution) for each in (timedelta.min, timedelta.max))


class DurationColumn(StockField):
    """A DurationField that the server sends as seconds.

    psycopg parses intervals of the default IntervalStyle only, and raises for any other that a role
    or database may have. A value beyond those of Python is read as the nearest that it has.
    Migrations record the column as a plain DurationField.
    """

    def select_format(self, compiler: Any, sql: str, params: Any) -> Any:
        """Select the seconds; the outer query of a subquery expects the interval."""
        if compiler.query.subquery:
            return sql, params
        return f"extract(epoch from {sql})", params

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        """Return seconds as a timedelta, exact to the microsecond."""
        if not isinstance(value, Decimal):
            return value
        microseconds = min(max(value * 1_000_000, _LEAST), _MOST)
        return timedelta(microseconds=int(microseconds))

    def deconstruct(self) -> Any:
        """Return Django's own field."""
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.DurationField", args, kwargs
