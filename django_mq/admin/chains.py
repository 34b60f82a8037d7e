"""The chain of a message as a tree, on its page."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.utils import unquote
from django.http import HttpRequest, HttpResponse

from django_mq import queues
from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.bounds import limited
from django_mq.admin.texts import badge, breakable
from django_mq.models import HandledMessage
from django_mq.queues.causes import MAX_EXAMINED

#: The maximum number of levels that are indented; a chain may have a hundred.
MAX_INDENT = 12
#: States of messages that are no longer in a queue, and the colour of each.
PAST = {"handled": "processable", "gone": "paused"}


class ChainsAdmin(ReadOnlyAdmin):
    """Pages that show the chain of a message."""

    def page_extras(self, request: HttpRequest, message: Any) -> dict[str, Any]:
        """Return what the page of `message` shows in addition to its fields."""
        return self.chain_context(request, message.pk)

    @limited
    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        message = self.get_object(request, unquote(object_id))
        context: dict[str, Any] = {}
        if message is not None and self.has_view_permission(request, message):
            title = f"Message {message.pk}: {message.type}"
            context = {"title": title, "subtitle": None, **self.page_extras(request, message)}
        return super().change_view(
            request, object_id, form_url, {**context, **(extra_context or {})}
        )

    def chain_context(self, request: HttpRequest, id: int) -> dict[str, Any]:
        """Return the chain of message `id` for the page, if other messages belong to it."""
        if id < 1:  # another program wrote it
            return {}
        found = queues.chain(id, using=self.alias)
        rows = [
            self._link_row(request, each, id)
            for each in found.links
            if not each.queue or self.may_see(request, each.queue)
        ]
        return {
            "chain": rows if len(rows) > 1 else (),
            "chain_is_complete": found.complete,
            "chain_window": f"{MAX_EXAMINED:,}",
        }

    def _link_row(
        self, request: HttpRequest, link: queues.ChainLink, current: int
    ) -> dict[str, Any]:
        is_past = link.state in PAST
        shown = badge(PAST[link.state], link.state) if is_past else badge(link.state)
        url = ""
        if link.state == "handled" and self._has_right(request, "view_handledmessage"):
            url = self.url(HandledMessage, "change", link.id)
        elif not is_past:
            url = self.message_url(request, link.id)
        return {
            "id": link.id,
            "indent": range(min(link.depth, MAX_INDENT)),  # one item per level
            "level": link.depth,
            "type": breakable(link.type),
            "handler": breakable(link.handler),
            "queue": link.queue,
            "badge": shown,
            "url": "" if link.id == current else url,
            "is_current": link.id == current,
        }
