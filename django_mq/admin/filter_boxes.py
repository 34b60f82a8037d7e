"""Filters with a text box: by name, error class or worker, of which there may be thousands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from django.contrib.admin.options import IncorrectLookupParameters
from django.db import connections
from django.db.models import OuterRef, Q, QuerySet, Subquery
from django.db.models.lookups import Exact
from django.http import HttpRequest

from django_mq.admin.filters import RECENT_ATTEMPTS, ExactFilter
from django_mq.admin.seen_handlers import seen_handlers
from django_mq.admin.texts import breakable
from django_mq.models import FailedAttempt
from django_mq.policy.column_bounds import MAX_NAME
from django_mq.policy.message_filter import FINGERPRINT
from django_mq.store import find_messages

#: The number of choices up to which a filter lists links, and of those that its text box suggests.
MAX_LINKS, MAX_SUGGESTIONS = 8, 200

# Every message satisfies one of these, and each is the condition of a partial index that begins
# with the queue: together they let indexes find all messages of a queue.
_OF_QUEUE = (
    Q(leased_until__isnull=True, blocked_by__isnull=True, dead_at__isnull=True)
    | Q(leased_until__isnull=False)
    | Q(blocked_by__isnull=False, key__isnull=False)
    | Q(dead_at__isnull=False)
)
_CLASS = re.compile(r"[\w.]{1,256}")


def of_queues(condition: Q, rows: QuerySet[Any]) -> QuerySet[Any]:
    """Return the messages that satisfy a condition on their queue, found by index.

    A blocked message without a key, which only another program can write, is left out.
    """
    return rows.filter(condition & _OF_QUEUE)


class BoxFilter(ExactFilter):
    """By the text in a box; if there are few choices, they are shown as links."""

    template = "admin/django_mq/filter_box.html"
    hint: Any = ""
    #: Its form sends an empty text for no filter; see `BoundedChangeList`.
    ignores_empty = True

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return []

    def has_output(self) -> bool:
        return True

    @property
    def typed(self) -> tuple[str, ...]:
        """The parameter of the box; see `BoundedChangeList.boxes`."""
        return (str(self.parameter_name),)

    def choices(self, changelist: Any) -> Iterator[Any]:
        """Return the box with its suggestions, and links if there are few choices."""
        name, value = str(self.parameter_name), self.value()
        texts = [str(text) for text, _label in self.lookup_choices]
        yield {
            "box": name,
            "value": value or "",
            "hint": self.hint,
            "suggestions": texts[:MAX_SUGGESTIONS] if len(texts) > MAX_LINKS else (),
            "clear": changelist.get_query_string(remove=[name]) if value else "",
        }
        for text, label in self.lookup_choices if len(texts) <= MAX_LINKS else ():
            yield {
                "selected": value == text,
                "query_string": changelist.get_query_string({name: text}),
                "display": breakable(str(label)),
            }


class QueueFilter(BoxFilter):
    """By queue, among the known queues that the user may see."""

    title = "queue"
    parameter_name = "queue"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return self.offer(model_admin.seen_queues(request))


class MessageQueueFilter(QueueFilter):
    """By queue; indexes find its messages."""

    is_indexed = True

    def narrow(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        return of_queues(Q(queue=self.value()), rows)

    def matching(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        return self.narrow(rows)


class HandlerFilter(BoxFilter):
    """By handler, among those registered here for a queue that the user may see."""

    title = "handler"
    parameter_name = "handler"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return self.offer(each.name for each in seen_handlers(model_admin.get_queues(request)))


class TypeFilter(BoxFilter):
    """By type, or by the beginning of a type."""

    title = "type"
    parameter_name = "type"
    hint = "exact, or shop.orders.*"

    def matching(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        if value.endswith("*"):
            return rows.filter(type__startswith=value[:-1])
        return super().matching(rows, value)


def read_priority(text: str) -> int:
    """Return the priority in `text`; raises ValueError for anything but a short integer."""
    if re.fullmatch(r"-?[0-9]{1,3}", text) is None:
        raise ValueError(f"{text!r} is not a priority")
    return int(text)


class PriorityFilter(BoxFilter):
    """By priority."""

    title = "priority"
    parameter_name = "priority"
    hint = "a whole number, from -100 to 100"

    def matching(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        try:
            return rows.filter(priority=read_priority(value))
        except ValueError as error:
            raise IncorrectLookupParameters(str(error)) from error


class KeyFilter(BoxFilter):
    """By order key; an index finds its messages."""

    title = "order key"
    parameter_name = "key"

    def __init__(self, request: HttpRequest, params: Any, model: Any, model_admin: Any) -> None:
        super().__init__(request, params, model, model_admin)
        self.alias = model_admin.alias

    @property
    def is_indexed(self) -> bool:
        """Whether the index has all messages of the key in the order of their ids."""
        return len(self._lines) < 2

    def step(self, after: int | None, *, ascending: bool, maximum: int) -> int | None:
        """Return the `maximum`-th message of the key, like `Window.step()`."""
        with connections[self.alias].cursor() as cursor:
            return find_messages.step(
                cursor, str(self.value()), after=after, ascending=ascending, limit=maximum
            )

    def narrow(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        """Find the key in the lines that have it: the index begins with queue and handler."""
        lines = Q(pk__in=())
        for queue, handler in self._lines:
            lines |= Q(queue=queue, handler=handler)
        return rows.filter(lines, key=str(self.value()))

    @cached_property
    def _lines(self) -> list[tuple[str, str]]:
        key = str(self.value())
        if len(key) > MAX_NAME or "\x00" in key:
            return []  # no message has it
        with connections[self.alias].cursor() as cursor:
            return find_messages.lines_of_key(cursor, key)

    def matching(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        return self.narrow(rows)


class WorkerFilter(BoxFilter):
    """By the worker that has the message: its id, or the id and the number of a claim."""

    title = "worker"
    parameter_name = "claimed_by"
    is_indexed = True

    def narrow(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        return rows.filter(leased_until__isnull=False)

    def matching(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        wanted = Q(claimed_by=value) | Q(claimed_by__startswith=f"{value}:")
        return self.narrow(rows).filter(wanted)


class AttemptWorkerFilter(BoxFilter):
    """By the id of the worker that made the attempt."""

    title = "worker"
    parameter_name = "worker"


class FingerprintFilter(BoxFilter):
    """By the fingerprint of the last failed attempt."""

    title = "fingerprint"
    parameter_name = "fingerprint"
    hint = "of the last error"
    is_indexed = True

    def narrow(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        """Return the messages with such a failed attempt, found by index."""
        failed = FailedAttempt.objects.using(rows.db).filter(fingerprint=self.value())
        return rows.filter(pk__in=failed.values("message_id"))

    def matching(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        if FINGERPRINT.fullmatch(value) is None:
            raise IncorrectLookupParameters
        newest = FailedAttempt.objects.filter(message_id=OuterRef("pk")).order_by("-attempt", "-pk")
        return self.narrow(rows).filter(Exact(Subquery(newest.values("fingerprint")[:1]), value))


def read_error_class(text: str) -> str:
    """Return `text` if it may be the name of a class; raises ValueError otherwise.

    Only whole names are compared with errors: a prefix would reveal their texts letter by letter to
    users who may not see them.
    """
    if _CLASS.fullmatch(text) is None:
        raise ValueError(f"{text!r} is not the class of an error")
    return text


class LastErrorFilter(BoxFilter):
    """By the class of the last error, among those of the newest failed attempts."""

    title = "last error"
    parameter_name = "error_class"
    hint = "class of the error"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        newest = FailedAttempt.objects.using(model_admin.alias).order_by("-pk")
        newest = model_admin.scoped(request, newest)[:RECENT_ATTEMPTS]
        return self.offer(filter(None, set(newest.values_list("error_class", flat=True))))

    def matching(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        try:
            name = read_error_class(value)
        except ValueError as error:
            raise IncorrectLookupParameters(str(error)) from error
        return rows.filter(Q(last_error=name) | Q(last_error__startswith=f"{name}: "))
