"""`mq_worker`: run messages until told to stop."""

from __future__ import annotations

import atexit
import logging
import os
from argparse import ArgumentParser
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, connections

from django_mq import queues
from django_mq.checks.databases import POOLED, POOLED_HINT
from django_mq.conf import (
    MAX_BATCH_SIZE,
    MAX_PROCESSES,
    MAX_THREADS,
    Settings,
    get_settings,
)
from django_mq.executor.connections import plain_connection_as
from django_mq.executor.deadline import Deadline
from django_mq.executor.scoreboard import Scoreboard
from django_mq.handlers import all_handlers
from django_mq.handlers.nearest import IN_HANDLERS
from django_mq.management.arguments import port_and_address, seconds, whole_number, wrong_arguments
from django_mq.management.capacity import check_connections, check_max_rss, process_count
from django_mq.management.daemons import configure_logging, endpoint
from django_mq.management.databases import (
    UNUSABLE,
    add_database,
    chosen_database,
    missing_role,
    must_be_migrated,
    must_be_usable,
    which_service,
)
from django_mq.management.interruption import quiet
from django_mq.management.reloading import is_reloaded, run_reloading
from django_mq.management.serving import separated, served, unmatched
from django_mq.policy.plain_text import one_line
from django_mq.store.driver import may_prepare
from django_mq.store.session_facts import is_pooled
from django_mq.supervisor import output
from django_mq.supervisor.memory import frozen_heap
from django_mq.supervisor.reporter import Reporter
from django_mq.supervisor.service import Service
from django_mq.supervisor.supervisor import Supervisor
from django_mq.worker import Worker

logger = logging.getLogger("django_mq")


class Command(BaseCommand):
    help = "Run queued messages. The first SIGTERM or Ctrl-C drains, the second exits at once."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--queue",
            action="extend",
            nargs="+",
            default=[],
            metavar="NAME|PATTERN",
            help="queues, or patterns such as mail.* or #, in strict order of preference; may be"
            " repeated (default: all queues)",
        )
        for name, read, what, text in (
            ("--processes", whole_number(1, MAX_PROCESSES), "N", "processes that run handlers"),
            (
                "--threads",
                whole_number(1, MAX_THREADS),
                "N",
                "threads that run handlers, in each process",
            ),
            (
                "--batch-size",
                whole_number(1, MAX_BATCH_SIZE),
                "N",
                "maximum number of messages in one claim",
            ),
            ("--max-messages", whole_number(), "N", "exit after N messages"),
            ("--max-seconds", seconds, "S", "exit after S seconds"),
            ("--max-rss", whole_number(), "MB", "replace a process that grows to MB of memory"),
            ("--drain-seconds", seconds, "S", "time for running messages after the first signal"),
            (
                *("--health-port", port_and_address, "[ADDRESS:]PORT"),
                "answer /livez and /readyz, on 127.0.0.1 by default",
            ),
            (
                *("--metrics-port", port_and_address, "[ADDRESS:]PORT"),
                "answer /metrics for Prometheus, on 127.0.0.1 by default",
            ),
        ):
            parser.add_argument(name, type=read, metavar=what, help=text)
        parser.add_argument("--until-empty", action="store_true", help="exit when nothing is due")
        add_database(parser)
        parser.add_argument(
            "--reload", action="store_true", help="restart when code changes; for development"
        )

    def run_from_argv(self, argv: list[str]) -> None:
        """Run the command as a program; until it takes signals, Ctrl-C ends it quietly."""
        with quiet():
            super().run_from_argv(argv)

    def handle(self, **options: Any) -> None:
        configure_logging(options["verbosity"])
        try:
            settings = get_settings()
            options["database"] = chosen_database(options["database"])
            worker = self._worker(options, max_messages=options["max_messages"])
            processes = process_count(options["processes"], settings)
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        except ValueError as error:
            raise wrong_arguments(f"{error}{separated(options['queue'])}") from error
        try:
            worker.refuse_transaction()  # before a fork: the supervisor would restart its processes
        except RuntimeError as error:
            raise CommandError(str(error)) from error
        known = self._check_database(worker, processes, named=bool(options["queue"]))
        if not _will_start_again(options):
            _warn_of_typos(options["queue"], known)
            if not all_handlers():
                text = f"no handler is registered: {IN_HANDLERS}"
                logger.warning(text, extra={"event": "no_handlers"})
            if options["verbosity"]:
                output.say(self.stdout, served(worker.queues, settings))
        max_rss = options["max_rss"] or settings.max_rss
        check_max_rss(max_rss)
        if options["reload"]:
            _check_reloadable(options)
            run_reloading(_run_reloadable, worker)
            return
        supervisor = self._supervisor(options, settings, worker, processes, max_rss)
        _warn_of_surroundings()
        with frozen_heap():
            code = supervisor.run()
        output.flush(last=True)
        if code:
            raise SystemExit(code)

    def _supervisor(
        self,
        options: dict[str, Any],
        settings: Settings,
        worker: Worker,
        processes: int,
        max_rss: int | None,
    ) -> Supervisor:
        """Return the supervisor of processes that each run a worker like `worker`."""
        shares = _shares(options["max_messages"], processes)
        deadline = Deadline(options["max_seconds"])
        return Supervisor(
            lambda number, id, scoreboard: self._worker(
                {**options, "max_seconds": deadline.remaining()},
                max_messages=_left(shares[number], scoreboard),
                id=id,
                scoreboard=scoreboard,
            ),
            processes=len(shares),
            entries=worker.entries_needed(),
            drain_seconds=worker.drain_seconds,
            until_empty=options["until_empty"],
            max_rss=max_rss,
            reporter=Reporter(
                health=endpoint("health", options["health_port"] or settings.health_port),
                metrics=endpoint("metrics", options["metrics_port"]),
                service=Service.of_environment(),
            ),
        )

    def _worker(
        self,
        options: dict[str, Any],
        *,
        max_messages: int | None,
        id: str | None = None,
        scoreboard: Scoreboard | None = None,
    ) -> Worker:
        return Worker(
            options["queue"],
            threads=options["threads"],
            batch_size=options["batch_size"],
            max_messages=max_messages,
            max_seconds=options["max_seconds"],
            drain_seconds=options["drain_seconds"],
            using=options["database"],
            id=id,
            scoreboard=scoreboard,
        )

    def _check_database(self, worker: Worker, processes: int, *, named: bool) -> list[str]:
        """Raise CommandError if the database is not usable; leave no connection or pool open.

        Returns the names of the known queues, if the options name queues.
        """
        alias = worker.alias
        try:
            with plain_connection_as(alias) as connection:
                must_be_usable(alias)
                must_be_migrated(connection)
                driver = connection.connection
                with connection.wrap_database_errors:
                    if not is_pooled(driver):
                        check_connections(driver, processes=processes, threads=worker.threads)
                    elif may_prepare(connection):
                        text = f"{POOLED.format(alias)} {POOLED_HINT}"
                        logger.warning(text, extra={"event": "pooler_without_settings"})
                return queues.names(using=alias) if named else []
        except (DatabaseError, *UNUSABLE) as error:
            text = f"database {alias!r} cannot be used: {one_line(str(error))}"
            text += which_service(error) + missing_role(error, "mq_worker")
            raise CommandError(text) from error
        finally:
            connections.close_all()


