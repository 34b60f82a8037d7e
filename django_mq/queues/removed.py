"""The traces of a message whose row is gone: its reply and its last failed attempt."""

from __future__ import annotations

from django_mq.models import FailedAttempt, Result
from django_mq.queues.obstacles import shown
from django_mq.store.results import UNANSWERED


def last_known(id: int, alias: str) -> tuple[str, str]:
    """Return what is known of message `id`, and separately its error text, which may be private."""
    text = f"Message {id} is not stored: it was acked, cancelled or purged, or never existed."
    reply = Result.objects.using(alias).defer("value").filter(pk=id).first()
    if reply is not None:
        text += f" Its reply was stored at {shown(reply.created_at)}: {_outcome(reply)}."
    last = (
        FailedAttempt.objects.using(alias).filter(message_id=id).order_by("-attempt", "-pk").first()
    )
    if last is None:
        return text, reply.error_text if reply else ""
    handler = f" in handler {last.handler}" if last.handler else ""
    return (
        f"{text} Its last failed attempt, number {last.attempt} ({last.type}, queue {last.queue}),"
        f" ended{handler} at {shown(last.ended_at)}.",
        f"{last.error_class}: {last.error_text}".strip(": "),
    )


def _outcome(reply: Result) -> str:
    handler = f"handler {reply.handler}" if reply.handler else "its handler"
    if not reply.error_class:
        return f"{handler} returned a value"
    if reply.error_class == UNANSWERED:
        return "no answer will come"
    return f"{handler} failed with {reply.error_class}"
