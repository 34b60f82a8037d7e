"""Heads, the messages behind which others wait, with the actions offered on them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.http import HttpRequest

from django_mq import queues
from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.texts import badge, breakable, moment_text
from django_mq.models import QueuedMessage


class HeadsAdmin(ReadOnlyAdmin):
    """The heads of lines as rows of a page, and the lists of the messages in their lines."""

    def head_rows(self, request: HttpRequest, found: Iterable[queues.Head]) -> list[dict[str, Any]]:
        """Return heads as a page shows them; URLs are empty where the user lacks a permission."""
        linked = self.may_see_messages(request)
        return [
            {
                "head": head,
                "badge": badge(head.state),
                "at": moment_text(head.at),
                "names": {
                    name: breakable(getattr(head, name) or "")
                    for name in ("type", "handler", "key")
                },
                "url": self.message_url(request, head.id),
                "line_url": self.line_url(head.queue, head.handler, head.key) if linked else "",
                "actions": self.offered(request, head.state),
            }
            for head in found
        ]

    def line_url(self, queue: str, handler: str, key: str | None) -> str:
        """Return the URL of the list of messages in a line."""
        query = {"queue": queue, "handler": handler, "key": key} if key else {"queue": queue}
        query = {name: value for name, value in query.items() if value}
        return self.url(QueuedMessage, "changelist", **query)
