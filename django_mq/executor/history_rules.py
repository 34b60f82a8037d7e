"""Which handled messages are kept, and for how long: the handler's option, else its queue's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from django_mq import handlers
from django_mq.conf import Settings, get_settings
from django_mq.executor.ended import Ended
from django_mq.messages import ClaimedRow, fence_of
from django_mq.store.history import HandledDelivery


class HistoryOptions(NamedTuple):
    """Seconds for which a message is kept (0: not at all), and whether its content is kept, too."""

    seconds: float
    with_content: bool


class _HistoryRules(NamedTuple):
    """The rules from settings and handlers; `used` says whether any message is kept."""

    settings: Settings
    table: object
    used: bool
    by_handler: dict[tuple[str, str], HistoryOptions]


_rules: _HistoryRules | None = None


def is_used() -> bool:
    """Return whether any queue or handler keeps a history."""
    return _current_rules().used


def handled(ended: Sequence[Ended]) -> list[HandledDelivery]:
    """Return the messages of `ended`, which all succeeded, whose history is kept."""
    rules = _current_rules()
    if not rules.used:
        return []
    found = (_handled(rules, each.delivery._row, each.seconds) for each in ended)
    return [each for each in found if each is not None]


def handled_one(row: ClaimedRow, seconds: float) -> HandledDelivery | None:
    """Return the message whose handler succeeded after `seconds`, if it is kept."""
    rules = _current_rules()
    return _handled(rules, row, seconds) if rules.used else None


def _handled(rules: _HistoryRules, row: ClaimedRow, seconds: float) -> HandledDelivery | None:
    kind = row.queue, row.handler
    options = rules.by_handler.get(kind)
    if options is None:
        options = rules.by_handler[kind] = _options(rules.settings, *kind)
    if not options.seconds:
        return None
    payload = row.payload
    size = len(payload) if payload.isascii() else len(payload.encode())
    return HandledDelivery(fence_of(row), seconds, options.seconds, size, options.with_content)


def _current_rules() -> _HistoryRules:
    """Return the rules of the current settings and handlers."""
    global _rules
    settings, table, found = get_settings(), handlers.table(), _rules
    if found is None or found.settings is not settings or found.table is not table:
        kept = (
            *(options.history for options in settings.queues.values()),
            *(each.history for each in handlers.all_handlers()),
        )
        found = _rules = _HistoryRules(settings, table, any(kept), {})
    return found


def _options(settings: Settings, queue: str, name: str) -> HistoryOptions:
    options, handler = settings.queue(queue), handlers.get(name)
    seconds, with_content = options.history, options.history_payload
    if handler is not None:
        seconds = seconds if handler.history is None else handler.history
        with_content = with_content if handler.history_payload is None else handler.history_payload
    return HistoryOptions(seconds or 0.0, with_content)
