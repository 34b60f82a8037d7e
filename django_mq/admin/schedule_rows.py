"""The columns of the list of schedules, and the fields of a schedule's page."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.utils.html import format_html, format_html_join

from django_mq import queues
from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.texts import (
    badge,
    block,
    breakable,
    document_field,
    full,
    moment_column,
    moment_text,
    titled,
    when,
)
from django_mq.exceptions import InvalidOption
from django_mq.models import Schedule
from django_mq.policy.durations import span
from django_mq.queues.scheduling import state_of, timing_of

#: The badge of each state of a schedule.
STATE_BADGES = {
    "disabled": "paused",
    "overdue": "expired",
    "failed": "dead",
    "over": "idle",
    "enabled": "processable",
}


class ScheduleRowsAdmin(ReadOnlyAdmin):
    """The columns of the list, and the fields of a page that cannot be edited."""

    @admin.display(description="name", ordering="name")
    def short_name(self, row: Schedule) -> Any:
        return breakable(row.name)

    @admin.display(description="message")
    def what(self, row: Schedule) -> Any:
        return titled(breakable(row.type), breakable(row.queue))

    @admin.display(description="type")
    def what_full(self, row: Schedule) -> Any:
        return breakable(row.type)

    @admin.display(description="when")
    def timing(self, row: Schedule) -> Any:
        if not row.cron:
            return timing_of(row)
        return format_html(
            '{}<span class="mq-under"><code>{}</code></span>', timing_of(row), row.cron
        )

    @admin.display(description="state")
    def condition(self, row: Schedule) -> Any:
        state = state_of(row)
        return badge(STATE_BADGES[state], state)

    @admin.display(description="state")
    def condition_full(self, row: Schedule) -> Any:
        """Show the same, with the reason why a schedule is disabled."""
        if row.enabled:
            return self.condition(row)
        decided = row.decision is False
        reason = "by an operator" if decided else "by the code, or no process declares it"
        return format_html("{} {}", self.condition(row), reason)

    @admin.display(description="last")
    def last(self, row: Schedule) -> Any:
        if row.last_at is None:
            return None
        return format_html(
            '{}<span class="mq-under">{}</span>', when(row.last_at, _now(row)), self._message(row)
        )

    @admin.display(description="last time")
    def last_full(self, row: Schedule) -> Any:
        if row.last_at is None:
            return self.get_empty_value_display()
        return format_html("{} {}", full(row.last_at, _now(row)), self._message(row))

    next = moment_column("next_at", "next", when)

    @admin.display(description="next times")
    def next_full(self, row: Schedule) -> Any:
        """Show the next three times."""
        if not row.enabled:
            return self.get_empty_value_display()
        try:
            found = queues.next_times(row, using=self.alias)
        except InvalidOption as error:
            return str(error)
        lines = format_html_join("", "<br>{}", ((moment_text(at),) for at in found[1:]))
        if not found:
            return self.get_empty_value_display()
        return format_html("{}{}", full(found[0], _now(row)), lines)

    @admin.display(description="expires")
    def lifetime(self, row: Schedule) -> Any:
        return self.get_empty_value_display() if row.expires is None else span(row.expires)

    @admin.display(description="error")
    def error(self, row: Schedule) -> Any:
        return block(row.last_error)

    whole_payload = document_field("payload", "payload")
    whole_metadata = document_field("metadata", "metadata")

    def _message(self, row: Schedule) -> Any:
        return "" if row.last_message is None else self.message_link(row.last_message)


def _now(row: Schedule) -> Any:
    return row.now  # type: ignore[attr-defined]  # annotated
