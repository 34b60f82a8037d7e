"""The chain of a message: its causes and its effects."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django_mq.conf import alias_of
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.policy.causes import tree
from django_mq.policy.column_bounds import id_of
from django_mq.queues.arguments import whole_number
from django_mq.queues.transactions import reading
from django_mq.store import causes

#: The maximum numbers of stored messages that a search examines, and of messages it returns.
MAX_EXAMINED, MAX_MESSAGES = 10_000, 200


@dataclass(frozen=True, slots=True)
class ChainLink:
    """A message of a chain, `depth` broadcasts below its top.

    `state` is a MessageState, `handled`, or `gone` for a message that left no trace but its id. A
    message that is gone is placed below the first of the chain; its type is empty, unless a failed
    attempt names it. `ended_at` is set for handled messages.
    """

    depth: int
    id: int
    type: str
    handler: str
    queue: str
    state: str
    ended_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Chain:
    """The messages of a chain as a tree, each after its cause.

    `complete` is False if some stored messages were not examined, or if the chain has more
    than `MAX_MESSAGES` messages.
    """

    correlation_id: str
    links: tuple[ChainLink, ...]
    complete: bool


def chain(id: int, *, using: str | None = None) -> Chain:
    """Return the messages that a chain of broadcasts by handlers connects with message `id`.

    Stored and handled messages are found, but a handled one only if its queue keeps a history. Of
    the stored messages, the search examines the 10,000 that follow the first of the chain, or those
    that follow `id` in a chain from another database.
    """
    whole_number(id, "id")
    alias = alias_of(using)
    with reading(alias) as cursor:
        name = causes.chain_of(cursor, id) or str(id)
        named_after = id_of(name)  # the chain begins in another database
        first = min(named_after or id, id)
        stored, complete = causes.stored(
            cursor, chain=name, id=id, first=first, window=MAX_EXAMINED, limit=MAX_MESSAGES
        )
        complete = complete and named_after is not None
        ids = sorted({id, first})
        handled = causes.handled(cursor, chain=name, ids=ids, limit=MAX_MESSAGES)
    found = {each.id: each for each in (*handled, *stored)}
    if len(found) > MAX_MESSAGES or len(stored) == MAX_MESSAGES or len(handled) == MAX_MESSAGES:
        complete = False
        found = dict(sorted(found.items())[:MAX_MESSAGES])
    nodes = list(tree(_causes(found, first)))
    states = _states(alias, [each.id for each in stored])
    lost = _lost(alias, [node.id for node in nodes if node.id not in found])
    links = []
    for node in nodes:
        each = found.get(node.id)
        if each is None:
            links.append(ChainLink(node.depth, node.id, *lost.get(node.id, ("", "", "")), "gone"))
        else:
            state = "handled" if each.ended_at is not None else states.get(each.id, "gone")
            links.append(
                ChainLink(
                    node.depth, each.id, each.type, each.handler, each.queue, state, each.ended_at
                )
            )
    return Chain(name, tuple(links), complete)


def _causes(found: dict[int, causes.ChainRow], first: int) -> dict[int, int | None]:
    """Return the cause of each message; one that is gone is placed below the chain's first."""
    known = {each.id: each.cause for each in found.values()}
    if first in known:
        gone = {cause for cause in known.values() if cause is not None and cause not in known}
        known.update(dict.fromkeys(gone, first))
    return known


def _states(alias: str, ids: list[int]) -> dict[int, str]:
    rows = QueuedMessage.objects.using(alias).with_state().filter(pk__in=ids)
    return {row.pk: row.state.value for row in rows.only("pk")}


def _lost(alias: str, ids: list[int]) -> dict[int, tuple[str, str, str]]:
    """Return type, handler and queue of messages of which only failed attempts are left."""
    rows = FailedAttempt.objects.using(alias).filter(message_id__in=ids)
    named = rows.values_list("message_id", "type", "handler", "queue")
    return {id: (type, handler, queue) for id, type, handler, queue in named}
