"""Refuse a worker that asks for more than this machine or the server can provide."""

from __future__ import annotations

import logging
import os
from typing import Any

import psycopg
from django.core.management.base import CommandError

from django_mq.conf import MAX_PROCESSES, Settings
from django_mq.conf.readers import integer
from django_mq.executor.outage import MORE_CONNECTIONS
from django_mq.queues.doctor.links import connections_needed
from django_mq.store import session_facts
from django_mq.supervisor.memory import MEGABYTE, resident_bytes

logger = logging.getLogger("django_mq")

#: The minimum number of connections of a process that runs anything: to claim, to renew its leases,
#: and to run handlers.
MIN_CONNECTIONS = 3


def process_count(option: int | None, settings: Settings) -> int:
    """Return the number of processes; raise ValueError for a number that no host can run."""
    if option is None:
        return settings.processes
    try:
        count: int = integer(1, MAX_PROCESSES)(option)
    except ValueError as error:
        raise ValueError(f"processes is {option}; it {error}") from None
    return count


def check_connections(driver: psycopg.Connection[Any], *, processes: int, threads: int) -> None:
    """Raise CommandError if the login may open too few connections; warn if only sometimes."""
    allowed = session_facts.login_limits(driver).connections
    if allowed is None:
        return
    if (least := processes * MIN_CONNECTIONS) > allowed:
        raise CommandError(
            f"{processes} processes need at least {least} connections, and this login may have"
            f" {allowed}: {MORE_CONNECTIONS}"
        )
    if (most := connections_needed(processes, threads)) > allowed:
        logger.warning(
            "this worker opens up to %d connections, and this login may have %d: %s",
            most,
            allowed,
            MORE_CONNECTIONS,
            extra={"event": "too_few_connections"},
        )


def check_max_rss(max_rss: int | None) -> None:
    """Raise CommandError for a limit that every new process would exceed at once."""
    rss = resident_bytes(os.getpid()) // MEGABYTE
    if max_rss is not None and rss >= max_rss:
        raise CommandError(
            f"--max-rss {max_rss} is too low: this process already uses {rss} MB, so every worker"
            " process would be replaced at once"
        )
