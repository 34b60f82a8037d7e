"""Cancel, discard, requeue, purge or run messages now; messages in flight are left alone.

Ids are processed in chunks; outside `atomic()` each chunk is a transaction of its own. An action
waits at most a second for a lock, then skips the rest. If a whole table is locked and nothing was
changed yet, it raises OperationalError.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from django.db import OperationalError, connections
from psycopg.errors import LockNotAvailable

from django_mq.conf import alias_of
from django_mq.operations import changes
from django_mq.operations.changes import CHANGES, Change
from django_mq.policy.column_bounds import MAX_BIGINT
from django_mq.policy.names import check_key
from django_mq.queues.arguments import check_fingerprint, check_names, flag, seconds, whole_number
from django_mq.queues.transactions import after_commit, reading, wake, writing
from django_mq.store import select_messages as selection
from django_mq.store.select_messages import Among, Selection
from django_mq.values import short_repr

logger = logging.getLogger("django_mq")

#: Rows per transaction, which keeps their locks short.
CHUNK = 1000
#: Ids in the text of a log line, and in its record.
IDS_IN_TEXT, IDS_IN_RECORD = 10, 1000
MAX_ADDED_ATTEMPTS = 1_000_000

#: The roles of docs/roles.md that allow actions.
ROLES = "mq_operator, or for Django's tasks mq_admin"
#: One id, or several.
Ids = int | Iterable[int]


@dataclass(frozen=True, slots=True)
class Changed:
    """The `ids` that were changed, and the number `skipped`; true when any were changed.

    Messages are skipped if they are in flight, locked by another session, gone, or in a state to
    which the action does not apply.
    """

    ids: tuple[int, ...]
    skipped: int = 0

    def __bool__(self) -> bool:
        return bool(self.ids)


def cancel(
    ids: Ids | None = None, *, fingerprint: str | None = None, using: str | None = None
) -> Changed:
    """Remove the waiting messages among `ids`: due, delayed, retrying, held or blocked.

    Alternatively select them by the `fingerprint` of their last failed attempt, see `errors()`.
    """
    alias = alias_of(using)
    wanted = _named(alias, "all", ids, fingerprint=fingerprint)
    return _change("messages_cancelled", CHANGES["cancel"], wanted, alias)


def discard(
    ids: Ids | None = None, *, fingerprint: str | None = None, using: str | None = None
) -> Changed:
    """Remove the dead letters among `ids`, or those with this `fingerprint`."""
    alias = alias_of(using)
    wanted = _named(alias, "dead", ids, fingerprint=fingerprint)
    return _change("messages_discarded", CHANGES["discard"], wanted, alias)


def run_now(
    ids: Ids | None = None,
    *,
    queue: str | None = None,
    type: str | None = None,
    handler: str | None = None,
    key: str | None = None,
    fingerprint: str | None = None,
    limit: int | None = None,
    dry_run: bool = False,
    using: str | None = None,
) -> Changed:
    """Make delayed, retrying and held messages due now.

    Select them by `ids`, or as in `requeue()` by at least one of the others: at most `limit`, first
    due first. A message behind another of its key keeps its order and is skipped; so is an expired
    one. In a paused queue, messages still wait for the end of the pause. `dry_run` changes nothing
    and returns the messages that it would try.

    A message that is due already keeps its place. It counts as changed if `ids` names it; the other
    selections and `dry_run` leave it out.
    """
    alias = alias_of(using)
    names = {"queue": queue, "type": type, "handler": handler, "key": key}
    wanted = _named(alias, "later", ids, limit=limit, fingerprint=fingerprint, **names)
    if dry_run:
        return _selectable(alias, wanted, "later")
    return _change("messages_run_now", CHANGES["run_now"], wanted, alias)


def requeue(
    ids: Ids | None = None,
    *,
    queue: str | None = None,
    type: str | None = None,
    handler: str | None = None,
    key: str | None = None,
    fingerprint: str | None = None,
    attempts: int = 1,
    limit: int | None = None,
    dry_run: bool = False,
    using: str | None = None,
) -> Changed:
    """Give dead letters at least `attempts` more attempts, due now.

    Select them by `ids`, or by `queue`, `type`, `handler`, order `key` and the `fingerprint` of
    their last failed attempt (None: any): at most `limit`, longest dead first. `max_attempts` is
    raised and attempt numbers continue. An expiry in the past is removed. A message is skipped if
    its unique id has since been taken, or is quiet after a success; of several with the same unique
    id, the last is requeued. `dry_run` changes nothing and returns the messages that it would try.
    """
    whole_number(attempts, "attempts", maximum=MAX_ADDED_ATTEMPTS)
    alias = alias_of(using)
    names = {"queue": queue, "type": type, "handler": handler, "key": key}
    wanted = _selected(alias, "dead", ids, limit=limit, fingerprint=fingerprint, **names)
    if dry_run:
        return _selectable(alias, wanted, "dead")
    if len(wanted) > CHUNK:  # the last of several with one unique id gets it: it goes first
        with reading(alias) as cursor:
            late = selection.with_successor(cursor, ids=wanted)
        wanted = sorted(wanted, key=late.__contains__)
    requeue = partial(changes.requeue, attempts=attempts)
    return _change("messages_requeued", requeue, wanted, alias)


def purge(
    queue: str | None = None,
    *,
    type: str | None = None,
    handler: str | None = None,
    key: str | None = None,
    fingerprint: str | None = None,
    older_than: float | timedelta | None = None,
    waiting: bool = False,
    ids: Ids | None = None,
    limit: int | None = None,
    dry_run: bool = False,
    using: str | None = None,
) -> Changed:
    """Remove dead letters: those in `ids`, or those of `queue`, `type`, `handler` and so on.

    They are selected as in `requeue()`, the longest dead first. Only those that died more than
    `older_than` (seconds or timedelta) ago are removed, at most `limit`. `waiting` also removes
    messages that are due, delayed, retrying, held or blocked (their age counts from the broadcast),
    but never those in flight. Messages behind a removed one proceed. `dry_run` changes nothing and
    returns the messages that it would try.
    """
    alias = alias_of(using)
    among: Among = "all" if flag(waiting, "waiting") else "dead"
    names = {"queue": queue, "type": type, "handler": handler, "key": key}
    age = None if older_than is None else seconds(older_than, "older_than")
    wanted = _selected(
        alias, among, ids, limit=limit, fingerprint=fingerprint, older_than=age, **names
    )
    if dry_run:
        return Changed(tuple(wanted)) if ids is None else _selectable(alias, wanted, among)
    remove = partial(changes.remove, waiting=waiting, dead=True, reason="purged")
    return _change("messages_purged", remove, wanted, alias)


def _change(event: str, change: Change, ids: Sequence[int], alias: str) -> Changed:
    """Apply `change` to `ids` in chunks, and log the messages that were changed."""
    changed: list[int] = []
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        try:
            with writing(alias, role=ROLES) as cursor:
                done = change(cursor, chunk)
                if done.may_run:
                    wake(alias)
        except BaseException as error:
            if isinstance(error, OperationalError) and isinstance(
                error.__cause__, LockNotAvailable
            ):
                # Of a wait for a row the server says where ("while locking tuple"), but not of a
                # wait for a table.
                if changed or error.__cause__.diag.context:
                    break  # wait for a lock at most once: the rest counts as skipped
                raise
            if changed and not connections[alias].in_atomic_block:  # these chunks are committed
                left = Changed(tuple(changed), len(ids) - len(changed))
                log_changed(event, left, " before it was interrupted", alias=alias)
            raise
        ids_done = set(done.ids)
        changed += [id for id in chunk if id in ids_done]
    result = Changed(tuple(changed), len(ids) - len(changed))
    log_changed(event, result, alias=alias)
    return result


def log_changed(event: str, changed: Changed, where: str = "", *, alias: str) -> None:
    """Log an action, unless it changed no message; `where` follows the name of the action."""
    if not changed:
        return
    after_commit(
        alias,
        lambda: logger.info(
            "%s%s: %d, skipped %d (first ids: %s)",
            event.replace("_", " "),
            where,
            len(changed.ids),
            changed.skipped,
            ", ".join(map(str, changed.ids[:IDS_IN_TEXT])),
            extra={
                "event": event,
                "message_ids": changed.ids[:IDS_IN_RECORD],
                "skipped": changed.skipped,
            },
        ),
    )


def _selected(alias: str, among: Among, ids: Ids | None, **filters: Any) -> Sequence[int]:
    """Return `ids`, or those of the messages that match the filters; raises ValueError for both."""
    wanted = Selection(**filters)
    if ids is not None:
        if wanted != Selection():
            raise ValueError("select messages by ids, or by queue, type and so on, not both")
        return checked_ids(ids)
    check_names(queue=wanted.queue, type=wanted.type, handler=wanted.handler)
    if wanted.key is not None:
        check_key(wanted.key, "key")
    if wanted.fingerprint is not None:
        check_fingerprint(wanted.fingerprint)
    if wanted.limit is not None:
        whole_number(wanted.limit, "limit")
    with reading(alias) as cursor:
        return selection.find(cursor, wanted, among=among)


def _named(
    alias: str, among: Among, ids: Ids | None, *, limit: int | None = None, **filters: str | None
) -> Sequence[int]:
    """Return `ids`, or those of the messages that match; raises ValueError for neither."""
    if ids is None and not any(each is not None for each in filters.values()):
        raise ValueError(f"select messages by ids or by {', '.join(filters)}")
    return _selected(alias, among, ids, limit=limit, **filters)


def _selectable(alias: str, ids: Sequence[int], among: Among) -> Changed:
    """Return what an action on `ids` would try."""
    with reading(alias) as cursor:
        found = selection.keep_selectable(cursor, ids=ids, among=among)
    return Changed(tuple(found), len(ids) - len(found))


def checked_ids(ids: Ids) -> list[int]:
    """Return `ids` sorted and without duplicates; raises ValueError for an impossible id."""
    every: list[Any] = [ids]
    if isinstance(ids, Iterable) and not isinstance(ids, str | bytes | bytearray):
        every = list(ids)
    for each in every:
        if type(each) is not int or not 0 < each <= MAX_BIGINT:
            raise ValueError(f"{short_repr(each)} is not the id of a message")
    return sorted(set(every))
