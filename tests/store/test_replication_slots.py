"""Replication slots that the server has given up: they hold nothing back."""

from __future__ import annotations

import struct
from typing import Any

import psycopg
import pytest
from psycopg import pq

from django_mq.store import oldest_snapshot, server_facts
from tests.acceptance.private import running, url_of
from tests.waiting import until

SLOT = "select count(*) from pg_replication_slots where "


def holders(cursor: psycopg.Cursor[Any]) -> tuple[list[str], list[str]]:
    """Return the slots that hold back vacuum, and those that keep WAL."""
    snapshots = oldest_snapshot.horizon(cursor, older_than=0.0, limit=10)
    wal = server_facts.idle_slots(cursor, kept=0, limit=10)
    return [each.name for each in snapshots], [name for name, _ in wal]


def hold_a_snapshot(url: str, cursor: psycopg.Cursor[Any]) -> None:
    """Report a snapshot as a standby with hot_standby_feedback does, and disconnect."""
    cursor.execute("select pg_current_wal_flush_lsn(), txid_current()")
    position, snapshot = cursor.fetchone() or ()
    standby = pq.PGconn.connect(f"{url}&replication=true".encode())
    try:
        started = standby.exec_(f"START_REPLICATION SLOT standby PHYSICAL {position}".encode())
        assert started.status == pq.ExecStatus.COPY_BOTH, started.error_message
        standby.put_copy_data(b"h" + struct.pack("!qIIII", 0, snapshot, 0, 0, 0))
        standby.flush()
        until(lambda: _is(cursor, "xmin is not null"), "the slot has the snapshot")
    finally:
        standby.finish()
    until(lambda: _is(cursor, "not active"), "the standby is gone")


def _is(cursor: psycopg.Cursor[Any], condition: str) -> bool:
    return cursor.execute(SLOT + condition).fetchone() == (1,)


@pytest.mark.thorough
def test_a_lost_slot_holds_nothing() -> None:
    """Its row keeps the snapshot and the position, but the server no longer regards them."""
    with running() as server, psycopg.connect(url_of(server), autocommit=True) as session:
        if session.info.server_version < 180000:
            pytest.skip("needs PostgreSQL 18 (idle_replication_slot_timeout)")
        cursor = session.cursor()
        cursor.execute("select pg_create_physical_replication_slot('standby', true)")
        hold_a_snapshot(url_of(server), cursor)
        assert holders(cursor) == (["standby"], ["standby"])
        cursor.execute("alter system set idle_replication_slot_timeout = '1s'")
        cursor.execute("select pg_reload_conf()")

        def is_lost() -> bool:
            cursor.execute("checkpoint")
            return _is(cursor, "wal_status = 'lost' and restart_lsn is not null")

        until(is_lost, "the server gives up the slot")
        assert holders(cursor) == ([], [])
