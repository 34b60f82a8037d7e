"""Types that a user probably meant, for the forms in which a type can be misspelt."""

from __future__ import annotations

from django.http import HttpRequest

from django_mq.admin.scope import QueueScopeMixin
from django_mq.conf import get_settings
from django_mq.handlers import all_handlers, allowed_queues, is_subscribed
from django_mq.handlers.nearest import probable_types


def did_you_mean(admin: QueueScopeMixin, request: HttpRequest, type: str) -> str:
    """Return a question, empty if a handler here takes `type` or no type is like it.

    It names only types that the user may see: those of a handler with a queue that they may see.
    """
    settings = get_settings()
    seen = [
        handler
        for handler in all_handlers()
        if any(admin.may_see(request, queue) for queue in allowed_queues(handler, settings))
    ]
    found = [
        each
        for each in probable_types(type)
        if any(is_subscribed(handler, each) for handler in seen)
    ]
    return f"Did you mean {' or '.join(found)}?" if found else ""