def _will_start_again(options: dict[str, Any]) -> bool:
    """Return whether this is the reloader's own process, which starts the worker in another."""
    return options["reload"] and not is_reloaded()


def _warn_of_typos(patterns: list[str], known: list[str]) -> None:
    for pattern in patterns:
        if warning := unmatched(pattern, known):
            logger.warning("%s", warning, extra={"event": "unknown_queue", "queue": pattern})


def _warn_of_surroundings() -> None:
    if django_settings.DEBUG:
        logger.warning("DEBUG is on: turn it off in production", extra={"event": "debug_on"})
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        text = "running as root: start the worker as a user with fewer rights"
        logger.warning(text, extra={"event": "is_root"})


def _check_reloadable(options: dict[str, Any]) -> None:
    for name in ("processes", "health_port", "metrics_port", "max_rss", "until_empty"):
        if options[name]:
            raise wrong_arguments(
                "--reload runs one process without a supervisor and cannot be combined with"
                f" --{name.replace('_', '-')}"
            )


def _run_reloadable(worker: Worker) -> None:
    """Run one process without a supervisor; the reloader ends the process when code changes."""
    atexit.register(_end_for_reload, worker)
    worker.run()


def _end_for_reload(worker: Worker) -> None:
    """Drain, and log the messages that the drain waits for."""
    if running := worker.running_messages:
        logger.info(
            "waiting at most %g s for message%s %s",
            worker.drain_seconds,
            "" if len(running) == 1 else "s",
            ", ".join(map(str, running)),
            extra={"event": "reload_waits"},
        )
    worker.stop(worker.drain_seconds)


def _shares(messages: int | None, processes: int) -> list[int | None]:
    """Divide `messages` among `processes`; a process without a share is not started.

    >>> _shares(None, 2), _shares(5, 2), _shares(1, 3)
    ([None, None], [3, 2], [1])
    """
    if messages is None:
        return [None] * processes
    shares = [messages // processes + (n < messages % processes) for n in range(processes)]
    return [share for share in shares if share]


def _left(share: int | None, scoreboard: Scoreboard) -> int | None:
    """Return the part of a share that earlier processes have not claimed."""
    return None if share is None else max(0, share - scoreboard.claimed)
