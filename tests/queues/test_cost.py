"""Queries about queues cost the same at any number of messages: in pages, not time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import DEFAULT_DB_ALIAS, connection

from django_mq import cancel, queues
from django_mq.models import QueuedMessage
from django_mq.queues import message_counts
from django_mq.queues.doctor import subscriptions
from django_mq.queues.topology import waiting_kinds
from django_mq.queues.transactions import reading
from django_mq.store.readers import prepare_to_read
from tests.pages_read import pages_read
from tests.rows import add, beat

pytestmark = [pytest.mark.django_db, pytest.mark.thorough]

FEW, MANY = 2_000, 60_000

#: A queue whose key is stuck behind a leased head, an ordered queue, one of plain messages with
#: unique ids, three in which all messages are expired, held or dead, one whose first message has
#: many delayed ones of a higher priority beside it, and a small one at the end.
FILL = """
insert into django_mq_queuedmessage
       (queue, type, handler, key, payload, attempts, claimed_by, leased_until)
select 'stuck', 't', 'h', 'k', '{}', 1, 'w:1', now() + interval '1 day'
 where not exists (select from django_mq_queuedmessage where queue = 'stuck');
insert into django_mq_queuedmessage (queue, type, handler, key, payload, processable_after)
select 'stuck', 't', 'h', 'k', '{}', now() - interval '1 hour' + n * interval '1 ms'
  from generate_series(%(first)s, %(last)s) n;
insert into django_mq_queuedmessage (queue, type, handler, key, payload, ordered)
select 'ordered', 't', 'h', case when n %% 2 = 0 then 'k' end, '{}', true
  from generate_series(%(first)s, %(last)s) n;
insert into django_mq_queuedmessage (queue, type, handler, payload, unique_id, processable_after)
select 'plain', 't' || n %% 9, 'h', '{}', 'u' || n, now() - interval '1 hour' + n * interval '1 ms'
  from generate_series(%(first)s, %(last)s) n;
insert into django_mq_uniquekey (queue, type, handler, unique_id, message_id)
select queue, type, handler, unique_id, id
  from django_mq_queuedmessage
 where queue = 'plain' and substr(unique_id, 2)::int >= %(first)s;
insert into django_mq_uniquekey (queue, type, handler, unique_id, put_aside)
select 'plain', 't' || n %% 9, 'h', 'u' || n, '{}' from generate_series(%(first)s, %(last)s) n;
insert into django_mq_queuedmessage (queue, type, handler, payload, expires_at)
select 'expired', 't', 'h', '{}', now() - interval '1 s'
  from generate_series(%(first)s, %(last)s) n;
insert into django_mq_queuedmessage (queue, type, handler, payload, held_since, processable_after)
select 'held', 't', 'h', '{}', now(), now() - interval '1 hour'
  from generate_series(%(first)s, %(last)s) n;
insert into django_mq_queuedmessage (queue, type, handler, payload, dead_at)
select 'dead', 't', 'h', '{}', now() - n * interval '1 s'
  from generate_series(%(first)s, %(last)s) n;
insert into django_mq_queuedmessage (id, queue, type, payload)
select -1, 'lanes', 't', '{}'
 where not exists (select from django_mq_queuedmessage where queue = 'lanes');
insert into django_mq_queuedmessage (queue, type, payload, priority, processable_after)
select 'lanes', 't', '{}', 0, m.processable_after
  from generate_series(%(first)s, %(last)s) n, django_mq_queuedmessage m
 where m.id = -1;
insert into django_mq_queuedmessage (queue, type, payload, priority, processable_after)
select 'lanes', 't', '{}', 5, now() + interval '1 day'
  from generate_series(%(first)s, %(last)s) n;
delete from django_mq_queuedmessage where queue = 'small';
insert into django_mq_queuedmessage
       (queue, type, handler, key, payload, blocked_by, dead_at, attempts, claimed_by, leased_until)
select 'small', 't', 'h', case when n %% 2 = 0 then 'k' || n end, '{}', case when n = 4 then 1 end,
       case when n = 5 then now() end, 1, case when n = 6 then 'w:1' end,
       case when n = 6 then now() + interval '1 day' end
  from generate_series(1, 20) n
"""


def _id_at(queue: str, place: float) -> int:
    """Return the id of the message that has this part of its queue's messages ahead of it."""
    return _ids[queue][round(place * (len(_ids[queue]) - 1))]


def _kinds() -> object:
    """Read what the doctor compares with the handlers."""
    with reading("default") as cursor:
        prepare_to_read(cursor)
        return waiting_kinds(cursor, queues=["stuck", "ordered", "plain", "held", "lanes"])


