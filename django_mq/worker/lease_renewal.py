"""Renew the leases of the messages that this process has not settled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from django_mq.executor.lease_clock import lease_clock
from django_mq.executor.statements import Statements, skip_refused_rows
from django_mq.executor.unsettled import Unsettled
from django_mq.messages import LONG_AGO, Delivery
from django_mq.store import leases


class LeaseRenewal:
    """Renews the leases of unsettled messages by one statement per length of a lease."""

    def __init__(
        self, statements: Statements, unsettled: Unsettled, *, lease_of: Callable[[str], float]
    ) -> None:
        self._statements = statements
        self._unsettled = unsettled
        self._lease_of = lease_of
        #: Messages that the last renewal left out: mostly slices have locked their rows.
        self.unrenewed: set[int] = set()
        #: The first error of the last renewal with which the database refused a row.
        self.refusal: Exception | None = None

    def renew(self) -> None:
        """Renew all leases but those of rows that are locked, or that the database refuses."""
        refusals: list[Exception] = []
        unrenewed: set[int] = set()
        by_lease: dict[float, list[Delivery]] = {}
        for delivery in self._unsettled.all():
            by_lease.setdefault(self._lease_of(delivery.queue), []).append(delivery)
        for lease, deliveries in sorted(by_lease.items()):
            asked_at = lease_clock()
            fences = [each.fence for each in deliveries]
            renew = partial(leases.renew, self._statements.cursor(), lease=lease)
            renewed = set(skip_refused_rows(renew, fences, lambda _, error: refusals.append(error)))
            unrenewed.update(each.id for each in deliveries if each.id not in renewed)
            for each in deliveries:
                if each.id in renewed and each._leased_at > LONG_AGO:  # else it is locked first
                    each._leased_at = asked_at
        self.unrenewed = unrenewed
        self.refusal = refusals[0] if refusals else None
