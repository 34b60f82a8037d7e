"""Why a message is dead, in words, and what an operator can do about it."""

from __future__ import annotations

from django_mq.conf import command_on
from django_mq.conf.local_time import local_text
from django_mq.models import QueuedMessage, UniqueKey

#: Dead-letter reasons of this library, up to a colon; any other is a handler's own text.
OWN_REASONS = {
    "exhausted": "its last attempt failed",
    "expired": "it expired before an attempt could start",
    "held for too long": "no worker could run it within the allowed time",
    "InvalidPayload": "its payload is not what its handler takes",
    "TooManyHops": "its chain of broadcasts by handlers is too long (MAX_HOPS)",
    "cannot be broadcast": "it came in through an inbox, and cannot be broadcast",
}


def death(message: QueuedMessage) -> str:
    """Say since when a message is dead, and why."""
    own = OWN_REASONS.get(message.dead_reason.partition(":")[0])
    # Any other reason is the text of a Reject. Another client may store no reason.
    other = "its handler rejected it" if message.dead_reason else "no more attempts will be made"
    return (
        f"has been dead since {local_text(message.dead_at)}: {own or other}"
        f" ({message.attempts} of {message.max_attempts} attempts used)"
    )


def remedy(message: QueuedMessage, alias: str) -> str:
    """Say what to do about a dead message."""
    if taken := _taken(message, alias):
        return f"Discard it: {taken}"
    if inbox := _refusing_inbox(message):
        again = command_on(alias, f"mq_consume {inbox} --dead")
        return f"Correct the settings of the inbox {inbox}, then run {again}; or discard it"
    if _is_misfit(message):
        pause, requeue, resume = (
            command_on(alias, each)
            for each in (
                f"mq_pause {message.queue}",
                f"mq_requeue --id {message.pk}",
                f"mq_resume {message.queue}",
            )
        )
        return (
            "Requeued as it is, it would die again. First deploy a handler or an upcast that takes"
            f" its payload; or run {pause} and {requeue}, edit it, and run {resume}. Or discard it:"
            f" {command_on(alias, f'mq_purge --id {message.pk}')}"
        )
    return f"Requeue it to run it again, or discard it: {_commands(message, alias)}"


def _refusing_inbox(message: QueuedMessage) -> str | None:
    """Return the inbox that could not broadcast the message, if that is why it is dead."""
    if message.handler or not message.dead_reason.startswith("cannot be broadcast"):
        return None
    found = message.metadata.get("mq.inbox") if isinstance(message.metadata, dict) else None
    return found if isinstance(found, str) else None


def remedy_of_head(first: QueuedMessage, alias: str) -> str:
    """Say what to do about a dead message that others wait behind."""
    if taken := _taken(first, alias):
        return f"Discard that message so that the others proceed: {taken}"
    if _is_misfit(first):
        return (
            "Deploy a handler or an upcast that takes its payload, and requeue that message, or"
            " discard it, so that the others proceed"
        )
    return f"Requeue or discard that message so that the others proceed: {_commands(first, alias)}"


def _commands(message: QueuedMessage, alias: str) -> str:
    """Return the commands that requeue a dead message and that discard it."""
    requeue, purge = (
        command_on(alias, f"{name} --id {message.pk}") for name in ("mq_requeue", "mq_purge")
    )
    return f"{requeue}, {purge}"


def _is_misfit(message: QueuedMessage) -> bool:
    """Return whether a dead message does not fit the message class of its handler."""
    return message.dead_reason.startswith("InvalidPayload:")


def _taken(message: QueuedMessage, alias: str) -> str:
    """Say which message has the unique id of a dead one, that would take it again."""
    holder = _id_holder(message, alias) if message.unique_id else None
    return f"it cannot be requeued while message {holder} has its unique id" if holder else ""


def _id_holder(message: QueuedMessage, alias: str) -> int | None:
    taken = UniqueKey.objects.using(alias).filter(
        unique_id=message.unique_id,
        type=message.type,
        queue=message.queue,
        handler=message.handler,
        put_aside__isnull=True,
    )
    others = QueuedMessage.objects.using(alias).filter(
        pk__in=taken.values("message_id"), dead_at__isnull=True
    )
    return others.values_list("pk", flat=True).first()
