"""manage.py mq_worker: run messages until told to stop."""

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

from django_mq.backoff import as_seconds
from django_mq.conf import get_settings
from django_mq.exceptions import InvalidName
from django_mq.management.base import chosen_database, must_be_migrated
from django_mq.worker import Worker, places_needed
from django_mq.worker.board import Board
from django_mq.worker.database import plain_connection
from django_mq.worker.health import Health
from django_mq.worker.place import MEGABYTE, resident_bytes
from django_mq.worker.supervisor import Supervisor
from django_mq.worker.wakeup import Deadline

logger = logging.getLogger("django_mq")


class Command(BaseCommand):
    help = "Runs queued messages. The first SIGTERM or Ctrl-C drains, the second leaves at once."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--queue",
            action="append",
            default=[],
            metavar="NAME|PATTERN",
            help="a queue, or a pattern such as mail.* or #; again for more, in strict preference"
            " (default: all queues)",
        )
        for name, read, what, text in (
            ("--processes", _positive, "N", "processes that run handlers"),
            ("--threads", _positive, "N", "threads that run handlers, in each process"),
            ("--batch-size", _positive, "N", "messages of one claim, at most"),
            ("--max-messages", _positive, "N", "end after so many messages"),
            ("--max-seconds", _seconds, "S", "end after so many seconds"),
            ("--max-rss", _positive, "MB", "replace a process that grew so large"),
            ("--drain-seconds", _seconds, "S", "time for what runs, after the first signal"),
            ("--health-port", _port, "PORT", "answer /livez and /readyz on 127.0.0.1"),
        ):
            parser.add_argument(name, type=read, metavar=what, help=text)
        parser.add_argument("--until-empty", action="store_true", help="end when nothing is due")
        parser.add_argument("--database", metavar="ALIAS", help="the database to work on")
        parser.add_argument(
            "--reload", action="store_true", help="start again when code changes; for development"
        )

    def handle(self, **options: Any) -> None:
        _log_somewhere(options["verbosity"])
        try:
            settings = get_settings()
            options["database"] = chosen_database(options["database"])
            worker = self._worker(options, max_messages=options["max_messages"])
        except (ImproperlyConfigured, InvalidName, ValueError) as error:
            raise CommandError(str(error)) from error
        self._check_database(worker.alias)
        max_rss = options["max_rss"] or settings.max_rss
        rss = resident_bytes(os.getpid()) // MEGABYTE
        if max_rss is not None and rss >= max_rss:
            raise CommandError(
                f"--max-rss {max_rss}: this process has {rss} MB before it runs anything, so every"
                " one would be replaced at once"
            )
        if options["reload"]:
            _check_reloadable(options)
            run_with_reloader(_run_reloadable, worker)
            return
        processes = options["processes"] or settings.processes
        shares = _shares(options["max_messages"], processes)
        port = options["health_port"] or settings.health_port
        deadline = Deadline(options["max_seconds"])
        supervisor = Supervisor(
            lambda number, id, board: self._worker(
                {**options, "max_seconds": deadline.left()},
                max_messages=_left(shares[number], board),
                id=id,
                board=board,
            ),
            processes=len(shares),
            places=places_needed(
                threads=worker.threads,
                async_slots=worker.async_slots,
                batch_size=worker.batch_size or settings.batch_size,
            ),
            drain_seconds=worker.drain_seconds,
            until_empty=options["until_empty"],
            max_rss=max_rss,
            health=None if port is None else _health(port),
        )
        _warn_of_surroundings()
        if code := supervisor.run():
            raise SystemExit(code)

    def _worker(
        self,
        options: dict[str, Any],
        *,
        max_messages: int | None,
        id: str | None = None,
        board: Board | None = None,
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
            board=board,
        )

    def _check_database(self, alias: str) -> None:
        """Say what is missing before anything starts; the connection is closed again."""
        connection = plain_connection(alias)  # no pool, whose threads a fork would leave behind
        try:
            must_be_migrated(connection)
        except (DatabaseError, InterfaceError, ImproperlyConfigured) as error:
            raise CommandError(f"database {alias!r} cannot be used: {error}") from error
        finally:
            connection.close()
            connections.close_all()


def _warn_of_surroundings() -> None:
    if django_settings.DEBUG:
        logger.warning("DEBUG is on: not for production", extra={"event": "debug_on"})
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        logger.warning("running as root: handlers need no such rights", extra={"event": "is_root"})


def _log_somewhere(verbosity: int) -> None:
    """Where LOGGING says nothing of us, a worker would be silent: log to stderr."""
    logger = logging.getLogger("django_mq")
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG))


def _check_reloadable(options: dict[str, Any]) -> None:
    for name in ("processes", "health_port", "max_rss", "until_empty"):
        if options[name]:
            raise CommandError(
                f"--reload runs one process, for development, and does without"
                f" --{name.replace('_', '-')}"
            )


def _run_reloadable(worker: Worker) -> None:
    """One process without a supervisor: the reloader ends it when code changes."""
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
        raise CommandError(f"health port {port} cannot be had: {error}") from error


def _left(share: int | None, board: Board) -> int | None:
    """Return what is left of a share when earlier processes took some of it."""
    return None if share is None else max(0, share - board.taken)


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
        raise ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
    return number


def _seconds(text: str) -> float:
    try:
        seconds = as_seconds(float(text))
    except ValueError:
        seconds = None
    if seconds is None:
        raise ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds
