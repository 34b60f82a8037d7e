"""Rows that the database does not let workers claim: found, left out for a while, reported once.

A trigger, a row-level policy or a new constraint may refuse the claim of one row, and with it the
whole statement. Without this module, that row would stop its queue, and every other queue of its
workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, perf_counter
from typing import Protocol, TypeVar

import psycopg

from django_mq.conf.error_logs import error_name, traced
from django_mq.executor.connections import is_idle
from django_mq.executor.statements import within_transaction
from django_mq.store import Cursor, refused_rows
from django_mq.store.server_errors import LOST

logger = logging.getLogger("django_mq")

#: Seconds for which a refused row is left out of claims.
LEAVE_OUT_SECONDS = 60.0
#: Seconds after which a row that is still refused is reported again.
REPORT_AGAIN_SECONDS = 3600.0
#: The maximum number of rows left out. If more are refused, single rows are not the cause.
MAX_LEFT_OUT = 1000
#: The maximum number of seconds that one search takes.
SEARCH_SECONDS = 5.0

Taken = TypeVar("Taken")


class FindCandidates(Protocol):
    """Returns the rows that a claim may have changed, except the rows `excluded`: queues by id."""

    def __call__(self, *, excluded: Sequence[int]) -> Mapping[int, str]: ...


class RefusedRows:
    """The rows that claims of this process leave out; used by the thread that claims."""

    def __init__(self) -> None:
        # By id: the queue of the row, and the time until which the row is left out.
        self._rows: dict[int, tuple[str, float]] = {}
        self._reported_at: dict[int, float] = {}
        #: The seconds that all searches took.
        self.searched_for = 0.0

    def ids(self) -> Sequence[int]:
        """Return the rows to leave out now; the others are tried again."""
        if not self._rows:
            return ()
        now = monotonic()
        self._rows = {id: row for id, row in self._rows.items() if row[1] > now}
        return list(self._rows)

    def queues(self) -> set[str]:
        """Return the queues with a row that is left out."""
        return {queue for queue, _ in self._rows.values()}

    def claim_without_refused(
        self, cursor: Cursor, claim: Callable[[], Taken], candidates: FindCandidates
    ) -> Taken:
        """Return the result of `claim()`, which leaves out rows that the database refuses.

        Raises errors that no row explains.
        """
        while True:
            try:
                return claim()
            except psycopg.Error as error:
                began = perf_counter()
                found = self._any_found(cursor, error, candidates)
                self.searched_for += perf_counter() - began
                if not found:
                    raise

    def _any_found(self, cursor: Cursor, error: psycopg.Error, candidates: FindCandidates) -> bool:
        """Return whether rows explain the `error` of a claim; from now on those rows are left out.

        No row explains a lost database, nor an error that the server also raises when there is
        nothing to change: then a table or a right is missing.
        """
        if isinstance(error, LOST) or not is_idle(cursor.connection):
            return False
        with within_transaction(cursor):
            if _refusal(cursor, ()) is not None:
                return False
            queues = candidates(excluded=self.ids())
            refused = _search(cursor, sorted(queues), maximum=MAX_LEFT_OUT - len(self._rows))
        now = monotonic()
        for id, reason in refused.items():
            self._rows[id] = queues[id], now + LEAVE_OUT_SECONDS
            self._report(id, queues[id], reason, now)
        return bool(refused)

    def _report(self, id: int, queue: str, error: psycopg.Error, now: float) -> None:
        """Log a refused row, unless it was logged a while ago."""
        if now - self._reported_at.get(id, float("-inf")) < REPORT_AGAIN_SECONDS:
            return
        if len(self._reported_at) >= MAX_LEFT_OUT:
            self._reported_at.clear()
        self._reported_at[id] = now
        logger.error(
            "message %s (queue %s) cannot be claimed: the database refuses it (%s); the others go"
            " on without it, and workers try it again every %.0f s",
            id,
            queue,
            error_name(error),
            LEAVE_OUT_SECONDS,
            exc_info=traced(error),
            extra={"event": "claim_refused", "message_id": id, "queue": queue},
        )


def _search(cursor: Cursor, ids: Sequence[int], *, maximum: int) -> dict[int, psycopg.Error]:
    """Return up to `maximum` of `ids` that cannot be claimed, each with its error, by bisection."""
    found: dict[int, psycopg.Error] = {}
    parts = [ids]
    ends_at = monotonic() + SEARCH_SECONDS
    while parts and len(found) < maximum and monotonic() < ends_at:
        part = parts.pop()
        error = _refusal(cursor, part) if part else None
        if error is None:
            continue
        if len(part) == 1:
            found[part[0]] = error
        else:
            half = len(part) // 2
            parts += [part[half:], part[:half]]
    return found


def _refusal(cursor: Cursor, ids: Sequence[int]) -> psycopg.Error | None:
    """Return the error with which the server refuses the claim of `ids`; the claim is undone."""
    try:
        with cursor.connection.transaction(force_rollback=True):
            refused_rows.try_claim(cursor, ids)
    except LOST:
        raise
    except psycopg.Error as error:
        return error
    return None
