"""NOTIFY: a hint to sleeping workers that messages may be due."""

from __future__ import annotations

from django_mq.conf import get_settings
from django_mq.store import Cursor


def is_enabled() -> bool:
    """Return whether to notify at all: where WAKEUP is "poll", nobody listens.

    Statements read this one setting by themselves, so that no caller can forget it.
    """
    return get_settings().wakeup != "poll"


#: The channel on which workers hear of due messages. There is only one, and it carries no payloads,
#: since every login may listen.
CHANNEL = "django_mq"

# A session that listens, in any database of the server, and stays in a transaction keeps all later
# notifications in the server's queue. When that is full, the COMMIT of a transaction with a NOTIFY
# fails, such as one that settles messages. So no worker rings when it is nearly full, and workers
# poll. The function also removes what all sessions have read; a full queue stays full until
# somebody calls it (PostgreSQL 18).
USAGE = "pg_notification_queue_usage()"
FULL = 0.9
HAS_ROOM = f"{USAGE} < {FULL}"

# A NOTIFY writes a commit record, so without synchronous_commit=off the commit would wait for the
# disk. If a crash loses the ring, the next poll finds the message. This is one statement that needs
# no plan and returns no row: 85 us of CPU through Django's cursor, against 106 with the condition.
RING = f"""
do $$ begin set local synchronous_commit to off; notify {CHANNEL}; end $$
"""


def ring(cursor: Cursor) -> None:
    """Wake the workers that listen. Outside a transaction, this does not wait for the disk.

    The database refuses it if the server's queue of notifications is full.
    """
    if is_enabled():
        cursor.execute(RING)


RING_IF_ROOM = f"""
select set_config('synchronous_commit', 'off', true), pg_notify('{CHANNEL}', '') where {HAS_ROOM}
"""


def ring_if_room(cursor: Cursor) -> None:
    """Do as `ring()`, but not while the server's queue of notifications is nearly full."""
    if is_enabled():
        cursor.execute(RING_IF_ROOM)


RING_AT_COMMIT = f"select pg_notify('{CHANNEL}', '') where {HAS_ROOM}"


def ring_at_commit(cursor: Cursor) -> None:
    """Wake the workers when the open transaction commits, which stays as durable as it is."""
    if is_enabled():
        cursor.execute(RING_AT_COMMIT)


def queue_usage(cursor: Cursor) -> float:
    """Return which share of the server's queue of notifications is in use."""
    cursor.execute(f"select {USAGE}")
    (usage,) = cursor.fetchone()
    return float(usage)
