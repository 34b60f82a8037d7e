"""Failed attempts in groups: each has the same error class, handler and place in the code."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter

from django_mq.conf import alias_of
from django_mq.models import FailedAttempt
from django_mq.policy.column_bounds import FIRST_TIME
from django_mq.queues.arguments import (
    Moment,
    check_fingerprint,
    past_moment,
    queue_names,
    whole_number,
)
from django_mq.queues.transactions import reading
from django_mq.store import error_groups
from django_mq.store.error_groups import MAX_COUNTED, PairRow

#: The most groups that one call returns.
MAX_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """The failed attempts with one fingerprint: class, handler and place are the same.

    `place` is module and function, empty if no traceback shows it. `attempt_id` and `message_id`
    belong to the newest attempt. `dead` and `waiting` count stored messages whose last failure has
    this fingerprint. Only messages of the newest 1,000 attempts per queue are examined; if there
    are many groups, of the newest 10,000, shared evenly. `is_exact` is false if there are more, or
    more than 100,000 attempts in a queue.
    """

    fingerprint: str
    error_class: str
    handler: str
    place: str
    queues: tuple[str, ...]
    count: int
    first: datetime
    last: datetime
    attempt_id: int
    message_id: int
    dead: int = 0
    waiting: int = 0
    is_exact: bool = True


def error_words(error: ErrorGroup | FailedAttempt) -> str:
    """Return what a fingerprint tells apart: class, handler and place."""
    handler = f" in handler {error.handler}" if error.handler else ""
    place = f", at {error.place}" if error.place else ""
    return f"{error.error_class}{handler}{place}"


def errors(
    since: Moment | None = None,
    queue: str | Collection[str] | None = None,
    *,
    fingerprint: str | None = None,
    limit: int = 100,
    offset: int = 0,
    using: str | None = None,
) -> list[ErrorGroup]:
    """Return the groups of failed attempts, the most recent failure first.

    `since` is an aware datetime, or how long ago (seconds or timedelta); None: all stored attempts,
    see ATTEMPT_RETENTION. `queue` is a name, or several. With `fingerprint`, only its group is
    returned; otherwise at most `limit` groups, after the first `offset`.
    """
    names = queue_names(queue)
    if fingerprint is not None:
        check_fingerprint(fingerprint)
    whole_number(limit, "limit", maximum=MAX_LIMIT)
    whole_number(offset, "offset", minimum=0, maximum=10**9 - 1)
    alias = alias_of(using)
    start = FIRST_TIME if since is None else past_moment(alias, since, "since")
    with reading(alias) as cursor:
        pairs = error_groups.groups(
            cursor,
            since=start,
            queues=names,
            fingerprint=fingerprint,
            limit=limit,
            offset=offset,
        )
        left = error_groups.remaining_messages(cursor, pairs, since=start) if pairs else {}
    pairs.sort(key=attrgetter("fingerprint"))
    maximum = error_groups.attempts_per_pair(pairs)
    found = [
        _group(list(rows), maximum, *left.get(fingerprint, (0, 0)))
        for fingerprint, rows in groupby(pairs, key=attrgetter("fingerprint"))
    ]
    return sorted(found, key=attrgetter("last"), reverse=True)


def _group(pairs: list[PairRow], maximum: int, dead: int, waiting: int) -> ErrorGroup:
    newest = max(pairs, key=attrgetter("last"))
    looked_up = all(pair.attempts <= maximum for pair in pairs)
    return ErrorGroup(
        fingerprint=newest.fingerprint,
        error_class=newest.error_class,
        handler=newest.handler,
        place=newest.place,
        queues=tuple(sorted(pair.queue for pair in pairs)),
        count=sum(min(pair.attempts, MAX_COUNTED) for pair in pairs),
        first=datetime.fromtimestamp(min(pair.first for pair in pairs), UTC),
        last=datetime.fromtimestamp(newest.last, UTC),
        attempt_id=newest.attempt,
        message_id=newest.message,
        dead=dead,
        waiting=waiting,
        is_exact=looked_up and all(pair.attempts <= MAX_COUNTED for pair in pairs),
    )
