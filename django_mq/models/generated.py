"""A generated column whose system check needs no server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.core.checks import CheckMessage
from django.db import models


class GeneratedColumn(models.GeneratedField):
    """A stored generated column, which every supported version of PostgreSQL has.

    From version 6.1 on, Django connects to the database to check that, so that a command could not
    report an unreachable server in its own words.
    """

    def _check_supported(self, databases: Iterable[str] | None) -> list[CheckMessage]:
        return []

    def deconstruct(self) -> Any:
        """Return Django's own field, for migrations."""
        name, _path, args, kwargs = super().deconstruct()
        return name, "django.db.models.GeneratedField", args, kwargs
