"""The fields of a message's page; empty ones are left out."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html

from django_mq.admin.heads import HeadsAdmin
from django_mq.admin.texts import excerpt, full, link, moment_column, plain
from django_mq.models import QueuedMessage, QueueState, Result, UniqueKey
from django_mq.policy.durations import span
from django_mq.queues.dead_letters import OWN_REASONS
from django_mq.queues.stalled import shown_count
from django_mq.states import MessageState

#: States whose explanation already includes the last error.
EXPLAINED = (MessageState.DEAD, MessageState.HELD, MessageState.RETRYING, MessageState.DELAYED)
FIELDS: dict[str | None, tuple[str, ...]] = {
    None: (
        *("type", "queue_link", "handler_name", "priority", "key_link", "in_line", "followers"),
        *("unique", "created"),
    ),
    "Delivery": (
        *("processable", "leased", "attempts_used", "retry_policy", "expires", "blocker", "held"),
        *("suspicion", "result_link", "died", "error_line"),
    ),
}
#: Fields that are left out while their column is empty.
COLUMNS = {
    "key_link": "key",
    "in_line": "ordered",
    "unique": "unique_id",
    "leased": "leased_until",
    "expires": "expires_at",
    "held": "held_since",
    "suspicion": "suspect",
    "result_link": "wants_result",
    "died": "dead_at",
    "error_line": "last_error",
}


class MessageFieldsAdmin(HeadsAdmin):
    """A message's columns, explained in words."""

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the fields that are set; errors only for users who may see payloads."""
        if obj is None:  # the page that adds one does not exist
            return []
        empty = {name for name, column in COLUMNS.items() if not getattr(obj, column)}
        position = getattr(obj, "position", None)
        if position is None or position.waits_for is None or obj.dead_at or obj.leased_until:
            empty.add("blocker")
        if position is None or not position.behind:
            empty.add("followers")
        if not self.may_see_payloads(request) or obj.state in EXPLAINED:
            empty.add("error_line")
        return [
            (title, {"fields": [name for name in names if name not in empty]})
            for title, names in FIELDS.items()
        ]

    @admin.display(description="queue")
    def queue_link(self, message: QueuedMessage) -> Any:
        return link(self.url(QueueState, "change", message.queue), message.queue)

    @admin.display(description="handler")
    def handler_name(self, message: QueuedMessage) -> Any:
        return format_html(
            '{} <span class="mq-quiet">(schema version {})</span>',
            message.handler or "none yet: routed at delivery",
            message.schema_version,
        )

    @admin.display(description="order key")
    def key_link(self, message: QueuedMessage) -> Any:
        return link(self.line_url(message.queue, message.handler, message.key), message.key)

    @admin.display(description="ordered")
    def in_line(self, message: QueuedMessage) -> Any:
        return "the queue runs one message at a time"

    @admin.display(description="waiting behind")
    def followers(self, message: QueuedMessage) -> Any:
        count = shown_count(message.position.behind)  # type: ignore[attr-defined]
        words = f"{count} of its {'key' if message.key else 'queue'}"
        key = None if message.ordered else message.key
        return link(self.line_url(message.queue, message.handler, key), words)

    @admin.display(description="unique id")
    def unique(self, message: QueuedMessage) -> Any:
        """Show the id, whether this message still holds it, and its quiet time."""
        taken = UniqueKey.objects.using(self.alias).filter(
            queue=message.queue,
            handler__in=("", message.handler),
            type=message.type,
            unique_id=message.unique_id,
            put_aside__isnull=True,
        )
        row = taken.values_list("pk", "message_id").first()
        text = link(self.url(UniqueKey, "change", row[0]) if row else "", message.unique_id)
        notes = []
        if row is None or row[1] != message.pk:
            notes.append("no longer held by this message")
        if message.unique_for:
            notes.append(f"stays taken for {span(message.unique_for)} after a success")
        return format_html('{} <span class="mq-quiet">{}</span>', text, "; ".join(notes))

    created = moment_column("created_at", "created")
    processable = moment_column("processable_after", "processable")
    expires = moment_column("expires_at", "expires")
    held = moment_column("held_since", "held since")

    @admin.display(description="leased")
    def leased(self, message: QueuedMessage) -> Any:
        until = _moment(message, message.leased_until)
        return format_html("until {} by <code>{}</code>", until, message.claimed_by)

    @admin.display(description="attempts")
    def attempts_used(self, message: QueuedMessage) -> Any:
        return f"{message.attempts} of at most {message.max_attempts}"

    @admin.display(description="retry policy")
    def retry_policy(self, message: QueuedMessage) -> Any:
        if hasattr(message, "retry_text"):
            text = message.retry_text
        else:
            text = self.stored_json(message, "retry")
        return "the handler's" if text is None else format_html("<code>{}</code>", excerpt(text))

    @admin.display(description="waits behind")
    def blocker(self, message: QueuedMessage) -> Any:
        position = message.position  # type: ignore[attr-defined]
        first = self.message_link(position.waits_for)
        if position.ahead < 2:
            return first
        others = f"the first of {shown_count(position.ahead)}"
        return format_html('{} <span class="mq-quiet">{}</span>', first, others)

    @admin.display(description="suspect")
    def suspicion(self, message: QueuedMessage) -> Any:
        return "a worker process died while running it: it runs alone"

    @admin.display(description="result")
    def result_link(self, message: QueuedMessage) -> Any:
        if not Result.objects.using(self.alias).filter(pk=message.pk).exists():
            return "requested; not stored yet"
        return link(self.url(Result, "change", message.pk), "stored")

    @admin.display(description="dead")
    def died(self, message: QueuedMessage) -> Any:
        reason = message.dead_reason if message.dead_reason in OWN_REASONS else ""
        return format_html("{} {}", _moment(message, message.dead_at), reason)

    @admin.display(description="last error")
    def error_line(self, message: QueuedMessage) -> Any:
        return format_html('<span class="mq-error">{}</span>', plain(message.last_error))


def _moment(message: QueuedMessage, at: datetime | None) -> Any:
    return None if at is None else full(at, message.now)  # type: ignore[attr-defined]
