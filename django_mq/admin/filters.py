"""The filters of the lists; their choices never need a scan of a whole table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, cast

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.utils.html import format_html

from django_mq.models import MessageQuerySet, QueueState
from django_mq.policy.message_filter import IN_FLIGHT
from django_mq.states import MessageState

#: The number of newest attempts whose error classes are offered, the most frequent ones first.
RECENT_ATTEMPTS = 1000

# Conditions implied by a state, which let an index find its few messages in a large table. The
# exact condition comes from `in_state()`.
_ALIVE = Q(dead_at__isnull=True)
_WAITING = _ALIVE & Q(blocked_by__isnull=True, held_since__isnull=True)
INDEX_CONDITIONS: dict[MessageState, Q] = {
    MessageState.DEAD: Q(dead_at__isnull=False),
    MessageState.RUNNING: Q(leased_until__isnull=False),
    MessageState.LEASED: Q(leased_until__gt=Now()),
    MessageState.BLOCKED: _ALIVE & Q(blocked_by__isnull=False),
    MessageState.HELD: _ALIVE & Q(held_since__isnull=False),
    MessageState.EXPIRED: _ALIVE & Q(expires_at__lte=Now()),
    MessageState.PAUSED: _WAITING & Q(queue__in=QueueState.objects.values("queue")),
    MessageState.RETRYING: _WAITING & Q(processable_after__gt=Now(), attempts__gt=0),
    MessageState.DELAYED: _WAITING & Q(processable_after__gt=Now(), attempts=0),
    MessageState.PROCESSABLE: _WAITING & Q(processable_after__lte=Now()),
}
#: States whose messages have a small index of their own.
INDEXED = frozenset(
    (
        MessageState.DEAD,
        MessageState.RUNNING,
        MessageState.LEASED,
        MessageState.BLOCKED,
        MessageState.EXPIRED,
    )
)


class StateFilter(admin.SimpleListFilter):
    """By state."""

    title = "state"
    parameter_name = "state"

    @property
    def is_indexed(self) -> bool:
        """Whether an index finds the messages of the chosen state."""
        return self.value() == IN_FLIGHT or self.value() in INDEXED

    def narrow(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        """Return the messages among which an index finds those in the chosen state; else all."""
        if not self.is_indexed:
            return rows
        value = self.value()
        if value is None or value == IN_FLIGHT:
            return rows.filter(leased_until__isnull=False)
        return rows.filter(INDEX_CONDITIONS[MessageState(value)])

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        states: list[tuple[str, Any]] = [(state.value, state.label) for state in MessageState]
        return [*states, (IN_FLIGHT, "in flight")]

    def choices(self, changelist: Any) -> Iterator[Any]:
        """Return the states, each with the number of its messages, whatever the other filters."""
        counts = getattr(changelist, "state_counts", {})
        names = [None, *(name for name, _label in self.lookup_choices)]
        for name, choice in zip(names, super().choices(changelist), strict=True):
            if name in counts:
                text = format_html('<span class="mq-number mq-quiet">{}</span>', counts[name])
                choice["display"] = format_html("{} {}", choice["display"], text)
            yield choice

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any] | None:
        value = self.value()
        if value is None:
            return None
        messages = cast(MessageQuerySet, queryset)
        if value == IN_FLIGHT:
            states = MessageState.RUNNING, MessageState.LEASED
            return messages.in_state(*states).filter(leased_until__isnull=False)
        if value not in MessageState:
            raise IncorrectLookupParameters
        if value == MessageState.DEAD:
            # Exact as it is: no state takes precedence. The planner expects that hardly any row has
            # a computed state, so it would read and sort all dead letters instead of the newest.
            return messages.dead()
        return messages.in_state(value).filter(INDEX_CONDITIONS[MessageState(value)])


class ExactFilter(admin.SimpleListFilter):
    """By the exact value of a column; the URL may contain a value that is not offered."""

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any] | None:
        value = self.value()
        return None if value is None else self.matching(queryset, value)

    def matching(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        """Return the rows with the chosen value."""
        return rows.filter(**{str(self.parameter_name): value})

    def offer(self, values: Iterable[str]) -> list[tuple[str, str]]:
        """Return the choices, always including the chosen value."""
        chosen = self.value()
        return [(each, each) for each in sorted({*values, *([chosen] if chosen else [])})]


class ErrorFilter(ExactFilter):
    """By error class, among those of the newest failed attempts, the most frequent first."""

    title = "recent errors"
    parameter_name = "error_class"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        newest = model_admin.get_queryset(request).order_by("-pk")[:RECENT_ATTEMPTS]
        found = Counter(newest.values_list("error_class", flat=True))
        found.pop("", None)
        chosen = self.value()
        if chosen:
            found.setdefault(chosen, 0)
        return [(name, f"{name} ({count:,})") for name, count in found.most_common(12)]


class OutcomeFilter(ExactFilter):
    """Results: returned values or errors."""

    title = "outcome"
    parameter_name = "outcome"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("returned", "returned"), ("error", "error")]

    def matching(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        if value not in ("returned", "error"):
            raise IncorrectLookupParameters
        found = Q(error_class="")
        return rows.filter(found if value == "returned" else ~found)
