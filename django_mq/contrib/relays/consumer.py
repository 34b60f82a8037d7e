"""Consume an inbox: broadcast what a broker delivers, and ack it after the commit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import monotonic

from django.db import (
    DatabaseError,
    DataError,
    IntegrityError,
    InterfaceError,
    connections,
    transaction,
)

from django_mq.conf import alias_of, get_settings
from django_mq.conf.inboxes import Inbox
from django_mq.contrib.relays.incoming import (
    Incoming,
    Undecodable,
    default_type,
    message_of,
    undecodable_payload,
)
from django_mq.contrib.relays.links import BrokerAway, Source, open_source
from django_mq.contrib.relays.sending import INBOX
from django_mq.exceptions import BroadcastBusy, MQError
from django_mq.executor.connections import plain_connection_as
from django_mq.executor.outage import reason_of
from django_mq.executor.timed_link import TimedLink
from django_mq.executor.watchdog import STALL_MARGIN
from django_mq.messages import Message
from django_mq.outbox import broadcast_many
from django_mq.outbox.origin import metadata_sources
from django_mq.policy.plain_text import one_line
from django_mq.store.insert_dead import insert_dead
from django_mq.store.limits import Limits, set_local

logger = logging.getLogger("django_mq")

#: Seconds to wait for messages in one read; a stop waits for its end.
READ_SECONDS = 1.0
#: Seconds to wait while the broker or the database is away: the first time, and at most.
FIRST_WAIT, LONGEST_WAIT = 0.5, 15.0
#: Seconds that a statement may take; a connection that is silent for longer is replaced.
ANSWER_SECONDS = 30.0
#: Seconds without a step after which `/livez` fails: more than a wait, a look and a statement take.
STALLED_SECONDS = 120.0
#: Errors of a message rather than of the database.
REFUSED = (MQError, DataError, IntegrityError, ValueError, TypeError, RecursionError)


class Consumer:
    """Passes messages from one inbox to handlers until it is told to stop."""

    def __init__(self, name: str, inbox: Inbox, *, using: str | None = None) -> None:
        self.name = name
        self.inbox = inbox
        self.alias = alias_of(using)
        self.stored = self.duplicates = 0
        self._stop = threading.Event()
        self._source: Source | None = None
        self._wait = FIRST_WAIT
        self._waits_for = ""
        self._has_read = False
        self._moved_at = monotonic()

    def stop(self) -> None:
        """Ask it to end after the batch that it stores now."""
        self._stop.set()

    def not_live(self) -> list[str]:
        """Return what is stalled; waiting for a broker or a database is not a stall."""
        stalled = monotonic() - self._moved_at > STALLED_SECONDS
        return ["the inbox is stalled"] if stalled else []

    def not_ready(self) -> list[str]:
        """Return why it takes no messages."""
        if self._waits_for:
            return [f"it waits for the {self._waits_for}"]
        return [] if self._has_read else ["it has not read from the broker yet"]

    def run(self, *, until_empty: bool = False) -> int:
        """Consume until `stop()`, or until nothing is left; return how many messages were stored.

        While the broker or the database is away, or a queue is full (`max_backlog`), it waits.
        Messages that were not acked come again; their unique ids keep them from being stored twice.
        """
        self._log(logging.INFO, "inbox_started", f"consuming {self.inbox.source}")
        try:
            with _bounded_connection(self.alias):
                self._consume(until_empty)
        finally:
            self._close()
        self._log(logging.INFO, "inbox_stopped", summary(self))
        return self.stored

    def _consume(self, until_empty: bool) -> None:
        while not self._stop.is_set():
            self._moved_at = monotonic()
            try:
                if not self._turn() and until_empty:
                    return
            except BrokerAway as away:
                self._close()
                self._wait_for("broker", one_line(str(away)))

    def _turn(self) -> int:
        """Read, store and ack one batch; return its number of messages."""
        if self._source is None:
            self._source = open_source(self.name, self.inbox)
        batch = self._source.receive(self.inbox.batch_size, READ_SECONDS)
        if batch:
            if not self._store_in_the_end(batch):
                return len(batch)
            self._source.ack(batch)
        self._is_back()
        return len(batch)

    def _store_in_the_end(self, batch: Sequence[Incoming]) -> bool:
        """Store a batch, however long the database takes; return False if asked to stop."""
        while not self._stop.is_set():
            self._moved_at = monotonic()
            try:
                self.store(batch)
                return True
            except BroadcastBusy as error:
                if self._waits_for == "workers" and len(batch) > 1:
                    # There may never be room for all at once, if `max_backlog` is less.
                    half = len(batch) // 2
                    parts = batch[:half], batch[half:]
                    return all(self._store_in_the_end(part) for part in parts)
                self._wait_for("workers", one_line(str(error)))
            except (DatabaseError, InterfaceError) as error:
                connections[self.alias].close()
                self._wait_for("database", reason_of(error))
            if self._source is not None:
                self._source.keep_alive()
        return False

    def store(self, batch: Sequence[Incoming]) -> None:
        """Store messages in one transaction: those that cannot be broadcast as dead letters.

        Messages that came before are dropped, and counted as `duplicates`.
        """
        with self.transaction():
            duplicates, refused = self._broadcast_all(batch)
            for each, why in refused:
                self._bury(each, why)
        self._count(len(batch) - duplicates, duplicates)
        if refused:
            text = f"messages stored as dead letters: {len(refused)}"
            self._log(logging.WARNING, "inbox_refused", text)

    def broadcast(self, batch: Sequence[Incoming]) -> list[tuple[Incoming, Undecodable]]:
        """Broadcast messages in one transaction; return those that cannot be, which it leaves."""
        with self.transaction():
            duplicates, refused = self._broadcast_all(batch)
        self._count(len(batch) - duplicates - len(refused), duplicates)
        return refused

    def _count(self, stored: int, duplicates: int) -> None:
        self.stored += stored
        self.duplicates += duplicates
        if duplicates:
            text = f"messages dropped because they came before: {duplicates}"
            self._log(logging.INFO, "inbox_duplicates", text)

    def _broadcast_all(
        self, batch: Sequence[Incoming]
    ) -> tuple[int, list[tuple[Incoming, Undecodable]]]:
        """Broadcast messages; return the number of duplicates, and those that are refused."""
        good: list[tuple[Incoming, Message]] = []
        bad: list[tuple[Incoming, Undecodable]] = []
        for each in batch:
            try:
                good.append((each, message_of(each, self.name, self.inbox)))
            except Undecodable as error:
                bad.append((each, error))
        with marked(self.name):
            duplicates, refused = self._broadcast(good)
        return duplicates, bad + refused

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Open a transaction under limits of its own, unless the caller has opened one.

        The server then ends a statement that waits for a lock: it does not notice that its client
        has replaced the connection, so each try would leave a session behind.
        """
        connection = connections[self.alias]
        own = connection.get_autocommit()
        with transaction.atomic(using=self.alias):
            if own:
                with connection.cursor() as cursor:
                    cursor.execute(set_local(Limits(ANSWER_SECONDS, ANSWER_SECONDS)))
            yield

    def _broadcast(
        self, good: Sequence[tuple[Incoming, Message]]
    ) -> tuple[int, list[tuple[Incoming, Undecodable]]]:
        """Do it in one statement if no message is refused, else one half after the other.

        PostgreSQL keeps only 64 savepoints of a transaction in shared memory, and one for each
        message would be more.
        """
        try:
            with transaction.atomic(using=self.alias):
                receipts = broadcast_many([message for _, message in good], using=self.alias)
        except BroadcastBusy:
            raise
        except REFUSED as error:
            if len(good) == 1:
                return 0, [(good[0][0], Undecodable(type(error).__name__, str(error)))]
            half = len(good) // 2
            first, first_refused = self._broadcast(good[:half])
            second, second_refused = self._broadcast(good[half:])
            return first + second, first_refused + second_refused
        return sum(not receipt for receipt in receipts), []

    def _bury(self, raw: Incoming, refused: Undecodable) -> None:
        """Store a message as a dead letter, with its raw body."""
        with connections[self.alias].cursor() as cursor:
            insert_dead(
                cursor,
                queue=self.inbox.queue or get_settings().default_queue,
                type=default_type(self.name),
                payload=undecodable_payload(raw),
                metadata={INBOX: self.name},
                reason=f"cannot be broadcast: {refused.reason}",
                error=one_line(str(refused)),
            )

    def _wait_for(self, what: str, reason: str) -> None:
        """Wait, longer each time; log only the first wait."""
        if not self._waits_for:
            self._log(logging.WARNING, "inbox_away", f"it waits for the {what}: {reason}")
        self._waits_for = what
        self._stop.wait(self._wait)
        self._wait = min(2 * self._wait, LONGEST_WAIT)

    def _is_back(self) -> None:
        self._wait = FIRST_WAIT
        self._has_read = True
        if self._waits_for:
            self._waits_for = ""
            self._log(logging.INFO, "inbox_back", "it consumes again")

    def _close(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    def _log(self, level: int, event: str, text: str) -> None:
        logger.log(
            level, "inbox %s: %s", self.name, text, extra={"event": event, "inbox": self.name}
        )


def summary(consumer: Consumer) -> str:
    """Return how many messages a consumer has stored, and dropped.

    >>> from types import SimpleNamespace
    >>> summary(SimpleNamespace(stored=1, duplicates=0)), summary(
    ...     SimpleNamespace(stored=5, duplicates=2)
    ... )
    ('stored 1', 'stored 5, dropped 2 that came before')
    """
    dropped = f", dropped {consumer.duplicates} that came before" if consumer.duplicates else ""
    return f"stored {consumer.stored}{dropped}"


@contextmanager
def marked(name: str) -> Iterator[None]:
    """Within the block, broadcasts of this process get the metadata `mq.inbox`."""

    def source() -> dict[str, str]:
        return {INBOX: name}

    metadata_sources.append(source)
    try:
        yield
    finally:
        metadata_sources.remove(source)


def _bounded_connection(alias: str) -> AbstractContextManager[object]:
    """Return a block in which the connection to `alias` is plain, with bounded waits.

    One that is already open, as in a test, stays.
    """
    if connections[alias].connection is not None:
        return nullcontext()
    return plain_connection_as(alias, TimedLink(ANSWER_SECONDS + STALL_MARGIN))
