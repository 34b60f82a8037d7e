"""Commands with options that select messages, and remarks on the given ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from django.core.management.base import CommandParser

from django_mq.conf import alias_of, command_on
from django_mq.management.arguments import OneQueue, limit, message_id, wrong_arguments
from django_mq.management.base import OperatorCommand
from django_mq.management.output import table
from django_mq.models import QueuedMessage
from django_mq.policy.plain_text import one_line
from django_mq.queues import Changed
from django_mq.queues.transactions import reading
from django_mq.states import MessageState
from django_mq.store.select_messages import groups

#: The maximum number of ids whose state is reported.
NOTED = 10
#: The options that select messages.
SELECTION = ("ids", "queue", "type", "handler", "key", "fingerprint")

#: The maximum numbers of groups that a preview shows, and of characters of an error; its columns.
MAX_GROUPS, MAX_ERROR = 10, 60
GROUP_HEADERS = ("count", "state", "queue", "type", "handler", "last error")


def add_common_selection(parser: CommandParser) -> None:
    """Add the options that select stored or handled messages, and those for the confirmation."""
    parser.add_argument(
        "--id",
        type=message_id,
        nargs="+",
        action="extend",
        dest="ids",
        metavar="ID",
        help="messages with these ids",
    )
    parser.add_argument("--queue", action=OneQueue, metavar="NAME", help="messages of this queue")
    parser.add_argument("--type", metavar="TYPE", help="messages of exactly this type")
    parser.add_argument("--handler", metavar="NAME", help="messages of this handler")
    parser.add_argument("--dry-run", action="store_true", help="print the number, change nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")


class SelectionCommand(OperatorCommand):
    """A command that changes the messages that its options select."""

    #: The messages that `--limit` selects first.
    order = "longest dead first"
    #: Whether there is an option for the messages of every queue and type.
    selects_all = True
    #: The states in which messages are changed.
    wanted: Sequence[MessageState] = (MessageState.DEAD,)

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_common_selection(parser)
        parser.add_argument("--key", metavar="KEY", help="messages with this order key")
        parser.add_argument(
            "--fingerprint",
            metavar="HASH",
            help="messages whose last attempt has this fingerprint (see mq_errors)",
        )
        parser.add_argument("--limit", type=limit, metavar="N", help=f"at most N, {self.order}")
        if self.selects_all:
            parser.add_argument(
                "--all", action="store_true", help="messages of every queue and type"
            )

    def selection(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that select; raise CommandError unless it is in exactly one way."""
        some = any(options[name] is not None for name in SELECTION)
        everything = options.get("all", False)
        if not some and not everything:
            last = "--fingerprint, or --all" if "all" in options else "or --fingerprint"
            raise wrong_arguments(
                f"select messages: by --id, --queue, --type, --handler, --key, {last}"
            )
        if some and everything:
            raise wrong_arguments("--all cannot be combined with another selection")
        return {name: options[name] for name in (*SELECTION, "limit")}

    def change(
        self,
        do: str,
        done: str,
        question: str | None,
        found: Changed,
        act: Callable[[], Changed],
        **options: Any,
    ) -> None:
        """Print notes on ids that are not `found` and a preview of the others; then change them."""
        if options["ids"] is not None:
            self.none_found = ""
            others = notes_on_others(options["ids"], found, options["database"], self.wanted)
            self.note(others)
        elif not found:
            self.warn_of_unknown(**options)
        self._preview(found, question, **options)
        super().change(do, done, question, found, act, **options)

    def _preview(
        self, found: Changed, question: str | None, *, database: str | None, **options: Any
    ) -> None:
        """Print the groups of the `found` messages, unless they are all of one kind.

        An option that selects more than the operator had in mind shows here, before it acts: in a
        dry run, and above the `question`.
        """
        if options["json"] or not (options["dry_run"] or (question and not options["yes"])):
            return
        with reading(alias_of(database)) as cursor:
            shown = groups(cursor, found.ids, limit=MAX_GROUPS + 1)
        if len(shown) < 2:
            return
        rows = [
            (f"{number:,}", *(name or "-" for name in names), one_line(error, MAX_ERROR) or "-")
            for number, *names, error in shown
        ]
        self.stdout.write(table(GROUP_HEADERS, rows[:MAX_GROUPS]))
        if len(shown) > MAX_GROUPS:
            self.stdout.write("(and smaller groups)")


def notes_on_others(
    ids: Iterable[int],
    found: Changed,
    database: str | None,
    wanted: Sequence[MessageState],
) -> Iterator[str]:
    """Say in which states the `ids` are that are not among `found`; at most ten.

    Those in a `wanted` state are left out: they reached it since.
    """
    *first, last = wanted
    either = f"{', '.join(first)} or {last}" if first else last
    others = sorted(set(ids).difference(found.ids))[:NOTED]
    alias = alias_of(database)
    rows = QueuedMessage.objects.using(alias).with_state().only("pk")
    states = {each.pk: each.state for each in rows.filter(pk__in=others)}
    for id in others:
        state = states.get(id)
        if state not in wanted:
            what = f"{state}, not {either}" if state else "not stored"
            yield f"message {id} is {what}: see {command_on(alias, f'mq_why {id}')}"
