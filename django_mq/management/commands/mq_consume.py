"""`mq_consume NAME [--until-empty]`: broadcast what comes in through an inbox."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from django_mq.conf import get_settings
from django_mq.contrib.relays.consumer import LOOK_SECONDS, Consumer
from django_mq.management.base import chosen_database
from django_mq.management.logs import configure_logging
from django_mq.supervisor import output
from django_mq.supervisor.child import OUT_OF_TIME
from django_mq.supervisor.ready import wait_ready
from django_mq.supervisor.stop_signals import StopSignals

logger = logging.getLogger("django_mq")

#: Seconds after which an idle consumer has ended, unless something hangs: it finishes its look.
IDLE_STOP_SECONDS = LOOK_SECONDS + 1.0


class Command(BaseCommand):
    help = "Broadcast the messages that a broker delivers to an inbox of DJANGO_MQ['INBOXES']."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", metavar="NAME", help="an inbox of DJANGO_MQ['INBOXES']")
        parser.add_argument(
            "--database",
            metavar="ALIAS",
            help="database of the messages (default: the setting DATABASE, or the router's choice)",
        )
        parser.add_argument(
            "--until-empty", action="store_true", help="end once the broker has nothing more"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        configure_logging(options["verbosity"])
        name = options["name"]
        settings = get_settings()
        if name not in settings.inboxes:
            known = ", ".join(settings.inboxes) or "none"
            raise CommandError(
                f"DJANGO_MQ['INBOXES'] has no inbox {name!r} (it has {known})", returncode=2
            )
        alias = chosen_database(options["database"])
        if not connections[alias].in_atomic_block:
            connections[alias].close()  # the consumer bounds the waits of its own
        consumer = Consumer(name, settings.inboxes[name], using=alias)
        seconds = max(settings.drain_seconds, IDLE_STOP_SECONDS)
        with stopped_by_signals(consumer, seconds=seconds):
            try:
                stored = consumer.run(until_empty=options["until_empty"])
            except ImproperlyConfigured as error:
                raise CommandError(str(error)) from error
        plural = "message was" if stored == 1 else "messages were"
        self.stdout.write(f"{stored} {plural} stored.")


@contextmanager
def stopped_by_signals(consumer: Consumer, *, seconds: float) -> Iterator[None]:
    """Within the block, a stop signal stops `consumer`.

    A second one, or `seconds` without an end, ends the process: a broker or a database that hangs
    cannot keep it. The broker then delivers again whatever was not acked.
    """
    reader, writer = os.pipe()
    with StopSignals() as signals:
        listening = threading.Thread(
            target=_listen, args=(consumer, signals, reader, seconds), name="mq-stop", daemon=True
        )
        listening.start()
        try:
            yield
        finally:
            os.close(writer)
            listening.join()
            os.close(reader)


def _listen(consumer: Consumer, signals: StopSignals, end: int, seconds: float) -> None:
    """Carry out stop signals until the other side of `end` is closed."""
    until: float | None = None
    while True:
        left = None if until is None else max(0.0, until - monotonic())
        ready, _ = wait_ready([signals.fileno(), end], seconds=left)
        if end in ready:
            return
        received = signals.read()
        if received and until is None:
            consumer.stop()
            until = monotonic() + seconds
            received.pop(0)
        if received:
            _leave(128 + received[0])
        if until is not None and monotonic() >= until:
            logger.error(
                "inbox %s: not stopped within %g s; the broker delivers again what was not acked",
                consumer.name,
                seconds,
                extra={"event": "inbox_gave_up", "inbox": consumer.name},
            )
            _leave(OUT_OF_TIME)


def _leave(code: int) -> None:
    output.flush(last=True)
    os._exit(code)
