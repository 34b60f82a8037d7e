"""Stalled lines: their first message, the number of waiting messages, and the way to free them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection

from django_mq import queues
from django_mq.models import QueuedMessage
from django_mq.outbox import notify
from django_mq.queues import stalled
from django_mq.queues.transactions import reading
from django_mq.store import waiting_behind
from tests.queues.between import ending_after
from tests.rows import add

pytestmark = pytest.mark.django_db


def line(key="k", n=2, queue="mail", handler="h", **head):
    """Add a head and `n` followers parked behind it; return all."""
    first = add(queue, key=key, handler=handler, **head)
    return [first, *(add(queue, key=key, handler=handler, blocked_by=first.pk) for _ in range(n))]


def found(*args, **kwargs):
    return [(each.id, each.key, each.state, each.behind) for each in queues.heads(*args, **kwargs)]


@pytest.mark.parametrize(
    ("columns", "state"),
    [
        ({"dead": -5}, "dead"),
        ({"after": 60}, "delayed"),
        ({"after": 60, "attempts": 1}, "retrying"),
        ({"leased": 60}, "leased"),
        ({}, "processable"),
    ],
)
def test_a_head_and_its_state(columns, state):
    first, *_ = line(**columns)
    add(key="other"), add(key="k", handler="other"), add("other", key="k")
    [head] = queues.heads()
    assert (head.id, head.queue, head.handler, head.key) == (first.pk, "mail", "h", "k")
    assert (head.state, head.behind, head.capped) == (state, 2, False)
    assert head.at == first.dead_at or first.processable_after


def test_the_true_head_whatever_they_were_parked_behind():
    """Messages parked behind a deleted one stay parked until they are first."""
    old, second, _ = line(n=2, dead=-5)
    old.delete()
    assert found() == [(second.pk, "k", "blocked", 1)]
    QueuedMessage.objects.filter(pk=second.pk).update(blocked_by=None)
    add(key="k", handler="h", blocked_by=second.pk)
    assert found() == [(second.pk, "k", "processable", 2)]


def test_a_head_that_ends_while_it_is_read():
    """A hot key has another head every millisecond, and thousands of messages behind it."""
    first, second, *_ = line(n=3, leased=60)
    other = line("other", n=1, dead=-5)[0]
    with ending_after("with recursive blocker", first):
        assert found() == [(second.pk, "k", "blocked", 2), (other.pk, "other", "dead", 1)]


def test_a_line_that_ends_while_it_is_read():
    first, second = line(n=1, leased=60)
    with ending_after("with recursive blocker", first):
        assert found() == []  # nobody waits behind the second
    assert QueuedMessage.objects.get() == second


def test_dead_heads_that_block_no_message_are_skipped(settings):
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"on_dead_head": "skip"}}}
    first, second, third, _ = line(n=3, leased=60)
    QueuedMessage.objects.filter(pk=second.pk).update(dead_at=first.created_at, blocked_by=None)
    with ending_after("with recursive blocker", first):
        assert found() == [(third.pk, "k", "blocked", 1)]


def test_the_oldest_first_and_no_more_than_asked_for():
    ids = [line(key=f"k{n}", n=1, dead=-5)[0].pk for n in range(5)]
    assert [each.id for each in queues.heads(limit=3)] == ids[:3]
    assert [each.id for each in queues.heads("mail")] == ids
    assert queues.heads("other") == []


def test_counting_stops(monkeypatch):
    monkeypatch.setattr(stalled, "MAX_COUNT", 3)
    line(n=5, dead=-5)
    [head] = queues.heads()
    assert (head.behind, head.capped) == (3, True)


def test_dead_heads_do_not_count_where_they_are_skipped(settings):
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"on_dead_head": "skip"}}}
    _, *followers = line(dead=-5)
    assert found() == [(followers[0].pk, "k", "blocked", 1)]


@pytest.mark.parametrize(
    ("columns", "blocks"),
    [({"dead": -5}, 2), ({"after": 60}, 2), ({}, 0), ({"leased": 60}, 0), ({"leased": -1}, 0)],
)
def test_an_ordered_queue_that_stands(settings, columns, blocks):
    """PMQ-44: a dead, delayed or retrying head keeps the whole queue."""
    settings.DJANGO_MQ = {"QUEUES": {"line": {"ordered": True}}}
    head = add("line", ordered=True, **columns)
    add("line", ordered=True, key="a"), add("line", ordered=True)
    assert [(each[0], each[1], each[3]) for each in found()] == (
        [(head.pk, None, blocks)] if blocks else []
    )
    assert queues.counts("line").head == (head.pk if blocks else None)
    assert queues.counts("line").dead_head == (head.pk if "dead" in columns else None)
    assert queues.counts("line").ordered
    assert found("mail") == []


def test_an_ordered_queue_has_no_lines_of_keys(settings):
    """Messages were parked by their keys before the queue was ordered."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"ordered": True}}}
    line(after=60)
    assert found() == []


