"""What others wait behind: the first messages of lines, and what can be done to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse

from django_mq import queues
from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.operations import OPERATIONS, Operation
from django_mq.admin.texts import badge, breakable
from django_mq.models import QueuedMessage

Offered = list[tuple[Operation, str]]


@dataclass(frozen=True, slots=True)
class HeadLine:
    """The first message of a line, as a page shows it."""

    head: queues.Head
    badge: Any
    #: Pages of the message and of those that wait; empty where the user may not see them.
    url: str
    line_url: str
    operations: Offered

    @property
    def names(self) -> dict[str, Any]:
        """Return the head's names, to be broken into lines."""
        names = ("type", "handler", "key")
        return {name: breakable(getattr(self.head, name) or "") for name in names}


class HeadsAdmin(ReadOnlyAdmin):
    """Heads with the operations that the user may do, posted to the page of messages."""

    def may(self, request: HttpRequest, operation: Operation) -> bool:
        """Return whether the user may see messages and do this to them."""
        return self.may_see_messages(request) and self._has_right(request, operation.permission)

    def operation_url(self, operation: Operation) -> str:
        """Return the address that does it to the posted `ids`."""
        name = f"{self.admin_site.name}:django_mq_queuedmessage_operation"
        return reverse(name, args=[operation.name])

    def offered(self, request: HttpRequest, state: str) -> Offered:
        """Return what the user may do to a message in this state that is not in flight."""
        found = [
            each for each in OPERATIONS.values() if state in each.states and self.may(request, each)
        ]
        try:
            return [(each, self.operation_url(each)) for each in found]
        except NoReverseMatch:  # this site has no messages, or other pages for them
            return []

    def head_lines(self, request: HttpRequest, found: Iterable[queues.Head]) -> list[HeadLine]:
        """Return `found` as a page shows them."""
        linked = self.may_see_messages(request)
        return [
            HeadLine(
                head,
                badge(head.state),
                self.message_url(request, head.id),
                self.line_url(head.queue, head.handler, head.key) if linked else "",
                self.offered(request, head.state),
            )
            for head in found
        ]

    def line_url(self, queue: str, handler: str, key: str | None) -> str:
        """Return the list of the messages of a line."""
        query = {"queue": queue, "handler": handler, "key": key} if key else {"queue": queue}
        query = {name: value for name, value in query.items() if value}
        return self.url(QueuedMessage, "changelist", **query)
