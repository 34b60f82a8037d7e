"""`mq_consume NAME`: broadcast what comes in through an inbox."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, connections

from django_mq.conf import get_settings
from django_mq.contrib.relays.consumer import READ_SECONDS, Consumer
from django_mq.contrib.relays.dead_letters import broadcast_again
from django_mq.exceptions import MQError
from django_mq.management.arguments import port_and_address, wrong_arguments
from django_mq.management.daemons import configure_logging, endpoint
from django_mq.management.databases import UNUSABLE, add_database, chosen_database, refusal
from django_mq.management.interruption import quiet
from django_mq.supervisor import output
from django_mq.supervisor.attended import attended
from django_mq.supervisor.reporter import Reporter
from django_mq.supervisor.service import Service

#: Seconds within which an idle consumer ends, unless something hangs: it finishes its read.
IDLE_STOP_SECONDS = READ_SECONDS + 1.0


class Command(BaseCommand):
    help = "Broadcast the messages that a broker delivers to an inbox of DJANGO_MQ['INBOXES']."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", metavar="NAME", help="an inbox of DJANGO_MQ['INBOXES']")
        add_database(parser)
        parser.add_argument(
            "--until-empty", action="store_true", help="end once the broker has nothing more"
        )
        parser.add_argument(
            "--dead",
            action="store_true",
            help="instead, broadcast the inbox's dead letters again, by its present settings",
        )
        parser.add_argument(
            "--health-port",
            type=port_and_address,
            metavar="[ADDRESS:]PORT",
            help="answer /livez and /readyz here (default address: 127.0.0.1)",
        )

    def run_from_argv(self, argv: list[str]) -> None:
        """Run the command as a program; until it takes signals, Ctrl-C ends it quietly."""
        with quiet():
            super().run_from_argv(argv)

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
        if options["dead"]:
            if options["until_empty"] or options["health_port"] is not None:
                raise wrong_arguments(
                    "--dead ends by itself: it takes no --until-empty, and no port"
                )
            return self._broadcast_again(consumer)
        seconds = max(settings.drain_seconds, IDLE_STOP_SECONDS)
        health = endpoint("health", options["health_port"])
        reporter = Reporter(health=health, metrics=None, service=Service.of_environment())
        with attended(consumer, reporter, seconds=seconds):
            try:
                consumer.run(until_empty=options["until_empty"])
            except ImproperlyConfigured as error:
                raise CommandError(str(error)) from error
        output.say(self.stdout, self._counts(consumer))

    def _broadcast_again(self, consumer: Consumer) -> None:
        try:
            left = broadcast_again(consumer)
        except (MQError, DatabaseError, *UNUSABLE) as error:
            raise refusal(error, consumer.alias, "mq_worker") from error
        output.say(self.stdout, f"{self._counts(consumer)} Dead letters that are left: {left}.")

    def _counts(self, consumer: Consumer) -> str:
        plural = "message was" if consumer.stored == 1 else "messages were"
        dropped = f", {consumer.duplicates} dropped that came before" if consumer.duplicates else ""
        return f"{consumer.stored} {plural} stored{dropped}."
