"""The columns of the list of messages."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.utils.html import format_html

from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.texts import badge, breakable, excerpt, notes_below, titled, when
from django_mq.models import QueuedMessage
from django_mq.queues.dead_letters import OWN_REASONS
from django_mq.queues.stalled import shown_count
from django_mq.states import MessageState

#: Counts of messages behind one in the list stop here.
MAX_BEHIND = 100


class MessageColumnsAdmin(ReadOnlyAdmin):
    """A list of messages whose `position` in their lines is known where they have one."""

    @admin.display(description="message")
    def what(self, message: QueuedMessage) -> Any:
        notes = [breakable(message.handler) if message.handler else "routed at delivery"]
        if message.key:
            notes.append(format_html("key {}", breakable(message.key)))
        return titled(breakable(message.type), *notes)

    @admin.display(description="queue")
    def where(self, message: QueuedMessage) -> Any:
        return format_html('<span class="mq-name">{}</span>', breakable(message.queue))

    @admin.display(description="state")
    def condition(self, message: QueuedMessage) -> Any:
        """Show the state with its time, its worker, or the message it waits behind."""
        notes = [self._detail(message)]
        position = getattr(message, "position", None)
        if position is not None and position.head is None and position.behind:
            count = shown_count(position.behind, MAX_BEHIND)
            notes.append(f"{count} behind it")
        return format_html("{}{}", badge(message.state), notes_below(*notes))

    def _detail(self, message: QueuedMessage) -> Any:
        now = message.now  # type: ignore[attr-defined]  # annotated
        state = message.state
        if state == MessageState.DEAD and message.dead_at is not None:
            expired = message.dead_reason == MessageState.EXPIRED
            return when(message.dead_at, now, "expired {}" if expired else "{}")
        if message.leased_until is not None:
            lease = when(message.leased_until, now, "lease ends {}")
            if message.leased_until <= now:
                lease = when(message.leased_until, now, "lease lapsed {}")
            return format_html("{}<br><code>{}</code>", lease, message.claimed_by)
        position = getattr(message, "position", None)
        behind = position.waits_for if position is not None else None
        if behind is not None and state in (MessageState.BLOCKED, MessageState.PROCESSABLE):
            return format_html("behind {}", self.message_link(behind))
        if state == MessageState.BLOCKED:
            return "now first of its key, freed soon"
        if state == MessageState.HELD and message.held_since is not None:
            return when(message.held_since, now)
        if state == MessageState.EXPIRED and message.expires_at is not None:
            return when(message.expires_at, now)
        return when(message.processable_after, now, "due {}")

    @admin.display(description="attempts")
    def tries(self, message: QueuedMessage) -> Any:
        return format_html(
            '<span class="mq-number">{} / {}</span>', message.attempts, message.max_attempts
        )

    @admin.display(description="last error", empty_value="")
    def error(self, message: QueuedMessage) -> Any:
        """Show the last error, or the reason a handler gave for the dead letter."""
        reason = message.dead_reason
        text = message.last_error if reason in OWN_REASONS or not reason else reason
        return format_html('<span class="mq-error">{}</span>', excerpt(text)) if text else None
