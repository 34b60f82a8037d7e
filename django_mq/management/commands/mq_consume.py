"""`mq_consume NAME [--until-empty]`: broadcast what comes in through an inbox."""

from __future__ import annotations

import signal
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from django_mq.conf import get_settings
from django_mq.contrib.relays.consumer import Consumer
from django_mq.management.base import chosen_database
from django_mq.management.logs import configure_logging

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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
        inboxes = get_settings().inboxes
        if name not in inboxes:
            known = ", ".join(inboxes) or "none"
            raise CommandError(
                f"DJANGO_MQ['INBOXES'] has no inbox {name!r} (it has {known})", returncode=2
            )
        alias = chosen_database(options["database"])
        consumer = Consumer(name, inboxes[name], using=alias)
        before = {
            number: signal.signal(number, lambda *_: consumer.stop()) for number in STOP_SIGNALS
        }
        try:
            stored = consumer.run(until_empty=options["until_empty"])
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        plural = "message was" if stored == 1 else "messages were"
        self.stdout.write(f"{stored} {plural} stored.")
