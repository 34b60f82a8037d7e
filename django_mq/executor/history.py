"""Which handled messages are kept, and for how long: the handler decides, else its queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from django_mq import handlers
from django_mq.conf import Settings, get_settings
from django_mq.executor.ended import Ended
from django_mq.messages import ClaimedRow, fence_of
from django_mq.store.history import HandledDelivery


class HistoryOptions(NamedTuple):
    """Seconds for which a message is kept (0: not at all), and whether with its content."""

    seconds: float
    with_content: bool


class _Known(NamedTuple):
    """The rules that settings and handlers give; `used` is whether any message is kept."""

    settings: Settings
    table: object
    used: bool
    of: dict[tuple[str, str], HistoryOptions]


_known: _Known | None = None


def is_used() -> bool:
    """Return whether any queue or handler keeps a history."""
    return _now().used


def handled(ended: Sequence[Ended]) -> list[HandledDelivery]:
    """Return those of `ended`, which all succeeded, that are kept."""
    known = _now()
    if not known.used:
        return []
    found = (_handled(known, each.delivery._row, each.seconds) for each in ended)
    return [each for each in found if each is not None]


def handled_one(row: ClaimedRow, seconds: float) -> HandledDelivery | None:
    """Return the message whose handler succeeded after `seconds`, if it is kept."""
    known = _now()
    return _handled(known, row, seconds) if known.used else None


def _handled(known: _Known, row: ClaimedRow, seconds: float) -> HandledDelivery | None:
    kind = row.queue, row.handler
    keep = known.of.get(kind)
    if keep is None:
        keep = known.of[kind] = _keep(known.settings, *kind)
    if not keep.seconds:
        return None
    payload = row.payload
    size = len(payload) if payload.isascii() else len(payload.encode())
    return HandledDelivery(fence_of(row), seconds, keep.seconds, size, keep.with_content)


def _now() -> _Known:
    """Return what is known under the current settings, with the current handlers."""
    global _known
    settings, table, found = get_settings(), handlers.table(), _known
    if found is None or found.settings is not settings or found.table is not table:
        kept = (
            *(options.history for options in settings.queues.values()),
            *(each.history for each in handlers.all_handlers()),
        )
        found = _known = _Known(settings, table, any(kept), {})
    return found


def _keep(settings: Settings, queue: str, name: str) -> HistoryOptions:
    options, handler = settings.queue(queue), handlers.get(name)
    seconds, with_content = options.history, options.history_payload
    if handler is not None:
        seconds = seconds if handler.history is None else handler.history
        with_content = with_content if handler.history_payload is None else handler.history_payload
    return HistoryOptions(seconds or 0.0, with_content)
