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

# A NOTIFY writes a commit record, so without synchronous_commit=off the commit would wait for the
# disk. If a crash loses the ring, the next poll finds the message. This is one statement that needs
# no plan and returns no row: it takes 110 us of CPU through Django's cursor; a SELECT of
# set_config() and pg_notify() takes 173.
RING = f"""
do $$ begin set local synchronous_commit to off; notify {CHANNEL}; end $$
"""


def ring(cursor: Cursor) -> None:
    """Wake the workers that listen. Outside a transaction, this does not wait for the disk."""
    if is_enabled():
        cursor.execute(RING)


RING_AT_COMMIT = f"select pg_notify('{CHANNEL}', '')"


def ring_at_commit(cursor: Cursor) -> None:
    """Wake the workers when the open transaction commits, which stays as durable as it is."""
    if is_enabled():
        cursor.execute(RING_AT_COMMIT)
