"""Handlers of orders. Each has its own queue, so that it fails independently of the others.

shop.orders.placed ────┬─> write_invoice ──> shop.invoices.issued ──> notify_warehouse
                       ├─> send_confirmation
shop.orders.cancelled ─┴─> count_sales

Scheduled once a day:                              shop.statistics.prune ──> forget_old_sales
Scheduled every two seconds while a demo runs:     shop.reports.due ──> write_report
"""

import asyncio
from collections import Counter
from datetime import date, timedelta

from django.db.models import Count, DecimalField, F, Sum
from django.utils import timezone

from django_mq import Delivery, RetryPolicy, broadcast, handler, intervals, periodic

from . import mailing
from .models import CLOCK, Invoice, Order, Report, Statistic


@handler("shop.orders.placed", queue="invoices")
def write_invoice(delivery: Delivery) -> None:
    """Atomic, as handlers are unless they say otherwise.

    The invoice, the message about it and the end of this delivery are one transaction. Whatever
    happens to this worker, the order gets one invoice: never none, never two.
    """
    order = Order.objects.get(pk=delivery.payload["order_id"])
    Invoice.objects.create(
        order=order,
        number=f"{order.placed_at:%Y}-{order.pk:06}",
        total=order.price * order.quantity,
    )
    broadcast("shop.invoices.issued", {"order_id": order.pk})


@handler(
    "shop.orders.placed",
    queue="mail",
    batch=True,
    atomic=False,
    max_batch=20,
    retry=RetryPolicy(max_attempts=5, backoff=intervals(0.5, 1, 2)),
)
def send_confirmation(deliveries: list[Delivery]) -> None:
    """Not atomic: a letter cannot be rolled back, and no transaction stays open while it is sent.

    Many letters share a connection, but each delivery is settled by itself. It may run more than
    once (the worker may die after sending), so sending is idempotent.
    """
    orders = Order.objects.select_related("product").in_bulk(
        [delivery.payload["order_id"] for delivery in deliveries]
    )
    sent: list[int] = []
    with mailing.connection() as send:
        for delivery in deliveries:
            try:
                order = orders[delivery.payload["order_id"]]
                send(order, attempt=delivery.attempt)
            except mailing.NoSuchMailbox as error:
                # Trying again will not help. It becomes a dead letter, for an operator to look at.
                delivery.reject(str(error))
            except mailing.MailServerAway:
                # Not its fault, and it was not tried: this uses no attempt.
                delivery.snooze(2)
            except Exception as error:  # MailServerBusy, say: this one is retried as said above
                delivery.fail(error)
            else:
                sent.append(order.pk)
    # Deliveries without an answer are acked when this function returns.
    Order.objects.filter(pk__in=sent).update(mailed_at=CLOCK)


@handler("shop.orders.*", queue="statistics", batch=True)
def count_sales(deliveries: list[Delivery]) -> None:
    """Takes all waiting messages at once, and updates each shared counter once for many of them."""
    sold: Counter[tuple[date, int]] = Counter()
    cancelled: Counter[tuple[date, int]] = Counter()
    for delivery in deliveries:
        row = (delivery.created_at.date(), delivery.payload["product_id"])
        counter = sold if delivery.type == "shop.orders.placed" else cancelled
        counter[row] += delivery.payload["quantity"]
    # Sorted: workers that lock the same rows in the same order never deadlock.
    for day, product in sorted(sold.keys() | cancelled.keys()):
        more = {"sold": sold[day, product], "cancelled": cancelled[day, product]}
        Statistic.objects.update_or_create(
            day=day,
            product_id=product,
            defaults={name: F(name) + units for name, units in more.items()},
            create_defaults=more,
        )


@handler("shop.statistics.prune", queue="statistics", every=timedelta(days=1))
def forget_old_sales(delivery: Delivery) -> None:
    """Runs once a day over all workers. The admin lists it under Schedules."""
    Statistic.objects.filter(day__lt=timezone.localdate() - timedelta(days=365)).delete()


#: Off until the demo, or an operator in the admin, enables it.
REPORTS = "shop-reports"
periodic(REPORTS, "shop.reports.due", every=2, catch_up="none", enabled=False)


@handler("shop.reports.due", queue="reports")
def write_report(delivery: Delivery) -> None:
    """Atomic: each time of the schedule has one report, whichever worker broadcasts it."""
    amount = Sum(F("price") * F("quantity"), default=0, output_field=DecimalField())
    sold = Order.objects.exclude(status=Order.Status.CANCELLED)
    Report.objects.create(
        scheduled_for=delivery.metadata["mq.scheduled_for"],
        **sold.aggregate(orders=Count("pk"), turnover=amount),
    )


@handler("shop.invoices.issued", queue="warehouse")
async def notify_warehouse(delivery: Delivery) -> None:
    """Async: while one delivery waits for the network, many others run. It is never atomic."""
    await asyncio.sleep(0.02)  # stands for a request to the warehouse's own system
    await delivery.afinish(_mark_packed, delivery.payload["order_id"])


def _mark_packed(order_id: int) -> None:
    Order.objects.filter(pk=order_id, status=Order.Status.PLACED).update(status=Order.Status.PACKED)
