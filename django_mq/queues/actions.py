"""Cancel, discard, requeue, purge or run messages now; messages in flight are left alone.

Ids are processed in chunks; outside `atomic()` each chunk is a transaction of its own. An action
waits a second at most for locked rows, then skips them and the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from django.db import OperationalError
from django.db.backends.utils import CursorWrapper

from django_mq.conf import alias_of, get_settings
from django_mq.outbox.notify import ring_for_next
from django_mq.policy.routing import check_key, check_name
from django_mq.queues.arguments import LARGEST, flag, seconds, whole
from django_mq.queues.transactions import reading, wake, writing
from django_mq.store import free_unique_ids as freeing
from django_mq.store import operators as store
from django_mq.store import queue_names
from django_mq.store import select_messages as selection

logger = logging.getLogger("django_mq")

#: Rows per transaction, which keeps their locks short.
CHUNK = 1000
#: Ids in the text of a log line, and in its record.
NAMED, RECORDED = 10, 1000
MOST_ATTEMPTS = 1_000_000
LOCK_NOT_AVAILABLE = "55P03"

#: One id, or several.
Ids = int | Iterable[int]


@dataclass(frozen=True, slots=True)
class Changed:
    """The `ids` that were changed, and the number `skipped`; true when any were changed.

    Messages are skipped when they are in flight, locked by another session, gone, or in a state
    that the action does not apply to.
    """

    ids: tuple[int, ...]
    skipped: int = 0

    def __bool__(self) -> bool:
        return bool(self.ids)


def cancel(ids: Ids, *, using: str | None = None) -> Changed:
    """Remove those of `ids` that wait: due, delayed, retrying, held or blocked."""
    remove = partial(_remove, waiting=True, dead=False, reason="cancelled")
    return _change("messages_cancelled", remove, _checked(ids), alias_of(using))


def discard(ids: Ids, *, using: str | None = None) -> Changed:
    """Remove those of `ids` that are dead letters."""
    remove = partial(_remove, waiting=False, dead=True, reason="discarded")
    return _change("messages_discarded", remove, _checked(ids), alias_of(using))


def run_now(ids: Ids, *, using: str | None = None) -> Changed:
    """Make those of `ids` due now that are delayed, retrying or held.

    A message behind another of its key keeps its order and is skipped; so is an expired one. In a
    paused queue they still wait for the end of the pause.
    """

    def run(cursor: CursorWrapper, chunk: Sequence[int]) -> list[int]:
        return store.run_now(cursor, ids=chunk)

    alias = alias_of(using)
    changed = _change("messages_run_now", run, _checked(ids), alias)
    if changed:
        wake(alias)
    return changed


def requeue(
    ids: Ids | None = None,
    *,
    queue: str | None = None,
    type: str | None = None,
    handler: str | None = None,
    key: str | None = None,
    attempts: int = 1,
    limit: int | None = None,
    dry_run: bool = False,
    using: str | None = None,
) -> Changed:
    """Give dead letters at least `attempts` more attempts, due now.

    Select them by `ids`, or by `queue`, `type`, `handler` and order `key` (None: any), at most
    `limit`, longest dead first. `max_attempts` is raised and attempt numbers continue. An expiry
    in the past is removed. A message is skipped if its unique id is taken by now, or quiet after
    a success; of several with the same unique id the last is requeued. `dry_run` changes nothing
    and returns the messages that would be tried.
    """
    whole(attempts, "attempts", most=MOST_ATTEMPTS)

    def again(cursor: CursorWrapper, chunk: Sequence[int]) -> list[int]:
        unique = freeing.take_again(cursor, ids=chunk)
        return store.requeue(cursor, ids=chunk, attempts=attempts, unique=unique)

    alias = alias_of(using)
    wanted = _selected(alias, ids, queue=queue, type=type, handler=handler, key=key, limit=limit)
    if dry_run:
        dead = _among(alias, wanted)
        return Changed(tuple(dead), len(wanted) - len(dead))
    changed = _change("messages_requeued", again, wanted, alias)
    if changed:
        wake(alias)
    return changed


def purge(
    queue: str | None = None,
    *,
    type: str | None = None,
    handler: str | None = None,
    key: str | None = None,
    older_than: float | timedelta | None = None,
    waiting: bool = False,
    ids: Ids | None = None,
    limit: int | None = None,
    dry_run: bool = False,
    using: str | None = None,
) -> Changed:
    """Remove dead letters: those of `ids`, or those of `queue`, `type`, `handler` and order `key`.

    None means any; the longest dead go first. Only those that died more than `older_than`
    (seconds or timedelta) ago are removed, and at most `limit`. `waiting` also removes messages
    that are due, delayed, retrying, held or blocked (their age counts from the broadcast), but
    never those in flight. Messages behind a removed one proceed. `dry_run` changes nothing and
    returns the messages that would be tried.
    """
    alias = alias_of(using)
    wanted = _selected(
        alias,
        ids,
        waiting=flag(waiting, "waiting"),
        queue=queue,
        type=type,
        handler=handler,
        key=key,
        older_than=None if older_than is None else seconds(older_than, "older_than"),
        limit=limit,
    )
    if dry_run:
        found = wanted if ids is None else _among(alias, wanted, waiting=waiting)
        return Changed(tuple(found), len(wanted) - len(found))
    remove = partial(_remove, waiting=waiting, dead=True, reason="purged")
    return _change("messages_purged", remove, wanted, alias)


Change = Callable[[CursorWrapper, Sequence[int]], list[int]]


def _change(event: str, change: Change, ids: Sequence[int], alias: str) -> Changed:
    """Apply `change` to `ids` in chunks and log it, so that no operation is without a trace."""
    changed: list[int] = []
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        try:
            with writing(alias) as cursor:
                done = set(change(cursor, chunk))
        except OperationalError as error:
            if getattr(error.__cause__, "sqlstate", None) != LOCK_NOT_AVAILABLE:
                raise
            break  # wait for a lock once at most: the rest counts as skipped
        changed += [id for id in chunk if id in done]
    result = Changed(tuple(changed), len(ids) - len(changed))
    logger.info(
        "%s: %d, skipped %d (first ids: %s)",
        event.replace("_", " "),
        len(result.ids),
        result.skipped,
        ", ".join(map(str, result.ids[:NAMED])) or "none",
        extra={"event": event, "message_ids": result.ids[:RECORDED], "skipped": result.skipped},
    )
    return result


def _remove(
    cursor: CursorWrapper, ids: Sequence[int], *, waiting: bool, dead: bool, reason: str
) -> list[int]:
    removed = store.remove(cursor, ids=ids, waiting=waiting, dead=dead, reason=reason)
    store.free_followers(cursor, removed)
    freeing.end_removed(cursor, removed)
    ring_for_next(cursor.db, get_settings(), removed)
    return [row.id for row in removed]


def _selected(
    alias: str, ids: Ids | None, *, waiting: bool = False, **filters: Any
) -> Sequence[int]:
    """Return `ids`, or those of the messages that match `filters`; raises ValueError for both."""
    if ids is None:
        return _find(alias, waiting=waiting, **filters)
    if any(value is not None for value in filters.values()):
        raise ValueError("select messages by ids, or by queue, type and so on, not both")
    return _checked(ids)


def _among(alias: str, ids: Sequence[int], *, waiting: bool = False) -> list[int]:
    with reading(alias) as cursor:
        return selection.among(cursor, ids=ids, waiting=waiting)


def _find(
    alias: str,
    *,
    queue: str | None = None,
    type: str | None = None,
    handler: str | None = None,
    key: str | None = None,
    limit: int | None = None,
    older_than: float | None = None,
    waiting: bool = False,
) -> list[int]:
    for what, name in (("queue", queue), ("type", type), ("handler", handler)):
        if name is not None:
            check_name(name, what)
    if key is not None:
        check_key(key, "key")
    if limit is not None:
        whole(limit, "limit")
    with reading(alias) as cursor:
        return selection.find(
            cursor,
            queues=sorted(queue_names.names(cursor)) if queue is None else [queue],
            type=type,
            handler=handler,
            key=key,
            older_than=older_than,
            waiting=waiting,
            limit=limit,
        )


def _checked(ids: Ids) -> list[int]:
    """Return `ids` sorted and without repeats; raises ValueError for an impossible id."""
    every = list(ids) if isinstance(ids, Iterable) else [ids]
    for each in every:
        if type(each) is not int or not 0 < each <= LARGEST:
            raise ValueError(f"{each!r} is not the id of a message")
    return sorted(set(every))
