"""`mq_worker`: run messages until told to stop."""

from __future__ import annotations

import atexit
import logging
import os
from argparse import ArgumentParser, ArgumentTypeError
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, InterfaceError, connections
from django.utils.autoreload import run_with_reloader

from django_mq.conf import Settings, get_settings
from django_mq.exceptions import InvalidName
from django_mq.executor.connections import plain_connection_as
from django_mq.executor.scoreboard import Scoreboard
from django_mq.management.base import chosen_database, must_be_migrated
from django_mq.policy.backoff import as_seconds
from django_mq.supervisor.health import Health
from django_mq.supervisor.process_slot import MEGABYTE, resident_bytes
from django_mq.supervisor.supervisor import Supervisor
from django_mq.worker import Worker, entries_needed
from django_mq.worker.wakeup import Deadline

logger = logging.getLogger("django_mq")


class Command(BaseCommand):
    help = "Run queued messages. The first SIGTERM or Ctrl-C drains, the second exits at once."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--queue",
            action="append",
            default=[],
            metavar="NAME|PATTERN",
            help="a queue or a pattern such as mail.* or #; repeat it for more, in strict order of"
            " preference (default: all queues)",
        )
        for name, read, what, text in (
            ("--processes", _positive, "N", "processes that run handlers"),
            ("--threads", _positive, "N", "threads that run handlers, in each process"),
            ("--batch-size", _positive, "N", "most messages in one claim"),
            ("--max-messages", _positive, "N", "exit after N messages"),
            ("--max-seconds", _seconds, "S", "exit after S seconds"),
            ("--max-rss", _positive, "MB", "replace a process that grows to MB of memory"),
            ("--drain-seconds", _seconds, "S", "time for running messages after the first signal"),
            ("--health-port", _port, "PORT", "answer /livez and /readyz on 127.0.0.1"),
        ):
            parser.add_argument(name, type=read, metavar=what, help=text)
        parser.add_argument("--until-empty", action="store_true", help="exit when nothing is due")
        parser.add_argument("--database", metavar="ALIAS", help="database of the messages")
        parser.add_argument(
            "--reload", action="store_true", help="restart when code changes; for development"
        )

    def handle(self, **options: Any) -> None:
        _configure_logging(options["verbosity"])
        try:
            settings = get_settings()
            options["database"] = chosen_database(options["database"])
            worker = self._worker(options, max_messages=options["max_messages"])
        except (ImproperlyConfigured, InvalidName, ValueError) as error:
            raise CommandError(str(error)) from error
        self._check_database(worker.alias)
        max_rss = options["max_rss"] or settings.max_rss
        _check_max_rss(max_rss)
        if options["reload"]:
            _check_reloadable(options)
            run_with_reloader(_run_reloadable, worker)
            return
        supervisor = self._supervisor(options, settings, worker, max_rss)
        _warn_of_surroundings()
        if code := supervisor.run():
            raise SystemExit(code)

    def _supervisor(
        self, options: dict[str, Any], settings: Settings, worker: Worker, max_rss: int | None
    ) -> Supervisor:
        """Return the supervisor of processes that each run a worker like `worker`."""
        shares = _shares(options["max_messages"], options["processes"] or settings.processes)
        port = options["health_port"] or settings.health_port
        deadline = Deadline(options["max_seconds"])
        return Supervisor(
            lambda number, id, scoreboard: self._worker(
                {**options, "max_seconds": deadline.left()},
                max_messages=_left(shares[number], scoreboard),
                id=id,
                scoreboard=scoreboard,
            ),
            processes=len(shares),
            entries=entries_needed(
                threads=worker.threads,
                async_slots=worker.async_slots,
                batch_size=worker.batch_size or settings.batch_size,
            ),
            drain_seconds=worker.drain_seconds,
            until_empty=options["until_empty"],
            max_rss=max_rss,
            health=None if port is None else _health(port),
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

    def _check_database(self, alias: str) -> None:
        """Raise CommandError if the database is not usable; leave no connection or pool open."""
        try:
            with plain_connection_as(alias) as connection:
                must_be_migrated(connection)
        except (DatabaseError, InterfaceError, ImproperlyConfigured) as error:
            raise CommandError(f"database {alias!r} cannot be used: {error}") from error
        finally:
            connections.close_all()


def _warn_of_surroundings() -> None:
    if django_settings.DEBUG:
        logger.warning("DEBUG is on: turn it off in production", extra={"event": "debug_on"})
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        text = "running as root: start the worker as a user with fewer rights"
        logger.warning(text, extra={"event": "is_root"})


def _configure_logging(verbosity: int) -> None:
    """Log to stderr unless LOGGING configures this logger: a worker should not be silent."""
    logger = logging.getLogger("django_mq")
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG))


def _check_max_rss(max_rss: int | None) -> None:
    rss = resident_bytes(os.getpid()) // MEGABYTE
    if max_rss is not None and rss >= max_rss:
        raise CommandError(
            f"--max-rss {max_rss} is too low: this process already uses {rss} MB, so every worker"
            " process would be replaced at once"
        )


def _check_reloadable(options: dict[str, Any]) -> None:
    for name in ("processes", "health_port", "max_rss", "until_empty"):
        if options[name]:
            raise CommandError(
                "--reload runs one process without a supervisor and cannot be combined with"
                f" --{name.replace('_', '-')}"
            )


def _run_reloadable(worker: Worker) -> None:
    """Run one process without a supervisor; the reloader ends it when code changes."""
    atexit.register(worker.stop, worker.drain_seconds)
    worker.run()


def _shares(messages: int | None, processes: int) -> list[int | None]:
    """Divide `messages` among `processes`; a process without a share is not started.

    >>> _shares(None, 2), _shares(5, 2), _shares(1, 3)
    ([None, None], [3, 2], [1])
    """
    if messages is None:
        return [None] * processes
    shares = [messages // processes + (n < messages % processes) for n in range(processes)]
    return [share for share in shares if share]


def _health(port: int) -> Health:
    try:
        return Health(port)
    except (OSError, OverflowError) as error:
        raise CommandError(f"health port {port} cannot be opened: {error}") from error


def _left(share: int | None, scoreboard: Scoreboard) -> int | None:
    """Return the rest of a share after earlier processes claimed some of it."""
    return None if share is None else max(0, share - scoreboard.taken)


def _positive(text: str) -> int:
    return _whole(text, 1, 2**31 - 1)


def _port(text: str) -> int:
    return _whole(text, 1, 65535)


def _whole(text: str, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
    return number


def _seconds(text: str) -> float:
    try:
        seconds = as_seconds(float(text))
    except ValueError:
        seconds = None
    if seconds is None:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds
