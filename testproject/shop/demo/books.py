"""Reads the results of one run from the tables and the directory of letters."""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from django.db import connection, transaction
from django.db.models import Count, F, IntegerField, Q, QuerySet, Sum, TextField
from django.db.models.fields.json import KT
from django.db.models.functions import Cast, Now

from django_mq.models import FailedAttempt, QueuedMessage

from .. import mailing
from ..models import Invoice, Order, Report, Statistic
from .ledger import Ledger


class Progress(NamedTuple):
    """The progress of the orders of a run."""

    orders: int = 0
    invoices: int = 0
    mails: int = 0
    packed: int = 0
    reports: int = 0
    waiting: int = 0
    retrying: int = 0
    dead: int = 0


@dataclass(frozen=True)
class Books:
    """Opened before the first order of a run, read while it lasts, balanced at its end."""

    run: str
    opened: datetime
    uncounted: int  # units that statistics missed before this run; 0 unless somebody purged

    @classmethod
    def open(cls, run: str) -> "Books":
        with connection.cursor() as cursor:
            cursor.execute("SELECT clock_timestamp()")
            [opened] = cursor.fetchone()
        return cls(run, opened, _uncounted())

    def progress(self) -> Progress:
        """Return the progress of the run."""
        order = Order.Status
        orders = self.orders().aggregate(
            orders=Count("pk"),
            invoices=Count("invoice"),
            mails=Count("mailed_at"),
            packed=Count("pk", filter=Q(status=order.PACKED)),
        )
        alive, due = Q(dead_at=None), Q(processable_after__lte=Now())
        messages = self.messages().aggregate(
            waiting=Count("pk", filter=alive),
            retrying=Count("pk", filter=alive & ~due & Q(attempts__gt=0)),
            dead=Count("pk", filter=~alive),
        )
        return Progress(**orders, **messages, reports=self.reports().count())

    def balance(self, answers: Counter[int], seconds: float) -> Ledger:
        """Count everything at one moment; `answers` counts the clients' responses by status."""
        with transaction.atomic():
            # One snapshot for all that follows: workers may be busy with other runs.
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            orders = frozenset(self.orders().values_list("pk", flat=True))
            letters = self.letters()
            dead = self.messages().filter(dead_at__isnull=False)
            invoices = Invoice.objects.filter(order__run=self.run)
            ordered = self.orders().aggregate(units=Sum("quantity", default=0))["units"]
            return Ledger(
                accepted=answers[201],
                refused=answers[409],
                orders=orders,
                cancelled=self.orders().filter(status=Order.Status.CANCELLED).count(),
                invoices=frozenset(invoices.values_list("order", flat=True)),
                mails=letters & orders,
                dead=Counter(int(order) for order in dead.values_list("order", flat=True)),
                reasons=tuple(dead.values_list("dead_reason", flat=True)),
                strangers=len(letters - orders) + self.strangers(),
                units_ordered=ordered,
                units_counted=ordered - (_uncounted() - self.uncounted),
                waiting=self.messages().filter(dead_at=None).count(),
                failed_attempts=FailedAttempt.objects.filter(
                    queue="mail", started_at__gte=self.opened
                ).count(),
                reports=self.reports().count(),
                seconds=seconds,
                latencies=[
                    waited.total_seconds()
                    for waited in invoices.values_list(
                        F("handled_at") - F("order__placed_at"), flat=True
                    )
                ],
            )

    def orders(self) -> QuerySet[Order]:
        """Return the orders of the run."""
        return Order.objects.filter(run=self.run)

    def reports(self) -> QuerySet[Report]:
        """Return the reports that the schedule wrote since the run began."""
        return Report.objects.filter(written_at__gte=self.opened)

    def messages(self) -> QuerySet[QueuedMessage]:
        """Return the messages about orders of the run, dead ones too."""
        return _about().filter(order__in=self.orders().annotate(text=_TEXT).values("text"))

    def strangers(self) -> int:
        """Return how many messages are about orders that do not exist: a rollback sent them."""
        existing = Order.objects.annotate(text=_TEXT).values("text")
        return _about().filter(created_at__gte=self.opened).exclude(order__in=existing).count()

    def letters(self) -> frozenset[int]:
        """Return the ids of the orders that have a letter: on disk, or accepted by the server."""
        if mailing.has_server():
            mailed = self.orders().exclude(mailed_at=None)
            return frozenset(mailed.values_list("pk", flat=True))
        names = (path.name for path in mailing.directory(self.run).glob("order-*.eml"))
        return frozenset(int(name[len("order-") : -len(".eml")]) for name in names)


# Ids are compared as text: a payload may hold anything.
_TEXT = Cast("pk", TextField())


def _about() -> QuerySet[QueuedMessage]:
    messages = QueuedMessage.objects.filter(type__startswith="shop.", payload__has_key="order_id")
    return messages.annotate(order=KT("payload__order_id"))


def _uncounted() -> int:
    """Return the units ordered, less those in statistics and those on their way there."""
    ordered = Order.objects.aggregate(units=Sum("quantity", default=0))["units"]
    counted = Statistic.objects.aggregate(units=Sum("sold", default=0))["units"]
    messages = QueuedMessage.objects.filter(queue="statistics", type="shop.orders.placed")
    coming = messages.aggregate(units=Sum(Cast(KT("payload__quantity"), IntegerField()), default=0))
    return ordered - counted - coming["units"]
