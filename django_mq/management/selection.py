"""The options that select messages, and remarks on the given ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from django.core.management.base import CommandParser

from django_mq.conf import alias_of
from django_mq.management.arguments import message_id, wrong_arguments
from django_mq.models import QueuedMessage
from django_mq.queues import Changed
from django_mq.states import MessageState

#: The maximum number of ids whose state is reported.
NOTED = 10
#: The options of `add_selection` that select messages by a shared property.
SELECTION = ("queue", "type", "handler", "key", "fingerprint")


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
    parser.add_argument("--queue", metavar="NAME", help="messages of this queue")
    parser.add_argument("--type", metavar="TYPE", help="messages of exactly this type")
    parser.add_argument("--handler", metavar="NAME", help="messages of this handler")
    parser.add_argument("--dry-run", action="store_true", help="print the number, change nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def add_selection(parser: CommandParser) -> None:
    """Add the options that select dead letters."""
    add_common_selection(parser)
    parser.add_argument("--key", metavar="KEY", help="messages with this order key")
    parser.add_argument(
        "--fingerprint",
        metavar="HASH",
        help="messages whose last attempt has this fingerprint (see mq_errors)",
    )
    parser.add_argument("--all", action="store_true", help="messages of every queue and type")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N, longest dead first")


def check_selection(chosen: Iterable[object], everything: bool) -> None:
    """Raise CommandError unless the options select messages in exactly one way."""
    some = any(each is not None for each in chosen)
    if not some and not everything:
        raise wrong_arguments(
            "select messages: by --id, --queue, --type, --handler, --key, --fingerprint, or --all"
        )
    if some and everything:
        raise wrong_arguments("--all cannot be combined with another selection")


def notes_on_others(ids: Iterable[int], found: Changed, database: str | None) -> Iterator[str]:
    """Say what the `ids` are that are not among the dead letters `found`; at most ten."""
    others = sorted(set(ids).difference(found.ids))[:NOTED]
    rows = QueuedMessage.objects.using(alias_of(database)).with_state().only("pk")
    states = {each.pk: each.state for each in rows.filter(pk__in=others)}
    for id in others:
        state = states.get(id)
        if state != MessageState.DEAD:  # otherwise it has died since
            what = f"{state}, not dead" if state else "not stored"
            yield f"message {id} is {what}: see mq_why {id}"