CALLS: dict[str, Callable[[], object]] = {
    **{
        f"state of {queue}": lambda queue=queue: queues.state(queue)  # type: ignore[misc]
        for queue in ("stuck", "ordered", "plain", "expired", "held", "dead", "small")
    },
    **{
        f"counts of {queue}": lambda queue=queue: queues.counts(queue)  # type: ignore[misc]
        for queue in ("stuck", "ordered", "plain", "expired", "held", "dead", "small")
    },
    "counts": queues.counts,
    "cancel a unique id": lambda: cancel(unique_id="u1234"),
    "cancel a unique id of a type": lambda: cancel(unique_id="u1234", type="t1"),
    "cancel no unique id": lambda: cancel(unique_id="none"),
    "cancel an id": lambda: cancel(id=1),
    "names": queues.names,
    "peek": queues.peek,
    "peek, free": lambda: queues.peek(skip_locked=True),
    "peek, dead": lambda: queues.peek(dead=True),
    "peek a small queue": lambda: queues.peek("small"),
    "peek a small queue, free": lambda: queues.peek("small", skip_locked=True),
    "peek a small queue, dead": lambda: queues.peek("small", dead=True),
    "peek a queue without messages": lambda: queues.peek("none"),
    "peek a stuck queue": lambda: queues.peek("stuck"),
    "requeue a few": lambda: queues.requeue(limit=10),
    "requeue those of a small queue": lambda: queues.requeue(queue="small"),
    "purge a few": lambda: queues.purge(limit=10),
    "purge a few that wait": lambda: queues.purge(limit=10, waiting=True),
    "purge a small queue": lambda: queues.purge("small", waiting=True),
    "purge ids": lambda: queues.purge(ids=[1, 2, 3], dry_run=True),
    **{
        f"why, in {queue} at {place:.0%}": lambda queue=queue, place=place: queues.why(  # type: ignore[misc]
            _id_at(queue, place)
        )
        for queue in ("stuck", "ordered", "plain")
        for place in (0, 0.5, 1)
    },
    "why, no such message": lambda: queues.why(-2),
    "why, behind those of a higher priority": lambda: queues.why(-1),
    "heads": queues.heads,
    "topology": queues.topology,
    "kinds of waiting messages": _kinds,
}


#: By queue, all in order. Looked up beforehand, since the lookup's cost is not the call's.
_ids: dict[str, list[int]] = {}


def fill(first: int, last: int) -> None:
    with connection.cursor() as cursor:
        for statement in FILL.split(";\n"):
            cursor.execute(statement, {"first": first, "last": last})
        cursor.execute("analyze django_mq_queuedmessage, django_mq_uniquekey")
    for queue in ("stuck", "ordered", "plain"):
        messages = QueuedMessage.objects.filter(queue=queue)
        _ids[queue] = list(messages.order_by("pk").values_list("pk", flat=True))


def cost() -> dict[str, int]:
    """Return the pages that each call reads."""
    found = {}
    for name, call in CALLS.items():
        with pages_read() as read:
            call()
        found[name] = read.total
    return found


def test_no_call_costs_more_among_many_messages(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.DJANGO_MQ = {"QUEUES": {"ordered": {"ordered": True}}}
    monkeypatch.setattr(message_counts, "MAX_COUNT", 1000)
    beat()
    fill(1, FEW)
    few = cost()
    fill(FEW + 1, MANY)
    many = cost()
    grown = {
        name: (few[name], pages) for name, pages in many.items() if pages > 2 * few[name] + 100
    }
    assert grown == {}


#: More than one chunk of an action.
DEAD = 3_000
BY_IDS: dict[str, Callable[[list[int]], queues.Changed]] = {
    "requeue, dry run": lambda ids: queues.requeue(ids, dry_run=True),
    "requeue": queues.requeue,
    "purge, dry run": lambda ids: queues.purge(ids=ids, dry_run=True),
    "purge": lambda ids: queues.purge(ids=ids),
    "discard": queues.discard,
}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", BY_IDS)
def test_many_dead_letters_with_the_statistics_of_an_empty_table(name: str) -> None:
    """As after an outage: to requeue 50,000 of 200,000 dead letters took 207 s.

    For each id the server read the whole index of the dead letters, in which the id comes last.
    """

    def fill() -> list[int]:
        cursor.execute(
            "insert into django_mq_queuedmessage (queue, type, handler, payload, dead_at)"
            " select 'dead', 't', 'h', '{}', now() - n * interval '1 s'"
            "   from generate_series(1, %s) n returning id",
            [DEAD],
        )
        return [id for (id,) in cursor.fetchall()]

    with connection.cursor() as cursor:
        fill()
        cursor.execute("delete from django_mq_queuedmessage")
        cursor.execute("vacuum analyze django_mq_queuedmessage")
        ids = fill()
    with pages_read() as read:
        changed = BY_IDS[name](ids)
    assert len(changed.ids) == DEAD
    assert read.total < 15 * DEAD


def test_the_doctor_looks_for_held_messages_among_a_bounded_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No index has `held_since`: a limit on the matches alone let it read the whole table."""
    monkeypatch.setattr(message_counts, "MAX_COUNT", 1000)
    add(type="nobody.hears", held=-600, after=-7200)

    def pages(first: int, last: int) -> int:
        with connection.cursor() as cursor:
            cursor.execute(
                "insert into django_mq_queuedmessage (queue, type, payload, processable_after)"
                " select 'mail', 't', '{}', now() - interval '1 hour' + n * interval '1 ms'"
                " from generate_series(%s, %s) n",
                (first, last),
            )
            cursor.execute("analyze django_mq_queuedmessage")
        with pages_read() as read:
            (finding,) = subscriptions.unheard(DEFAULT_DB_ALIAS)
        assert "of type nobody.hears" in finding.text
        return read.total

    few = pages(1, FEW)
    assert pages(FEW + 1, MANY) < 2 * few + 100


def test_counts_are_linear_in_the_queues() -> None:
    """2,000 queues took 12 s, mostly for finding each queue's priorities among all of them."""

    def rows(first: int, last: int) -> int:
        with connection.cursor() as cursor:
            cursor.execute(
                "insert into django_mq_queuedmessage (queue, type, payload, priority)"
                " select 'q' || n, 't', '{}', n %% 3 from generate_series(%s, %s) n",
                (first, last),
            )
            cursor.execute("analyze django_mq_queuedmessage")
        with pages_read() as read:
            assert len(queues.counts()) >= last
        return read.rows

    few = rows(1, 100)
    assert rows(101, 800) < 12 * few, "8 times as many queues"
