"""The tables of the shop: a catalogue, orders, and the results of the handlers."""

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import Func

# The time at which PostgreSQL looks, by the clock that all processes share. (Django's `Now()` is
# the time at which the statement began.) The demo measures with it.
CLOCK = Func(function="clock_timestamp", output_field=models.DateTimeField())


class Product(models.Model):
    name = models.CharField(max_length=100, unique=True)
    price = models.DecimalField(max_digits=8, decimal_places=2)
    stock = models.PositiveIntegerField(default=0)

    def __str__(self) -> str:
        return self.name


class Order(models.Model):
    class Status(models.TextChoices):
        PLACED = "placed"
        PACKED = "packed"
        CANCELLED = "cancelled"

    product = models.ForeignKey(Product, on_delete=models.PROTECT)
    quantity = models.PositiveSmallIntegerField(
        validators=(MinValueValidator(1), MaxValueValidator(20))
    )
    price = models.DecimalField(max_digits=8, decimal_places=2)  # of one, when it was ordered
    email = models.EmailField()
    status = models.CharField(max_length=10, choices=Status.choices, default=Status.PLACED)
    placed_at = models.DateTimeField(db_default=CLOCK, editable=False)
    mailed_at = models.DateTimeField(null=True, blank=True)
    # Which run of the demo placed it. A slug, because it also names a directory of letters.
    run = models.SlugField(max_length=40, blank=True)

    def __str__(self) -> str:
        return f"order {self.pk}"


class Invoice(models.Model):
    # One order, one invoice: the database would refuse a second, so one that is there was alone.
    order = models.OneToOneField(Order, on_delete=models.PROTECT)
    number = models.CharField(max_length=20, unique=True)
    total = models.DecimalField(max_digits=10, decimal_places=2)
    handled_at = models.DateTimeField(db_default=CLOCK, editable=False)

    def __str__(self) -> str:
        return self.number


class Report(models.Model):
    """The units sold by one time of the schedule."""

    # Each time is broadcast once: the database would refuse a second report of it.
    scheduled_for = models.DateTimeField(unique=True)
    orders = models.PositiveIntegerField()
    turnover = models.DecimalField(max_digits=14, decimal_places=2)
    written_at = models.DateTimeField(db_default=CLOCK, editable=False)

    def __str__(self) -> str:
        return f"report of {self.scheduled_for:%Y-%m-%d %H:%M:%S}"


class Export(models.Model):
    """A file of orders that is written in parts; docs/guides/steps.md counts them."""

    parts = models.PositiveIntegerField()
    done = models.PositiveIntegerField(default=0)
    cancelled = models.BooleanField(default=False)

    def __str__(self) -> str:
        return f"export {self.pk}: {self.done} of {self.parts} parts"


class Statistic(models.Model):
    """Units of one product sold and cancelled on one day."""

    day = models.DateField()
    product = models.ForeignKey(Product, on_delete=models.PROTECT)
    sold = models.PositiveIntegerField(default=0)
    cancelled = models.PositiveIntegerField(default=0)

    class Meta:
        constraints = (
            models.UniqueConstraint(name="shop_statistic_day_product", fields=("day", "product")),
        )

    def __str__(self) -> str:
        return f"{self.product} on {self.day}"
