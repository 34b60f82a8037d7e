"""Do the numbers of a run add up? Nothing but arithmetic; `books.py` finds the numbers."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Row(NamedTuple):
    """One line of the table; `right` is None where nothing is compared."""

    name: str
    value: str
    note: str = ""
    right: bool | None = None


@dataclass(frozen=True)
class Ledger:
    """The count at the end. Sets are of order ids."""

    accepted: int  # answers 201
    refused: int  # answers 409
    orders: frozenset[int]
    cancelled: int
    invoices: frozenset[int]
    mails: frozenset[int]
    dead: Counter[int]
    reasons: tuple[str, ...]
    strangers: int  # messages and letters of orders that do not exist
    units_ordered: int
    units_counted: int
    waiting: int
    failed_attempts: int
    reports: int
    seconds: float
    latencies: Sequence[float] = field(repr=False)

    @property
    def lost(self) -> int:
        """Effects that an order should have had, but did not."""
        return (
            abs(self.accepted - len(self.orders))
            + len(self.orders - self.invoices)
            + len(self.orders - self.mails - self.dead.keys())
            + max(0, self.units_ordered - self.units_counted)
            + self.waiting
        )

    @property
    def twice(self) -> int:
        """Effects that happened twice, or for an order that was rolled back."""
        return (
            len(self.mails & self.dead.keys())
            + sum(self.dead.values())
            - len(self.dead)
            + max(0, self.units_counted - self.units_ordered)
            + self.strangers
        )

    @property
    def adds_up(self) -> bool:
        return all(row.right is not False for row in self.rows())

    def rows(self) -> list[Row]:
        """Return the table."""
        orders, dead = len(self.orders), sum(self.dead.values())
        # Three handlers for each order, one for each invoice, one for each cancellation.
        messages = 3 * orders + len(self.invoices) + self.cancelled
        handled = messages - dead - self.waiting
        return [
            Row("orders accepted", f"{self.accepted}", "answered 201 over HTTP"),
            Row("orders committed", f"{orders}", "= accepted", orders == self.accepted),
            Row(
                "orders rolled back",
                f"{self.refused}",
                "sold out: no message, no mail",
                not self.strangers,
            ),
            Row("invoices", f"{len(self.invoices)}", "= committed", self.invoices == self.orders),
            Row("mails", f"{len(self.mails)}", f"{self.failed_attempts} failed attempts before"),
            Row("dead letters", f"{dead}", "; ".join(self.reasons)),
            Row(
                "mails + dead",
                f"{len(self.mails) + dead}",
                "= committed",
                len(self.mails) + dead == orders,
            ),
            Row(
                "units in statistics",
                f"{self.units_counted}",
                "= units ordered",
                self.units_counted == self.units_ordered,
            ),
            Row("reports", f"{self.reports}", "by the clock: once each time", self.reports > 0),
            Row("lost", f"{self.lost}", "nothing", not self.lost),
            Row("twice", f"{self.twice}", "nothing", not self.twice),
            Row(
                "messages handled",
                f"{handled}",
                f"in {self.seconds:.1f} s: {handled / self.seconds:.0f} a second, as they came",
            ),
            Row(
                "order to invoice",
                f"{1000 * percentile(self.latencies, 50):.0f} ms",
                f"median; 99 of 100 within {1000 * percentile(self.latencies, 99):.0f} ms",
            ),
        ]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` of all do not exceed; NaN of none.

    >>> percentile([5.0, 1.0, 3.0], 50), percentile([5.0, 1.0, 3.0], 99)
    (3.0, 5.0)
    """
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
