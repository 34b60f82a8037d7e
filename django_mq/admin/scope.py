"""The queues that a user sees."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest


class QueueScopeMixin:
    """Limits the queues that a user sees, on pages and in filters, counts, actions and searches."""

    #: The model's column with the queue's name; None if it has none.
    queue_field: str | None = "queue"

    def get_queues(self, request: HttpRequest) -> Collection[str] | None:
        """Return the names of the queues that the user may see and change, None for all."""
        return None

    def may_see(self, request: HttpRequest, queue: str) -> bool:
        """Return whether `queue` is one of `get_queues()`."""
        allowed = self.get_queues(request)
        return allowed is None or queue in allowed

    def scoped(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Filter rows to the user's queues; a model without a queue column has none for them."""
        allowed = self.get_queues(request)
        if allowed is None:
            return queryset
        if self.queue_field is None:
            return queryset.none()
        return queryset.filter(**{f"{self.queue_field}__in": list(allowed)})
