"""What operators do to messages. None in flight is touched or made twice, nobody waits long.

Ids are worked off in chunks; outside `atomic()` each chunk is a transaction of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from django.db import OperationalError
from django.db.backends.utils import CursorWrapper

from django_mq.backoff import as_seconds
from django_mq.conf import get_settings
from django_mq.queues.checking import LARGEST, LONGEST, whole
from django_mq.queues.connecting import alias_of, reading, wake, writing
from django_mq.routing import check_name
from django_mq.store import freeing, operate

logger = logging.getLogger("django_mq")

#: Rows of one transaction: it holds their locks, and a hundred chunks make no long one.
CHUNK = 1000
#: A log line names so many ids, its record so many.
NAMED, RECORDED = 10, 1000
LARGEST_ID = LARGEST
MOST_ATTEMPTS = 1_000_000
LOCK_NOT_AVAILABLE = "55P03"


#: One id, or several.
Ids = int | Iterable[int]


@dataclass(frozen=True, slots=True)
class Changed:
    """`ids` were changed; `skipped` counts the others that were asked for: in flight, locked by
    somebody, gone, or in a state that the action is not for. True when anything was changed.
    """

    ids: tuple[int, ...]
    skipped: int = 0

    def __bool__(self) -> bool:
        return bool(self.ids)


def cancel(ids: Ids, *, using: str | None = None) -> Changed:
    """Remove the messages of `ids` that wait: due, delayed, retrying, held or blocked."""
    remove = partial(_remove, waiting=True, dead=False, reason="cancelled")
    return _change("messages_cancelled", remove, _checked(ids), alias_of(using))


def discard(ids: Ids, *, using: str | None = None) -> Changed:
    """Remove the dead letters of `ids`."""
    remove = partial(_remove, waiting=False, dead=True, reason="discarded")
    return _change("messages_discarded", remove, _checked(ids), alias_of(using))


def run_now(ids: Ids, *, using: str | None = None) -> Changed:
    """Make the messages of `ids` due now: delayed, retrying or held.

    One behind another of its key is skipped, since its order is kept; so is an expired one. In a
    paused queue they wait for the end of the pause.
    """

    def run(cursor: CursorWrapper, chunk: Sequence[int]) -> list[int]:
        return operate.run_now(cursor, ids=chunk)

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

    Either those of `ids`; or those of `queue`, `type`, `handler` and order `key` (None: any), at
    most `limit`, longest dead first. `max_attempts` is raised, and the numbers of the attempts go
    on. An expiry that has passed is taken off. One whose unique id has been taken since is
    skipped, also in the quiet time after a success; of several with one id the last is requeued.
    `dry_run` changes nothing and returns what would be tried.
    """
    whole(attempts, "attempts", most=MOST_ATTEMPTS)

    def again(cursor: CursorWrapper, chunk: Sequence[int]) -> list[int]:
        unique = freeing.take_again(cursor, ids=chunk)
        return operate.requeue(cursor, ids=chunk, attempts=attempts, unique=unique)

    alias = alias_of(using)
    if ids is None:
        wanted = _find(alias, queue=queue, type=type, handler=handler, key=key, limit=limit)
    elif (queue, type, handler, key, limit) == (None,) * 5:
        wanted = _checked(ids)
    else:
        raise ValueError("give ids, or what the dead letters have in common, not both")
    if dry_run:
        dead = _find(alias, ids=wanted)
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
    """Remove the dead letters of `queue`, `type`, `handler` and order `key` (None: any), longest
    dead first; or those of `ids`.

    Only those that died more than `older_than` (seconds or timedelta) ago, and at most `limit`.
    `waiting` removes as well what never ran to its end: due, delayed, retrying, held, blocked
    (its age counts from the broadcast); messages in flight are skipped all the same. What waits
    behind them in their keys goes on. `dry_run` changes nothing and returns what would be tried.
    """
    seconds = None if older_than is None else as_seconds(older_than)
    if older_than is not None and (seconds is None or seconds > LONGEST):
        raise ValueError(f"older_than is seconds or a timedelta, not {older_than!r}")
    alias = alias_of(using)
    if ids is None:
        wanted = _find(
            alias,
            queue=queue,
            type=type,
            handler=handler,
            key=key,
            older_than=seconds,
            waiting=waiting,
            limit=limit,
        )
    elif (queue, type, handler, key, older_than, limit) == (None,) * 6:
        wanted = _checked(ids)
    else:
        raise ValueError("give ids, or what the messages have in common, not both")
    if dry_run:
        found = wanted if ids is None else _find(alias, ids=wanted, waiting=waiting)
        return Changed(tuple(found), len(wanted) - len(found))
    remove = partial(_remove, waiting=waiting, dead=True, reason="purged")
    return _change("messages_purged", remove, wanted, alias)


Change = Callable[[CursorWrapper, Sequence[int]], list[int]]


def _change(event: str, change: Change, ids: Sequence[int], alias: str) -> Changed:
    """Apply `change` to `ids` in chunks, and leave a line in the log.

    What an operator removed or moved does not disappear without a trace.
    """
    changed: list[int] = []
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        try:
            with writing(alias) as cursor:
                done = set(change(cursor, chunk))
        except OperationalError as error:
            if getattr(error.__cause__, "sqlstate", None) != LOCK_NOT_AVAILABLE:
                raise
            break  # one wait of a second is enough: what is left is skipped
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
    gone = operate.remove(cursor, ids=ids, waiting=waiting, dead=dead, reason=reason)
    operate.free_followers(cursor, gone)
    freeing.end_removed(cursor, gone)
    settings = get_settings()
    if any(row.key is not None or settings.queue(row.queue).ordered for row in gone):
        wake(cursor.db.alias)  # what was behind them may be due
    return [row.id for row in gone]


def _find(
    alias: str,
    *,
    ids: Sequence[int] | None = None,
    queue: str | None = None,
    type: str | None = None,
    handler: str | None = None,
    key: str | None = None,
    limit: int | None = None,
    older_than: float | None = None,
    waiting: bool = False,
) -> list[int]:
    for what, name in (("queue", queue), ("type", type), ("handler", handler), ("key", key)):
        if name is not None:
            check_name(name, what)
    if limit is not None:
        whole(limit, "limit")
    with reading(alias) as cursor:
        return operate.find(
            cursor,
            ids=ids,
            queue=queue,
            type=type,
            handler=handler,
            key=key,
            older_than=older_than,
            waiting=waiting,
            limit=limit,
        )


def _checked(ids: Ids) -> list[int]:
    """Return `ids` sorted, each once; raises ValueError for what cannot be an id."""
    every = list(ids) if isinstance(ids, Iterable) else [ids]
    for each in every:
        if type(each) is not int or not 0 < each <= LARGEST_ID:
            raise ValueError(f"{each!r} is not the id of a message")
    return sorted(set(every))
