"""The fields of a message's page: those that say something about this message."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.contrib import admin
from django.db.models import TextField
from django.db.models.functions import Cast
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.texts import excerpt, full, link, plain
from django_mq.models import QueuedMessage, QueueState
from django_mq.queues.explaining import OWN_REASONS
from django_mq.states import MessageState

#: States whose reason names the last error already.
EXPLAINED = (MessageState.DEAD, MessageState.HELD, MessageState.RETRYING)
FIELDS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        None,
        ("type", "queue_link", "handler_name", "priority", "key_link", "unique_id", "created"),
    ),
    (
        _("Delivery"),
        (
            "processable",
            "leased",
            "attempts_used",
            "retry_policy",
            "expires",
            "blocker",
            "held",
            "suspicion",
            "result_link",
            "died",
            "error_line",
        ),
    ),
)
#: Fields that are left out while their column is empty.
COLUMNS = {
    "key_link": "key",
    "unique_id": "unique_id",
    "leased": "leased_until",
    "expires": "expires_at",
    "blocker": "blocked_by",
    "held": "held_since",
    "suspicion": "suspect",
    "result_link": "wants_result",
    "died": "dead_at",
    "error_line": "last_error",
}


class MessageFieldsAdmin(ReadOnlyAdmin):
    """What a message's columns mean, in words."""

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the fields that are set; errors only for those who may see payloads."""
        if obj is None:  # nothing is added here
            return []
        empty = {name for name, column in COLUMNS.items() if not getattr(obj, column)}
        if not self.may_see_payloads(request) or obj.state in EXPLAINED:
            empty.add("error_line")
        return [
            (title, {"fields": [name for name in names if name not in empty]})
            for title, names in FIELDS
        ]

    @admin.display(description=_("queue"))
    def queue_link(self, message: QueuedMessage) -> Any:
        return link(self.url(QueueState, "change", message.queue), message.queue)

    @admin.display(description=_("handler"))
    def handler_name(self, message: QueuedMessage) -> Any:
        version = _("schema version %(version)s") % {"version": message.schema_version}
        return format_html(
            '{} <span class="mq-quiet">({})</span>',
            message.handler or _("none yet: it is routed at delivery"),
            version,
        )

    @admin.display(description=_("order key"))
    def key_link(self, message: QueuedMessage) -> Any:
        query = {"key": message.key, "queue": message.queue, "handler": message.handler}
        query = {name: value for name, value in query.items() if value}
        return link(self.url(QueuedMessage, "changelist", **query), message.key)

    @admin.display(description=_("created"))
    def created(self, message: QueuedMessage) -> Any:
        return _moment(message, message.created_at)

    @admin.display(description=_("processable"))
    def processable(self, message: QueuedMessage) -> Any:
        return _moment(message, message.processable_after)

    @admin.display(description=_("leased"))
    def leased(self, message: QueuedMessage) -> Any:
        return format_html(
            "{} {} {} <code>{}</code>",
            _("until"),
            _moment(message, message.leased_until),
            _("by"),
            message.claimed_by,
        )

    @admin.display(description=_("attempts"))
    def attempts_used(self, message: QueuedMessage) -> Any:
        return _("%(used)s of at most %(most)s") % {
            "used": message.attempts,
            "most": message.max_attempts,
        }

    @admin.display(description=_("retry policy"))
    def retry_policy(self, message: QueuedMessage) -> Any:
        found = QueuedMessage.objects.using(self.alias).filter(pk=message.pk, retry__isnull=False)
        text = found.values_list(Cast("retry", TextField()), flat=True).first()
        return _("its handler's") if text is None else format_html("<code>{}</code>", excerpt(text))

    @admin.display(description=_("expires"))
    def expires(self, message: QueuedMessage) -> Any:
        return _moment(message, message.expires_at)

    @admin.display(description=_("blocked by"))
    def blocker(self, message: QueuedMessage) -> Any:
        return link(self.url(QueuedMessage, "change", message.blocked_by), f"#{message.blocked_by}")

    @admin.display(description=_("held since"))
    def held(self, message: QueuedMessage) -> Any:
        return _moment(message, message.held_since)

    @admin.display(description=_("suspect"))
    def suspicion(self, message: QueuedMessage) -> Any:
        return _("its process died while it ran: it runs alone")

    @admin.display(description=_("result"))
    def result_link(self, message: QueuedMessage) -> Any:
        return _("somebody waits for it")

    @admin.display(description=_("dead"))
    def died(self, message: QueuedMessage) -> Any:
        reason = message.dead_reason if message.dead_reason in OWN_REASONS else ""
        return format_html("{} {}", _moment(message, message.dead_at), reason)

    @admin.display(description=_("last error"))
    def error_line(self, message: QueuedMessage) -> Any:
        return format_html('<span class="mq-error">{}</span>', plain(message.last_error))


def _moment(message: QueuedMessage, at: datetime | None) -> Any:
    return None if at is None else full(at, message.now)  # type: ignore[attr-defined]
