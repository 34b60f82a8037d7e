"""The way to the server: clock, pooler, LISTEN, and the limits of the login."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from django.db import connections

from django_mq.checks.databases import POOLED, POOLED_HINT
from django_mq.conf import get_settings, is_postgresql
from django_mq.executor.connections import plain_connection
from django_mq.executor.outage import reason_of
from django_mq.handlers import all_handlers, timeout_of
from django_mq.queues.doctor.findings import Finding, session, short_cursor
from django_mq.queues.fleet import workers
from django_mq.store import notify, server_facts, session_facts
from django_mq.store.driver import may_prepare
from django_mq.store.server_errors import LOST

#: Seconds that a NOTIFY may take.
RING_SECONDS = 3.0
#: The share of the server's queue of notifications from which it is reported, as in its own log.
HIGH_USAGE = 0.5
FULL_HINT = (
    "A session that listens, in this or another database of the server, has had a transaction open"
    " for a long time. Find it by its xact_start in pg_stat_activity, or in the server's log, which"
    " names it where it says how full the NOTIFY queue is, and end it."
)
WAKEUP_HINT = (
    "Set WAKEUP to an alias that connects to the same database without a pooler, or to 'poll'."
)
#: The difference between two clocks, in seconds, above which it is reported. Due times and expiries
#: come from the clocks of producers, and are compared with the server's.
SKEW = 1.0
#: Connections of one worker process besides those of its threads, including those for chores and
#: schedules.
EXTRA_CONNECTIONS = 5


def clock(alias: str) -> Iterator[Finding]:
    """D012: the clocks of this machine and of the server differ."""
    with session(alias) as driver:
        ahead, margin = session_facts.compare_clocks(driver)
    if abs(ahead) > SKEW + margin:
        yield Finding(
            id="D012",
            level="warning",
            text=f"The server's clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'}"
            " this machine's: messages with a due time or an expiry from this clock are early or"
            " late by that much.",
            hint="Synchronise both clocks by NTP.",
        )


def listening(alias: str) -> Iterator[Finding]:
    """D010: a NOTIFY does not reach a listener, or soon nobody may send one, so workers poll."""
    listens_on = get_settings().listen_alias(alias)
    if listens_on is None or not is_postgresql(listens_on):  # E002 of the system checks reports it
        return
    with short_cursor(alias) as cursor:
        is_standby, _ = server_facts.read_only(cursor)
        usage = notify.queue_usage(cursor)
    if usage >= HIGH_USAGE:
        yield _filling(usage)
    reached: bool | None = is_standby or usage >= notify.FULL  # D022 reports the standby
    hint = WAKEUP_HINT
    try:
        with session(listens_on) as listener, session(alias) as notifier:
            reached = reached or session_facts.notify_arrives(
                listener, notifier, seconds=RING_SECONDS
            )
    except LOST as error:
        reached = False
        hint = f"The connection failed: {reason_of(error)}"
    if not reached:
        yield Finding(
            id="D010",
            level="warning",
            text=f"A NOTIFY on {alias!r} does not reach LISTEN on {listens_on!r}: workers find"
            f" messages up to {get_settings().poll_interval:g} s late.",
            hint=hint,
        )
    if deaf := [each for each in workers(using=alias) if each.alive and each.wakeup == "degraded"]:
        yield Finding(
            id="D010",
            level="warning",
            text="These workers cannot listen, so they poll: "
            + ", ".join(f"{each.host}:{each.pid}" for each in deaf)
            + ".",
            hint=hint,
        )


def _filling(usage: float) -> Finding:
    """Return the finding of a server whose queue of notifications is full to the share `usage`."""
    return Finding(
        id="D010",
        level="warning",
        text=f"The server's queue of notifications is {usage:.0%} full. From {notify.FULL:.0%} on,"
        " workers send none, and messages are found up to"
        f" {get_settings().poll_interval:g} s late.",
        hint=FULL_HINT,
    )


def pooler(alias: str) -> Iterator[Finding]:
    """D011: the alias uses a pooler, which may send prepared statements to different sessions."""
    if not may_prepare(connections[alias]):
        return
    with session(alias) as driver:
        pooled = session_facts.is_pooled(driver)
    if pooled:
        yield Finding(
            id="D011",
            level="warning",
            text=POOLED.format(alias),
            hint=POOLED_HINT,
        )


def limits(alias: str) -> Iterator[Finding]:
    """D016: statement_timeout ends handlers early. D017: too few connections for a worker."""
    settings = get_settings()
    with session(alias) as driver:
        found = session_facts.login_limits(driver)
    if lent := _lent_limits(alias):
        yield Finding(
            id="D016",
            level="warning",
            text="The pooler lends sessions in which another program left"
            f" {', '.join(f'{name} = {value}' for name, value in lent.items())}.",
            hint="Correct the settings of that program (of a worker: docs/deploy/pgbouncer.md) and"
            " send RECONNECT to PgBouncer's console, or restart the pooler.",
        )
    elif longer := [
        each.name
        for each in all_handlers()
        if 0 < found.statement < 1000 * timeout_of(each, settings)
    ]:
        more = f" and {len(longer) - 3} more" if len(longer) > 3 else ""
        yield Finding(
            id="D016",
            level="warning",
            text=f"statement_timeout of this login is {found.statement / 1000:g} s, shorter than"
            f" the timeout of {', '.join(sorted(longer)[:3])}{more}.",
            hint="Raise it for the login of the workers (ALTER ROLE ... SET statement_timeout), or"
            " set a shorter timeout on the handlers, so that the failure names the handler.",
        )
    needed = connections_needed(settings.processes, settings.threads)
    if found.connections is not None and needed > found.connections:
        yield Finding(
            id="D017",
            level="error",
            text=f"One mq_worker as configured opens up to {needed} connections, and this login may"
            f" have {found.connections}.",
            hint="Raise max_connections or the CONNECTION LIMIT of the role, or lower PROCESSES and"
            " THREADS.",
        )


def _lent_limits(alias: str) -> dict[str, str]:
    """Return the limits that another program left in a session of the pooler, by name.

    Receivers of `connection_created` do not hear of this session: what they set was not left.
    """
    wrapper = plain_connection(alias)
    with closing(wrapper.get_new_connection(wrapper.get_connection_params())) as driver:
        driver.autocommit = True
        return session_facts.lent_limits(driver)


def connections_needed(processes: int, threads: int) -> int:
    """Return how many connections one `mq_worker` opens at most.

    >>> connections_needed(2, 4)
    18
    """
    return processes * (threads + EXTRA_CONNECTIONS)
