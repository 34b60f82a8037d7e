"""Causes of dead rows in the tables, which slow down every claim."""

from __future__ import annotations

from collections.abc import Iterator

from django_mq.queues.doctor.findings import Finding, own_tables, short_cursor
from django_mq.store import oldest_snapshot, server_facts
from django_mq.store.oldest_snapshot import HorizonHolder
from django_mq.store.vacuum import versions

#: Seconds after which an open snapshot is old.
OLD_SNAPSHOT_SECONDS = 300.0
#: The maximum number of holders that are reported.
MAX_HOLDERS = 20
#: The bytes of WAL above which an inactive slot is reported.
RETAINED_WAL_BYTES = 2**30
#: Vacuum is behind on a table that has more dead row versions than DEAD and than live ones, and was
#: not vacuumed for UNVACUUMED seconds. A busy fleet vacuums from 100,000 on.
DEAD, UNVACUUMED = 200_000, 600.0

#: The finding about each kind of holder: its id, and what to do.
HINTS = {
    "session": (
        "D005",
        "End it: select pg_terminate_backend({0}). Let reports read from a replica without"
        " hot_standby_feedback, or in shorter transactions.",
    ),
    "prepared transaction": ("D006", "Finish it: COMMIT PREPARED or ROLLBACK PREPARED '{0}'."),
    "replication slot": (
        "D007",
        "Start its consumer, or drop it: select pg_drop_replication_slot('{0}').",
    ),
}


def snapshots(alias: str) -> Iterator[Finding]:
    """D005, D006, D007: a session, a prepared transaction or a slot holds vacuum back."""
    with short_cursor(alias) as cursor:
        found = oldest_snapshot.horizon(cursor, older_than=OLD_SNAPSHOT_SECONDS, limit=MAX_HOLDERS)
    for each in found:
        id, _ = HINTS[each.kind]
        yield Finding(id=id, level="warning", text=_held_by(each), hint=hint_for(each))


def hint_for(holder: HorizonHolder) -> str:
    """Return what to do about a holder; its name is part of a literal in the statement."""
    _, hint = HINTS[holder.kind]
    return hint.format(holder.name.replace("'", "''"))


def slots(alias: str) -> Iterator[Finding]:
    """D007: a replication slot without a reader keeps WAL until the disk is full."""
    with short_cursor(alias) as cursor:
        found = server_facts.idle_slots(cursor, kept=RETAINED_WAL_BYTES, limit=MAX_HOLDERS)
    for name, kept in found:
        yield Finding(
            id="D007",
            level="warning",
            text=f"The replication slot {name} has no reader and keeps {kept / 2**30:.1f} GiB of"
            " WAL.",
            hint=HINTS["replication slot"][1].format(name),
        )


def _held_by(holder: HorizonHolder) -> str:
    known = ", ".join(filter(None, (holder.login, holder.application, holder.state)))
    dead = "dead rows"
    if holder.since:
        dead = f"rows that died after {holder.since:%Y-%m-%d %H:%M:%S %Z}"
    return (
        f"The {holder.kind} {holder.name}{f' ({known})' if known else ''} keeps vacuum from"
        f" removing {dead}."
    )


def autovacuum(alias: str) -> Iterator[Finding]:
    """D008: autovacuum is off for the server or for a table."""
    with short_cursor(alias) as cursor:
        on, off = server_facts.autovacuum(cursor, tables=own_tables())
    if not on:
        yield Finding(
            id="D008",
            level="warning",
            text="The server does not vacuum: autovacuum or track_counts is off.",
            hint="Turn both on in postgresql.conf.",
        )
    for table in off:
        yield Finding(
            id="D008",
            level="warning",
            text=f"Autovacuum is off for {table}.",
            hint=f"Run ALTER TABLE {table} RESET (autovacuum_enabled).",
        )


def vacuum_behind(alias: str) -> Iterator[Finding]:
    """D009: dead rows outnumber live ones, and no vacuum has run."""
    with short_cursor(alias) as cursor:
        found = versions(cursor)
    for table, each in found.items():
        late = each.since is None or each.since > UNVACUUMED
        if late and each.dead > max(DEAD, each.live):
            yield Finding(
                id="D009",
                level="warning",
                text=f"{table} has {each.dead:,} dead row versions and {each.live:,} live"
                " ones, and has not been vacuumed for"
                + (" as long as the statistics reach." if each.since is None else " 10 minutes."),
                hint=f"Run VACUUM {table}; find what blocks autovacuum: D005 to D008, a lock"
                " on the table, or too few autovacuum_max_workers.",
            )
