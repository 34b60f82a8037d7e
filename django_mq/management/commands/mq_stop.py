"""`mq_stop ID...`."""

from __future__ import annotations

import getpass
from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.management.base import Declined, OperatorCommand, count


class Command(OperatorCommand):
    help = "Stop running messages: cancel a coroutine, or end the worker process as at a timeout."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("ids", type=int, nargs="+", metavar="ID", help="ids of the messages")
        parser.add_argument("--by", metavar="NAME", help="who stops them (default: the login)")
        parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")

    def operate(self, *, database: str | None, **options: Any) -> None:
        ids, by = options["ids"], options["by"]
        question = f"Stop {count(len(set(ids)))}? The attempt fails."
        if not self.confirm(question, **options):
            raise Declined
        asked = queues.stop(ids, by=_login() if by is None else by, using=database)
        if options["json"]:
            self.report("", asked, dry_run=False, **options)
        elif asked:
            self.stdout.write(f"Asked the workers to stop {count(len(asked.ids))}.")
        else:
            self.stdout.write("No live worker has any of these messages: there is nothing to stop.")


def _login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without this user
        return ""
