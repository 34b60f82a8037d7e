"""Handled messages: read them, and broadcast them again."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from django.db import connections, transaction
from django.db.models import Q

from django_mq.conf import alias_of, get_settings
from django_mq.models import HandledMessage
from django_mq.outbox.replay import Replays
from django_mq.policy.column_bounds import id_of
from django_mq.policy.names import check_key
from django_mq.queues.actions import Changed, Ids, checked_ids, log_changed
from django_mq.queues.arguments import Moment, check_moment, check_names, past_moment, whole_number
from django_mq.queues.transactions import reading
from django_mq.store import replay as replay_store
from django_mq.values import short_repr

#: Messages that one statement reads or writes.
CHUNK = 1000
#: Private columns: not every user may see payloads.
CONTENT = ("payload", "metadata")


def history(
    *,
    queue: str | None = None,
    type: str | None = None,
    handler: str | None = None,
    key: str | None = None,
    correlation_id: str | None = None,
    since: Moment | None = None,
    until: Moment | None = None,
    limit: int = 100,
    using: str | None = None,
) -> list[HandledMessage]:
    """Return handled messages that match all given filters, the one that ended last first.

    Only queues and handlers with the option `history` keep any. `since` and `until` limit the time
    at which the handler ended: aware datetimes, or seconds or a timedelta ago; `until` itself is
    excluded. `correlation_id` finds a whole chain, including the message that began it. Payload and
    metadata, if they were kept, are read on first access.

    A `key` or a `correlation_id` is found by an index. Other filters scan the messages from the
    newest on: give `since` if few match.
    """
    check_names(queue=queue, type=type, handler=handler)
    whole_number(limit, "limit")
    alias = alias_of(using)
    found = HandledMessage.objects.using(alias).defer(*CONTENT)
    equal = {"queue": queue, "type": type, "handler": handler}
    found = found.filter(**{name: value for name, value in equal.items() if value is not None})
    if key is not None:
        found = found.filter(key=check_key(key, "key"))
    if correlation_id is not None:
        found = found.filter(_in_chain(correlation_id))
    start, end = _period(alias, since, until)
    if start is not None:
        found = found.filter(ended_at__gte=start)
    if end is not None:
        found = found.filter(ended_at__lt=end)
    return list(found.order_by("-ended_at", "-id")[:limit])


def replay(
    *,
    ids: Ids | None = None,
    type: str | None = None,
    since: Moment | None = None,
    until: Moment | None = None,
    handler: str | None = None,
    queue: str | None = None,
    to: str | None = None,
    limit: int | None = None,
    dry_run: bool = False,
    using: str | None = None,
) -> Changed:
    """Broadcast copies of handled messages, all or none; return the ids of the originals.

    `ids`, `type`, `handler`, `queue`, and `since` and `until` as in `history()`, select messages
    that match all of them; give at least one. The copies are stored in the order of the originals,
    at most `limit`, for the handler `to` or else for the handlers of the originals. They keep type,
    payload, metadata, priority and order key, have no unique id, and name the original in
    `mq.replay_of` of their metadata. An id that is not in the history counts as skipped.

    Raises NothingKept if the payload of one of them was not kept, RoutingError if there is no such
    handler here, and BroadcastBusy as `broadcast()` does. `dry_run` stores nothing, does not raise
    NothingKept, and returns what would be replayed.
    """
    check_names(queue=queue, type=type, handler=handler, to=to)
    if limit is not None:
        whole_number(limit, "limit")
    wanted = None if ids is None else checked_ids(ids)
    if all(each is None for each in (wanted, queue, type, handler, since, until)):
        raise ValueError("say which messages to replay: by ids, queue, type, handler, since, until")
    alias = alias_of(using)
    chosen = replay_store.Filter(wanted, queue, type, handler, *_period(alias, since, until))
    replays = Replays(get_settings(), to=to)
    done: list[int] = []
    with transaction.atomic(using=alias):
        for chunk in _chunks(alias, chosen, limit, with_content=not dry_run):
            if dry_run:
                replays.check(chunk)
            else:
                replays.write(connections[alias], chunk)
            done += [each.id for each in chunk]
    result = Changed(tuple(done), 0 if wanted is None else len(wanted) - len(set(done)))
    if not dry_run:
        log_changed("messages_replayed", result, f" to {to}" if to else "", alias=alias)
    return result


def _chunks(
    alias: str, chosen: replay_store.Filter, limit: int | None, *, with_content: bool
) -> Iterator[list[replay_store.PastMessage]]:
    """Yield the messages in chunks; if there are many ids, each statement gets only its own."""
    if chosen.ids is None:
        yield from _pages(alias, chosen, limit, with_content=with_content)
        return
    left = limit
    for start in range(0, len(chosen.ids), CHUNK):
        some = chosen._replace(ids=chosen.ids[start : start + CHUNK])
        for found in _pages(alias, some, left, with_content=with_content):
            yield found
            left = None if left is None else left - len(found)


def _pages(
    alias: str, chosen: replay_store.Filter, limit: int | None, *, with_content: bool
) -> Iterator[list[replay_store.PastMessage]]:
    after, left = 0, limit
    while left is None or left > 0:
        size = CHUNK if left is None else min(CHUNK, left)
        with reading(alias) as cursor:
            found = replay_store.find(
                cursor, chosen, after=after, limit=size, with_content=with_content
            )
        if found:
            yield found
        if len(found) < size:
            return
        after = found[-1].id
        left = None if left is None else left - len(found)


def _in_chain(correlation_id: str) -> Q:
    """Return the condition of a chain; the message that began it gave the chain its own id."""
    if not isinstance(correlation_id, str):
        raise ValueError(f"correlation_id must be text, not {short_repr(correlation_id)}")
    found = Q(correlation_id=correlation_id.replace("\0", ""))
    if (id := id_of(correlation_id)) is not None:
        found |= Q(id=id)
    return found


def _period(
    alias: str, since: Moment | None, until: Moment | None
) -> tuple[datetime | None, datetime | None]:
    """Return the two moments; raise ValueError if they are in the wrong order."""
    for what, at in (("since", since), ("until", until)):
        if at is not None:
            check_moment(at, what)
    start = None if since is None else past_moment(alias, since, "since")
    end = None if until is None else past_moment(alias, until, "until")
    if start is not None and end is not None and start > end:
        # As they were given, in the caller's time zone; seconds say more as a moment.
        first, last = (
            given if isinstance(given, datetime) else at
            for given, at in ((since, start), (until, end))
        )
        raise ValueError(f"since must be before until, but {first} is after {last}")
    return start, end
