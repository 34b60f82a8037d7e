"""Filters by time: from and to, in the user's time zone, or relative to now."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime, time, timedelta
from typing import Any

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.db import connections
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.dateparse import parse_date, parse_datetime

from django_mq.conf.local_time import local, utc_now
from django_mq.policy.column_bounds import FIRST_TIME, LAST_TIME
from django_mq.store import table_extent

_AGO = re.compile(r"(\d{1,6})(m|h|d)")
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}
#: Within this time, transactions may create rows in an order other than that of their ids.
MAX_ID_SKEW = timedelta(hours=1)

Preset = tuple[Any, dict[str, str]]
PAST_PRESETS: tuple[Preset, ...] = (
    ("Any time", {}),
    ("Past hour", {"from": "1h"}),
    ("Past 24 hours", {"from": "24h"}),
    ("Past 7 days", {"from": "7d"}),
)


def read_moment(text: str, now: datetime) -> datetime:
    """Return an ISO 8601 date or time, or a moment relative to `now`: `30m`, `24h`, `7d` ago.

    A time without an offset is in the current time zone. A time that no row can have becomes the
    nearest that a row can have, so that it can be shown in any zone. Raises ValueError for anything
    else.
    """
    if ago := _AGO.fullmatch(text):
        return now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
    found = parse_datetime(text)
    if found is None and (day := parse_date(text)) is not None:
        found = datetime.combine(day, time())
    if found is None:
        raise ValueError(f"{text!r} is not a time such as 2026-12-24T18:00, 2026-12-24 or 24h")
    found = timezone.make_aware(found) if timezone.is_naive(found) else found
    return min(max(found, FIRST_TIME), LAST_TIME)


class MomentFilter(admin.ListFilter):
    """Rows whose time is at or after `<column>_from` and before `<column>_to`."""

    template = "admin/django_mq/filter_moments.html"
    column = ""
    #: The column, where themes look for the name of a filter that has no `parameter_name`.
    field_path = ""
    presets: Sequence[Preset] = PAST_PRESETS
    #: A condition that is true for every row with this time.
    implied = Q()
    is_indexed = False

    def __init__(self, request: HttpRequest, params: Any, model: Any, model_admin: Any) -> None:
        super().__init__(request, params, model, model_admin)
        self.now = utc_now()
        self.model = model
        for name in self.parameter_names:
            if texts := params.pop(name, None):
                self.used_parameters[name] = texts[-1].strip()
        try:
            self.start, self.end = (self._moment(name) for name in self.parameter_names)
        except (ValueError, OverflowError) as error:
            raise IncorrectLookupParameters(str(error)) from error

    def __init_subclass__(cls) -> None:
        cls.field_path = cls.column
        cls.parameter_names = (f"{cls.column}_from", f"{cls.column}_to")

    #: Parameters of the URL.
    parameter_names: tuple[str, ...] = ()

    def _moment(self, name: str) -> datetime | None:
        text = self.used_parameters.get(name)
        return read_moment(str(text), self.now) if text else None

    def expected_parameters(self) -> list[str | None]:
        return list(self.parameter_names)

    def has_output(self) -> bool:
        return True

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any] | None:
        if self.start is None and self.end is None:
            return None
        return queryset.filter(self.condition)

    @property
    def condition(self) -> Q:
        """The condition on the rows."""
        found = self.implied
        if self.start is not None:
            found &= Q(**{f"{self.column}__gte": self.start})
        if self.end is not None:
            found &= Q(**{f"{self.column}__lt": self.end})
        return found

    def narrow(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        return rows.filter(self.condition if self.is_indexed else self.implied)

    @property
    def typed(self) -> tuple[str, ...]:
        """The parameters of the fields; see `BoundedChangeList.boxes`."""
        return tuple(self.parameter_names)

    def choices(self, changelist: Any) -> Iterator[Any]:
        """Return the form, followed by the presets."""
        begins, ends = self.parameter_names
        mine = {name: text for name, text in self.used_parameters.items() if text}
        yield {
            "form": True,
            "names": self.parameter_names,
            "from": _local(self.start),
            "to": _local(self.end),
            "is_open": bool(mine),
        }
        for label, texts in self.presets:
            wanted = {f"{self.column}_{name}": text for name, text in texts.items()}
            yield {
                "selected": wanted == mine,
                "query_string": changelist.get_query_string(wanted, remove=[begins, ends]),
                "display": label,
            }


def _local(at: datetime | None) -> str:
    """Return a moment in the format of the browser's own date field."""
    return "" if at is None else f"{local(at):%Y-%m-%dT%H:%M}"


class CreatedFilter(MomentFilter):
    """By the time of creation. In a large table, ids narrow down the part to look at."""

    title = "created"
    column = "created_at"

    def part_of_table(self, alias: str) -> Q:
        """Return the ids that rows of these times have."""
        found = Q()
        options = self.model._meta
        names = {"table": options.db_table, "id": options.pk.column, "time": self.column}
        with connections[alias].cursor() as cursor:
            if self.start is not None:
                found &= Q(pk__gte=table_extent.id_at(cursor, self.start - MAX_ID_SKEW, **names))
            if self.end is not None:
                found &= Q(pk__lt=table_extent.id_at(cursor, self.end + MAX_ID_SKEW, **names))
        return found


class DueFilter(MomentFilter):
    """By the time from which a message may run."""

    title = "due"
    column = "processable_after"
    presets = (
        ("Any time", {}),
        ("In the past hour", {"from": "1h", "to": "0m"}),
        ("More than an hour ago", {"to": "1h"}),
        ("In the future", {"from": "0m"}),
    )


class DeadFilter(MomentFilter):
    """By the time at which a message became a dead letter."""

    title = "dead since"
    column = "dead_at"
    implied = Q(dead_at__isnull=False)
    is_indexed = True


class EndedFilter(MomentFilter):
    """By the end of an attempt."""

    title = "ended"
    column = "ended_at"
    is_indexed = True
