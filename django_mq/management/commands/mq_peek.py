"""`mq_peek [QUEUE]`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandParser

from django_mq import queues
from django_mq.conf.local_time import local_text
from django_mq.management.arguments import limit, wrong_arguments
from django_mq.management.base import OperatorCommand, add_queue
from django_mq.management.output import as_json, heads_table, table
from django_mq.models import QueuedMessage
from django_mq.models.columns import Unreadable
from django_mq.policy.plain_text import one_line
from django_mq.queues.known_queues import unknown_queue_warning
from django_mq.queues.stalled import line_positions
from django_mq.queues.states import peek_messages

#: The bytes of a payload that are shown; --json shows the whole payload.
PAYLOAD_BYTES = 2000
#: The columns in JSON that every login may see.
COLUMNS = (
    *("id", "queue", "type", "handler", "key", "state", "attempts", "max_attempts"),
    *("processable_after", "created_at"),
)


class Command(OperatorCommand):
    help = "Show the first messages of one queue or of all, by id. Payloads only with --payload."
    role = "mq_monitor, or with --payload mq_admin"

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_queue(parser)
        parser.add_argument(
            "--limit", type=limit, default=10, metavar="N", help="at most N messages (default 10)"
        )
        parser.add_argument(
            "--skip-locked", action="store_true", help="leave out messages that workers hold"
        )
        parser.add_argument("--dead", action="store_true", help="show dead letters instead")
        parser.add_argument(
            "--heads",
            action="store_true",
            help="show the first messages of order keys and ordered queues that others wait behind",
        )
        parser.add_argument(
            "--payload",
            action="store_true",
            help="also show payload, metadata and last error, with values of secret keys hidden",
        )

    def operate(self, *, database: str | None, **options: Any) -> None:
        names = ("limit", "skip_locked", "dead")
        chosen = {name: options[name] for name in names}
        queue, private = options["queue"], options["payload"]
        if options["heads"]:
            self._show_heads(queue, options, database)
            return
        messages = peek_messages(queue, using=database, private=private, **chosen)
        behind = _behind(messages, database)
        if options["json"]:
            rows = [{**_row(each, private), "behind": behind.get(each.pk)} for each in messages]
            self.stdout.write(as_json(rows))
            return
        if not messages:
            self.stdout.write(_nothing(queue, options, database))
            return
        self._show(messages, behind, private)
        if len(messages) == options["limit"]:
            self.stdout.write("There may be more: see --limit.")

    def _show(
        self, messages: Sequence[QueuedMessage], behind: dict[int, int], private: bool
    ) -> None:
        """Print a table; with `private`, payload, metadata and last error below each row."""
        headers = ("id", "queue", "type", "handler", "key", "state", "attempts", "due", "stored")
        rows = [
            (
                message.pk,
                message.queue,
                message.type,
                message.handler or "-",
                message.key or "-",
                _state(message, behind.get(message.pk)),
                f"{message.attempts}/{message.max_attempts}",
                local_text(message.processable_after),
                local_text(message.created_at),
            )
            for message in messages
        ]
        heading, *lines = table(headers, rows).split("\n")
        # Read before anything is shown: the login may lack the right.
        details = [_details(message) if private else [] for message in messages]
        self.stdout.write(heading)
        for line, more in zip(lines, details, strict=True):
            self.stdout.write("\n".join([line, *more]))

    def _show_heads(self, queue: str | None, options: dict[str, Any], database: str | None) -> None:
        for name in ("skip_locked", "dead", "payload"):
            if options[name]:
                raise wrong_arguments(f"--heads cannot be combined with --{name.replace('_', '-')}")
        heads = queues.heads(queue, limit=options["limit"], using=database)
        if not heads:
            self.warn_of_unknown(queue=queue, database=database)
        if options["json"]:
            self.stdout.write(as_json(heads))
        else:
            text = "No messages wait behind a first message of their key or queue."
            self.stdout.write(heads_table(heads) if heads else text)


def _details(message: QueuedMessage) -> list[str]:
    """Return the lines of a message's payload, metadata and last error."""
    texts = (
        (name, value if isinstance(value, str) else json.dumps(value))
        for name, value in _private(message).items()
    )
    return [f"    {name}: {one_line(text, PAYLOAD_BYTES)}" for name, text in texts]


def _nothing(queue: str | None, options: dict[str, Any], database: str | None) -> str:
    """Return a text for when there is nothing to show, which names where messages are."""
    counted = queues.counts(using=database)
    text = f"No messages in queue {queue}." if queue else "No messages."
    if queue and (warning := unknown_queue_warning(queue, counted)):
        text = f"No messages: {warning}{'' if warning.endswith('?') else '.'}"
    wanted = "dead" if options["dead"] else "depth"
    elsewhere = {name: each for name, each in counted.items() if getattr(each, wanted)}
    if elsewhere:
        found = ", ".join(f"{name} {each.shown(wanted)}" for name, each in elsewhere.items())
        return f"{text} There are {'dead letters' if options['dead'] else 'messages'} in: {found}."
    if dead := [name for name, each in counted.items() if each.dead]:
        return f"{text} There are dead letters in {', '.join(dead)}: see mq_peek --dead."
    return text


def _behind(messages: Sequence[QueuedMessage], database: str | None) -> dict[int, int]:
    """Return, for each waiting message in a line, the message that it waits for."""
    waiting = [each.pk for each in messages if not (each.leased_until or each.dead_at)]
    found = line_positions(waiting, maximum=1, using=database) if waiting else {}
    return {id: each.waits_for for id, each in found.items() if each.waits_for is not None}


def _state(message: QueuedMessage, behind: int | None) -> str:
    return message.state.value + (f", behind {behind}" if behind else "")


def _row(message: QueuedMessage, private: bool) -> dict[str, Any]:
    row = {name: getattr(message, name) for name in COLUMNS}
    return row | _private(message) if private else row


def _private(message: QueuedMessage) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("payload", "metadata"):
        value = getattr(message, name)
        try:
            found[name] = str(value) if isinstance(value, Unreadable) else queues.redacted(value)
        except RecursionError:  # another client wrote JSON nested too deeply
            found[name] = "(cannot be decoded)"
    return found | {"last_error": message.last_error}
