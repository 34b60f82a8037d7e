"""The base of all models: a row is read again where it was read first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db import models


class StoredModel(models.Model):
    """A model whose deferred columns come from the database of the row.

    Django asks the router, which may name a replica that does not have the row yet.
    """

    class Meta:
        abstract = True

    def refresh_from_db(
        self,
        using: str | None = None,
        fields: Iterable[str] | None = None,
        from_queryset: models.QuerySet[Any] | None = None,
    ) -> None:
        """Read the columns again, by default from the database that the row came from."""
        if using is None and from_queryset is None:
            using = self._state.db
        super().refresh_from_db(using, fields, from_queryset)
