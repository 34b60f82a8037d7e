"""The list of messages."""

from __future__ import annotations

from typing import Any, cast

from django.contrib import admin
from django.contrib import messages as notices
from django.contrib.admin.views.main import ChangeList
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_mq import queues
from django_mq.admin.base import id_of
from django_mq.admin.bounds import impatient
from django_mq.admin.filters import HandlerFilter, QueueFilter, StateFilter
from django_mq.admin.message_page import MessagePageAdmin
from django_mq.admin.texts import badge, breakable, excerpt, link, under, when
from django_mq.models import FailedAttempt, MessageQuerySet, QueuedMessage, QueueState
from django_mq.queues.reasons import GONE, OWN_REASONS
from django_mq.queues.stalled import shown_count, standings
from django_mq.states import MessageState

#: Counts of messages behind one in the list stop here.
MOST_BEHIND = 100


class QueuedMessageAdmin(MessagePageAdmin):
    """Messages, the newest first; the list shows no payload."""

    change_list_template = "admin/django_mq/message_list.html"
    exact_lookups = ("id", "queue", "type", "handler", "key", "unique_id", "blocked_by")
    list_display: Any = ("id", "what", "condition", "where", "tries")
    list_display_links = ("id", "what")
    list_filter = (StateFilter, QueueFilter, HandlerFilter)
    search_fields = ("pk",)
    searched_texts = ("type", "key", "unique_id")
    search_help_text = _("Exact id, type, order key or unique id.")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the messages with their states, without large or private columns."""
        found = cast(MessageQuerySet, super().get_queryset(request))
        return found.with_state().defer("payload", "metadata", "retry")

    def get_changelist_instance(self, request: HttpRequest) -> ChangeList:
        """Return the list; each message gets its position in its line."""
        found = super().get_changelist_instance(request)
        if request.method == "GET":
            rows = list(found.result_list)
            with impatient(self.alias):
                known = standings([row.pk for row in rows], most=MOST_BEHIND, using=self.alias)
            for row in rows:
                row.standing = known.get(row.pk)
        return found

    def get_list_display(self, request: HttpRequest) -> Any:
        """Return the columns; the last error only for users who may see payloads."""
        columns = super().get_list_display(request)
        return (*columns, "error") if self.may_see_payloads(request) else columns

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the list, or apply an action to the selected messages."""
        self.check_posted_actions(request)
        context = {"queues_url": self.url(QueueState, "changelist")}
        return super().changelist_view(request, {**context, **(extra_context or {})})

    def _get_obj_does_not_exist_redirect(
        self, request: HttpRequest, opts: Any, object_id: str
    ) -> HttpResponseRedirect:
        """Report what became of a message whose row is gone."""
        text = gettext("Message %(id)s is not stored.") % {"id": excerpt(object_id)}
        wanted = id_of(object_id)
        if wanted is not None and self.get_queues(request) is None:
            why = queues.why(wanted, using=self.alias)
            if why.state == GONE:
                text = str(why) if self.may_see_payloads(request) else why.text
        self.message_user(request, text, notices.WARNING)
        attempts = self.scoped(request, FailedAttempt.objects.using(self.alias))
        attempts = attempts.filter(message_id=wanted or 0)
        target = ""
        if self._has_right(request, "view_failedattempt") and attempts.exists():
            target = self.url(FailedAttempt, "changelist", message_id=wanted)
        return HttpResponseRedirect(target or self.url(QueuedMessage, "changelist"))

    @admin.display(description=_("message"))
    def what(self, message: QueuedMessage) -> Any:
        notes = [breakable(message.handler) if message.handler else gettext("routed at delivery")]
        if message.key:
            notes.append(format_html("{} {}", gettext("key"), breakable(message.key)))
        return format_html(
            '<span class="mq-type">{}{}</span>', breakable(message.type), under(*notes)
        )

    @admin.display(description=_("queue"))
    def where(self, message: QueuedMessage) -> Any:
        return format_html('<span class="mq-name">{}</span>', breakable(message.queue))

    @admin.display(description=_("state"))
    def condition(self, message: QueuedMessage) -> Any:
        """Show the state with its time, its worker, or the message it waits behind."""
        notes = [self._detail(message)]
        standing = getattr(message, "standing", None)
        if standing is not None and standing.head is None and standing.behind:
            count = shown_count(standing.behind, MOST_BEHIND)
            notes.append(gettext("%(count)s behind it") % {"count": count})
        return format_html("{}{}", badge(message.state), under(*notes))

    def _detail(self, message: QueuedMessage) -> Any:
        now = message.now  # type: ignore[attr-defined]  # annotated
        state = message.state
        if state == MessageState.DEAD and message.dead_at is not None:
            expired = message.dead_reason == MessageState.EXPIRED
            return when(message.dead_at, now, gettext("expired {}") if expired else "{}")
        if message.leased_until is not None:
            lease = when(message.leased_until, now, gettext("lease ends {}"))
            if message.leased_until <= now:
                lease = when(message.leased_until, now, gettext("lease lapsed {}"))
            return format_html("{}<br><code>{}</code>", lease, message.claimed_by)
        standing = getattr(message, "standing", None)
        behind = standing.waits_for if standing is not None else None
        if behind is not None and state in (MessageState.BLOCKED, MessageState.PROCESSABLE):
            address = self.url(QueuedMessage, "change", behind)
            return format_html("{} {}", gettext("behind"), link(address, f"#{behind}"))
        if state == MessageState.BLOCKED:
            return gettext("now first of its key, freed soon")
        if state == MessageState.HELD and message.held_since is not None:
            return when(message.held_since, now)
        if state == MessageState.EXPIRED and message.expires_at is not None:
            return when(message.expires_at, now)
        return when(message.processable_after, now, gettext("due {}"))

    @admin.display(description=_("attempts"))
    def tries(self, message: QueuedMessage) -> Any:
        return format_html(
            '<span class="mq-number">{} / {}</span>', message.attempts, message.max_attempts
        )

    @admin.display(description=_("last error"), empty_value="")
    def error(self, message: QueuedMessage) -> Any:
        """Show the last error, or the reason a handler gave for the dead letter."""
        reason = message.dead_reason
        text = message.last_error if reason in OWN_REASONS or not reason else reason
        return format_html('<span class="mq-error">{}</span>', excerpt(text)) if text else None