def test_counts_name_the_key_that_is_blocked_longest():
    first, second, _ = line("a", dead=-5)
    line("b", after=60)
    counts = queues.counts("mail")
    assert (counts.blocked, counts.blocked_key, counts.head) == (4, "a", first.pk)
    first.delete()
    assert queues.counts("mail").head == second.pk
    counts = queues.counts("other")
    assert (counts.blocked_key, counts.head, counts.ordered) == (None, None, False)


def test_counts_name_the_oldest_dead_message_that_others_wait_behind(settings):
    """Of all keys, the one blocked longest; a message without followers does not count."""
    line("a", after=60)
    add(key="c", dead=-5)
    assert queues.counts("mail").dead_head is None
    late = line("d", dead=-5, handler="h1")[0]
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"on_dead_head": "skip"}}}
    assert queues.counts("mail").dead_head is None
    settings.DJANGO_MQ = {}
    assert queues.counts("mail").dead_head == late.pk
    first = line("b", dead=-5, handler="h2")[0]
    late.delete()
    assert queues.counts("mail").dead_head == first.pk
    assert queues.counts("mail").blocked_key == "a"
    add(key="b", handler="h2", dead=-5), add(key="a", dead=-5)
    assert queues.counts("mail").dead_head == first.pk
    first.delete()
    assert queues.counts("mail").dead_head is None
    assert queues.counts("mail").head is not None


@pytest.mark.parametrize(
    ("deed", "columns"),
    [
        (lambda head: queues.discard(head.pk), {"dead": -5}),
        (lambda head: queues.cancel(head.pk), {"after": 60}),
        (lambda head: queues.purge(key="k"), {"dead": -5}),
        (lambda head: queues.purge(ids=head.pk), {"dead": -5}),
        (lambda head: queues.purge(ids=head.pk, waiting=True), {"after": 60}),
    ],
)
def test_when_a_head_goes_the_next_is_free_and_workers_are_woken(monkeypatch, deed, columns):
    rings = []
    monkeypatch.setattr(notify, "ring_after_commit", rings.append)
    head, second, third = line(**columns)
    assert deed(head).ids == (head.pk,)
    blocked = dict(QueuedMessage.objects.values_list("pk", "blocked_by"))
    assert blocked == {second.pk: None, third.pk: head.pk}
    assert rings == [connection]


def test_discard_without_followers_does_not_ring(monkeypatch):
    rings = []
    monkeypatch.setattr(notify, "ring_after_commit", rings.append)
    assert queues.discard(add(dead=-5).pk)
    assert rings == []


def test_a_requeued_head_is_due_and_keeps_its_place():
    head, second, _ = line(dead=-5)
    assert queues.requeue(key="k", handler="h").ids == (head.pk,)
    assert found() == [(head.pk, "k", "processable", 2)]
    assert queues.why(second.pk).behind == head.pk


@pytest.mark.parametrize("choice", [{"key": "a"}, {"handler": "h1"}, {"key": "a", "handler": "h1"}])
def test_dead_letters_are_chosen_by_key_and_handler(choice):
    for key in ("a", "b"):
        for handler in ("h1", "h2"):
            add(key=key, handler=handler, dead=-5)
            add(key=key, handler=handler)
    wanted = set(QueuedMessage.objects.dead().filter(**choice).values_list("pk", flat=True))
    assert set(queues.requeue(**choice, dry_run=True).ids) == wanted
    assert set(queues.purge(**choice, dry_run=True).ids) == wanted
    assert set(queues.requeue(**choice).ids) == wanted
    assert not queues.purge(**choice)
    assert set(queues.purge(**choice, waiting=True).ids) >= wanted


