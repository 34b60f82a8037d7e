"""The timeline of a message: how long it waited before each attempt, and how long these ran."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django_mq.admin.texts import excerpt, full, took
from django_mq.models import FailedAttempt, QueuedMessage

#: One line: what happened, when, and the durations that belong to it.
Event = tuple[str, str, str]


def timeline(message: QueuedMessage, attempts: Iterable[FailedAttempt]) -> list[Event]:
    """Return the events of a message, the first one first, with its latest failed `attempts`.

    An attempt waits from the end of the one before it. If that one is not among `attempts`, the
    wait is unknown.
    """
    now = message.now  # type: ignore[attr-defined]
    events: list[Event] = [("Broadcast", full(message.created_at, now), "")]
    ended, number = message.created_at, 0
    for each in sorted(attempts, key=lambda each: (each.attempt, each.pk)):
        follows = each.attempt == number + 1
        waited = took(ended, each.started_at) if follows and each.started_at else ""
        ran = took(each.started_at, each.ended_at)
        if each.started_at:
            note = f"waited {waited}" if waited else ""
            events.append((f"Attempt {each.attempt} started", full(each.started_at, now), note))
        note = f"{f'ran {ran}, ' if ran else ''}{excerpt(each.error_class) or 'unknown error'}"
        events.append((f"Attempt {each.attempt} failed", full(each.ended_at, now), note))
        ended, number = each.ended_at, each.attempt
    events.append(_last(message, now))
    return events


def _last(message: QueuedMessage, now: Any) -> Event:
    """Return the current or the next event of the message."""
    if message.dead_at is not None:
        return "Dead", full(message.dead_at, now), ""
    if message.leased_until is not None:
        text = f"Attempt {message.attempts} in flight, leased until"
        return text, full(message.leased_until, now), ""
    return "Due", full(message.processable_after, now), ""
