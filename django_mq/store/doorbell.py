"""NOTIFY: a hint to sleeping workers that there is something to look for."""

from __future__ import annotations

from django_mq.store import Cursor

# One channel, and no payload: every login of the database may listen. Without
# synchronous_commit=off the commit of this one statement would wait for the disk (a NOTIFY
# writes a commit record), and a ring that a crash loses is found by the next poll.
RING = """
select set_config('synchronous_commit', 'off', true), pg_notify('django_mq', '')
"""


def ring(cursor: Cursor) -> None:
    """Wake the workers that listen. Outside a transaction it costs no wait for the disk."""
    cursor.execute(RING)
