"""`mq_resume QUEUE [--backoff]`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.conf import alias_of, command_on
from django_mq.management.base import OperatorCommand, add_queue_options
from django_mq.management.output import as_json


class Command(OperatorCommand):
    needs_queue = True
    help = "End the pause of a queue and wake its workers. Use --backoff to end a backoff."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_queue_options(parser)
        parser.add_argument(
            "--backoff", action="store_true", help="end its backoff instead; a pause continues"
        )

    def operate(self, *, database: str | None, **options: Any) -> None:
        queue, dry_run = options["queue"], options["dry_run"]
        self.must_be_known(database=database, **options)
        end, what, question, done, nothing = (
            (
                queues.end_backoff,
                "backoff",
                f"End the backoff of queue {queue}?",
                "back at its full rate",
                "was not backing off",
            )
            if options["backoff"]
            else (queues.resume, "pause", f"Resume queue {queue}?", "resumed", "was not paused")
        )
        ended = end(queue, dry_run=True, using=database)
        if ended and not dry_run:
            self.agree(question, **options)
            ended = end(queue, using=database)
        if options["json"]:
            answer = {"queue": queue, "what": what, "ended": ended, "dry_run": dry_run}
            self.stdout.write(as_json(answer))
        else:
            verb = "would be" if dry_run else "is"
            self.stdout.write(f"Queue {queue} {f'{verb} {done}' if ended else nothing}.")
        self._note_what_is_left(queue, database, backoff=options["backoff"])

    def _note_what_is_left(self, queue: str, database: str | None, *, backoff: bool) -> None:
        """Tell the operator if the other of pause and backoff still stops the queue."""
        command = command_on(alias_of(database), f"mq_resume {queue}")
        if backoff:
            if queues.resume(queue, dry_run=True, using=database):
                self.note([f"the queue is paused: {command} ends that"])
        elif queues.end_backoff(queue, dry_run=True, using=database):
            self.note([f"the queue is backing off: {command} --backoff ends that"])
