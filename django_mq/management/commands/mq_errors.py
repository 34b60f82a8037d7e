"""`mq_errors [--queue NAME] [--since DURATION] [--limit N]`: failed attempts by fingerprint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.conf import alias_of, command_on
from django_mq.conf.local_time import local_text
from django_mq.management.arguments import OneQueue, duration, whole_number
from django_mq.management.base import OperatorCommand
from django_mq.management.output import MAX_CELL_WIDTH, as_json, table
from django_mq.management.screen import size_of
from django_mq.models import FailedAttempt
from django_mq.policy.plain_text import one_line
from django_mq.queues.errors import MAX_LIMIT, error_words

#: With the names of errors and handlers, a row would not fit into 80 columns.
HEADERS = ("fingerprint", "count", "dead", "waiting", "last", "message")
INDENT = "    "


class Command(OperatorCommand):
    help = "List failed attempts in groups of the same error class, handler and place in the code."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--queue", action=OneQueue, metavar="NAME", help="only attempts of this queue"
        )
        parser.add_argument(
            "--since",
            type=duration,
            metavar="DURATION",
            help="only attempts that ended within, for example, 1h or 7d",
        )
        parser.add_argument(
            "--limit",
            type=whole_number(1, MAX_LIMIT),
            default=20,
            metavar="N",
            help="at most N groups (default 20)",
        )

    def operate(self, *, database: str | None, **options: Any) -> None:
        found = queues.errors(
            options["since"], options["queue"], limit=options["limit"], using=database
        )
        if not found:
            self.warn_of_unknown(database=database, **options)
        texts = _first_lines(found, database)
        if options["json"]:
            rows = [{**asdict(each), "text": texts[each.attempt_id]} for each in found]
            self.stdout.write(as_json(rows))
        elif not found:
            asked = options["since"] is not None or options["queue"] is not None
            self.stdout.write(
                "No failed attempt matches." if asked else "No failed attempts are kept."
            )
        else:
            self._show(found, texts)
            if any(each.dead or each.waiting for each in found):
                self.stdout.write(_next_steps(alias_of(database)))

    def _show(self, found: Sequence[queues.ErrorGroup], texts: Mapping[int, str]) -> None:
        """Print a table; below each row, the error and the first line of its newest text."""
        size = size_of(self.stdout)
        widest = (size.columns if size else MAX_CELL_WIDTH) - len(INDENT)
        headers, *rows = table(HEADERS, map(_row, found)).split("\n")
        self.stdout.write(headers)
        for each, row in zip(found, rows, strict=True):
            self.stdout.write(row)
            self.stdout.write(INDENT + one_line(error_words(each)))
            if text := texts[each.attempt_id]:
                self.stdout.write(INDENT + one_line(text, widest))


def _next_steps(alias: str) -> str:
    run_now, requeue = (
        command_on(alias, f"{name} --fingerprint HASH") for name in ("mq_run_now", "mq_requeue")
    )
    return (
        f"\nAfter the repair, {run_now} runs the messages that wait, and\n{requeue} requeues the"
        " dead ones; --limit 1 tries one first."
    )


def _first_lines(found: Sequence[queues.ErrorGroup], database: str | None) -> dict[int, str]:
    """Return the first line of the text of each newest attempt; empty if the text is gone."""
    newest = [each.attempt_id for each in found]
    attempts = FailedAttempt.objects.using(alias_of(database)).filter(pk__in=newest)
    texts = dict(attempts.values_list("pk", "error_text"))
    return {id: next(iter(texts.get(id, "").strip().splitlines()), "") for id in newest}


def _row(group: queues.ErrorGroup) -> tuple[object, ...]:
    more = "" if group.is_exact else "+"
    messages = f"{group.dead:,}{more}", f"{group.waiting:,}{more}"
    return (
        group.fingerprint,
        f"{group.count:,}",
        *messages,
        local_text(group.last),
        group.message_id,
    )
