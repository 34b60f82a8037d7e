"""A JSON column whose rows can be read even if Python cannot decode a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db import models


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

    An error would end the whole query, so that one row would hide all others. Migrations record it
    as a plain JSONField.
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
