"""The page of one message: its explanation, payload, fields, failed attempts and timeline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db.models import TextField
from django.db.models.functions import Cast
from django.http import HttpRequest

from django_mq.admin.actions import FILTERS, MessageActionsAdmin
from django_mq.admin.chains import ChainsAdmin
from django_mq.admin.editing import EditingAdmin
from django_mq.admin.fields import MessageFieldsAdmin
from django_mq.admin.message_actions import OfferedActions
from django_mq.admin.running import RunningAdmin
from django_mq.admin.texts import badge, excerpt, full, plain, pretty, took
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.queues.reasons import explain
from django_mq.queues.stalled import line_positions

#: The number of failed attempts on the page; the list of attempts has all.
SHOWN_ATTEMPTS = 25

#: One line of the timeline: what happened, when, and the durations that belong to it.
Event = tuple[str, str, str]


class MessagePageAdmin(
    MessageFieldsAdmin, MessageActionsAdmin, ChainsAdmin, RunningAdmin, EditingAdmin
):
    """The page of one message."""

    change_form_template = "admin/django_mq/message.html"

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Return the message with its position in its line; reads it once per request."""
        read: dict[str, Any] = request.__dict__.setdefault("mq_messages", {})
        if object_id not in read:
            found = super().get_object(request, object_id, from_field)
            if found is not None:
                found.position = line_positions([found.pk], using=self.alias).get(found.pk)
            read[object_id] = found
        return read[object_id]

    def page_extras(self, request: HttpRequest, message: QueuedMessage) -> dict[str, Any]:
        """Return the explanation, the documents and the attempts of a message."""
        private = self.may_see_payloads(request)
        head = self._head(request, message)
        why = explain(message, message.position, head, using=self.alias)  # type: ignore[attr-defined]
        attempts = self._attempts(message, private)
        filters = request.GET.get(FILTERS, "")
        return {
            "filters": filters,
            "back": self.list_url(filters),
            "why": why,
            "badge": badge(message.state),
            "why_error": plain(why.error) if private else "",
            "actions": self._offers(request, message),
            "edit_url": self.edit_url(request, message),
            "head": self._head_context(request, head),
            **self.running_context(request, message),
            "private": private,
            "documents": self._documents(message) if private else (),
            **super().page_extras(request, message),
            "attempts": attempts[:SHOWN_ATTEMPTS],
            "timeline": _timeline(message, [each["row"] for each in attempts]),
            "attempts_url": self.url(FailedAttempt, "changelist", message_id=message.pk)
            if len(attempts) > SHOWN_ATTEMPTS and self._has_right(request, "view_failedattempt")
            else "",
        }

    def _offers(self, request: HttpRequest, message: QueuedMessage) -> OfferedActions:
        in_flight = message.leased_until is not None
        return [] if in_flight else self.offered(request, message.state)

    def _head(self, request: HttpRequest, message: QueuedMessage) -> QueuedMessage | None:
        """Return the message that this one waits for."""
        position = message.position  # type: ignore[attr-defined]
        if position is None or position.waits_for is None:
            return None
        found: QueuedMessage | None = (
            self.get_queryset(request).filter(pk=position.waits_for).first()
        )
        return found

    def _head_context(
        self, request: HttpRequest, found: QueuedMessage | None
    ) -> dict[str, Any] | None:
        """Return that message with the actions offered on it."""
        if found is None:
            return None
        return {
            "row": found,
            "badge": badge(found.state),
            "url": self.url(QueuedMessage, "change", found.pk),
            "actions": self._offers(request, found),
        }

    def _documents(self, message: QueuedMessage) -> list[tuple[Any, str]]:
        """Return payload and metadata as text: the driver cannot decode every stored document."""
        columns = {"payload": "Payload", "metadata": "Metadata"}
        # The form field of the retry policy shows it, so one statement reads all three.
        found = (
            QueuedMessage.objects.using(self.alias)
            .filter(pk=message.pk)
            .values_list(*(Cast(column, TextField()) for column in (*columns, "retry")))
            .first()
        )
        if found is None:  # acked in the meantime
            return []
        *documents, message.retry_text = found  # type: ignore[attr-defined]
        shown = zip(columns.values(), map(pretty, documents), strict=True)
        return [(title, text) for title, text in shown if text != "{}"]

    def _attempts(self, message: QueuedMessage, private: bool) -> list[dict[str, Any]]:
        found = FailedAttempt.objects.using(self.alias).filter(message_id=message.pk)
        if not private:
            found = found.defer("error_text", "traceback")
        return [
            {
                "row": attempt,
                "ended": full(attempt.ended_at, message.now),  # type: ignore[attr-defined]
                "took": took(attempt.started_at, attempt.ended_at),
                "error": excerpt(attempt.error_class),
                "text": plain(attempt.error_text) if private else "",
                "traceback": plain(attempt.traceback) if private else "",
            }
            for attempt in found.order_by("-attempt", "-pk")[: SHOWN_ATTEMPTS + 1]
        ]


def _timeline(message: QueuedMessage, attempts: Iterable[FailedAttempt]) -> list[Event]:
    """Return the events of a message, the first one first, with its latest failed `attempts`.

    An attempt waits from the end of the one before it. If that one is not among `attempts`, the
    wait is unknown.
    """
    now = message.now  # type: ignore[attr-defined]
    events: list[Event] = [("Broadcast", full(message.created_at, now), "")]
    ended, number = message.created_at, 0
    for each in sorted(attempts, key=lambda each: (each.attempt, each.pk)):
        follows = each.attempt == number + 1
        waited = took(ended, each.started_at) if follows and each.started_at else ""
        ran = took(each.started_at, each.ended_at)
        if each.started_at:
            note = f"waited {waited}" if waited else ""
            events.append((f"Attempt {each.attempt} started", full(each.started_at, now), note))
        note = f"{f'ran {ran}, ' if ran else ''}{excerpt(each.error_class) or 'unknown error'}"
        events.append((f"Attempt {each.attempt} failed", full(each.ended_at, now), note))
        ended, number = each.ended_at, each.attempt
    events.append(_last(message, now))
    return events


def _last(message: QueuedMessage, now: Any) -> Event:
    """Return the current or the next event of the message."""
    if message.dead_at is not None:
        return "Dead", full(message.dead_at, now), ""
    if message.leased_until is not None:
        text = f"Attempt {message.attempts} in flight, leased until"
        return text, full(message.leased_until, now), ""
    return "Due", full(message.processable_after, now), ""