@pytest.mark.parametrize(
    "call",
    [
        lambda: queues.heads("no name"),
        lambda: queues.heads(limit=0),
        lambda: queues.heads(limit=True),
        lambda: queues.heads(limit=2**63),
        lambda: queues.purge(older_than=1e300),
        lambda: queues.purge(older_than=timedelta.max),
        lambda: queues.requeue(key="no\tkey"),
        lambda: queues.purge(handler="no name"),
        lambda: queues.purge(ids=[1], key="k"),
        lambda: queues.purge(ids=["x"]),
    ],
)
def test_bad_arguments(call):
    with pytest.raises(ValueError):  # noqa: PT011
        call()


def test_purge_of_ids_reports_skipped_messages():
    dead, waiting, flying = add(dead=-5), add(), add(leased=60)
    ids = [dead.pk, waiting.pk, flying.pk]
    assert queues.purge(ids=ids, dry_run=True) == queues.Changed((dead.pk,), 2)
    every = queues.Changed(tuple(ids), 1)
    assert queues.purge(ids=[*ids, 10**9], waiting=True, dry_run=True) == every
    assert queues.purge(ids=ids) == queues.Changed((dead.pk,), 2)
    assert queues.purge(ids=ids, waiting=True) == queues.Changed((waiting.pk,), 2)


class TestStandings:
    def test_of_a_key(self):
        head, second, third = line(dead=-5)
        alone = add()
        known = stalled.line_positions([head.pk, second.pk, third.pk, alone.pk])
        assert [(each.head, each.ahead, each.behind) for _, each in sorted(known.items())] == [
            (None, 0, 2),
            (head.pk, 1, 1),
            (head.pk, 2, 0),
        ]

    def test_others_of_the_line_that_are_in_flight(self):
        first, later, alone = add(key="k"), add(key="k", leased=60), add(key="a", leased=60)
        known = stalled.line_positions([first.pk, later.pk, alone.pk])
        assert [known[each.pk].waits_for for each in (first, later, alone)] == [
            later.pk,
            first.pk,
            None,
        ]

    def test_of_a_dead_head_that_is_skipped(self, settings):
        settings.DJANGO_MQ = {"QUEUES": {"mail": {"on_dead_head": "skip"}}}
        dead, second, _ = line(dead=-5)
        known = stalled.line_positions([dead.pk, second.pk])
        assert (known[dead.pk].behind, known[second.pk].head) == (0, None)

    def test_counts_stop(self):
        head, *_, last = line(n=5, dead=-5)
        known = stalled.line_positions([head.pk, last.pk], maximum=3)
        assert (known[head.pk].behind, known[last.pk].ahead) == (3, 3)


@pytest.mark.parametrize(
    "statement",
    [waiting_behind.BLOCKED, waiting_behind.LINE_POSITIONS],
    ids=["blocked", "line_positions"],
)
def test_it_is_found_by_the_indexes(statement):
    """EXPLAIN: a million rows of one key are not walked."""
    with connection.cursor() as cursor:
        cursor.execute(
            "insert into django_mq_queuedmessage (queue, type, payload, handler, key, blocked_by)"
            " select 'mail', 't', '{}', 'h', 'k' || n % 3, n % 3 from generate_series(1, 3000) n"
        )
    values = {
        "ids": [1, 2],
        "queue": "mail",
        "ordered": ["line"],
        "skipping": ["skips"],
        "maximum": 100,
        "limit": 10,
        "examined": 100,
    }
    with reading("default") as cursor:
        cursor.execute("analyze django_mq_queuedmessage")
        cursor.execute(f"explain {statement}", values)
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert "Seq Scan on django_mq_queuedmessage" not in plan
    for index in ("mq_key", "mq_line"):
        assert index in plan
