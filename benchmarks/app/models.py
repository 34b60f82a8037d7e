"""Business tables; `migrate --run-syncdb` creates them, since they exist for one run."""

from django.db import models


class Order(models.Model):
    """A row that a transaction writes beside its broadcast."""

    customer = models.CharField(max_length=100)
    quantity = models.PositiveIntegerField()
    note = models.TextField(blank=True)
    placed_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"order {self.pk}"


class Entry(models.Model):
    """A row that a handler writes, one per message."""

    message = models.BigIntegerField()
    note = models.TextField()

    def __str__(self) -> str:
        return f"entry of message {self.message}"


class Counter(models.Model):
    """A row that handlers contend for."""

    value = models.PositiveIntegerField(default=0)

    def __str__(self) -> str:
        return f"counter {self.pk}: {self.value}"
