"""The number of messages in a queue, and the list of queues."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta

import pytest
from django.db import connection
from django.db.models.functions import Now

from django_mq import handlers, queues
from django_mq.exceptions import InvalidName
from django_mq.queues import message_counts as counting
from django_mq.queues.transactions import reading
from django_mq.states import MessageState
from django_mq.store import counts as census
from django_mq.store import estimates as sampled
from tests.pages_read import pages_read
from tests.rows import add, beat, decide

pytestmark = pytest.mark.django_db

STATES = [state.value for state in MessageState if state != MessageState.PAUSED]


def found(queue="mail"):
    """Return the counts that are not zero."""
    counts = queues.counts(queue)
    return {state: n for state in STATES if (n := getattr(counts, state))}


@pytest.mark.parametrize(
    ("columns", "state"),
    [
        ({}, "processable"),
        ({"after": 60}, "delayed"),
        ({"after": 60, "attempts": 1}, "retrying"),
        ({"after": -1, "attempts": 1}, "processable"),
        ({"held": -5}, "held"),
        ({"held": -5, "after": 60}, "held"),
        ({"expires": -5}, "expired"),
        ({"expires": -5, "after": 60, "attempts": 1}, "expired"),
        ({"expires": -5, "held": -5}, "held"),
        ({"leased": 60}, "leased"),
        ({"leased": -1}, "processable"),
        ({"leased": -1, "held": -5}, "held"),
        ({"leased": -1, "expires": -5}, "expired"),
        ({"blocked_by": 1, "key": "k"}, "blocked"),
        ({"dead": -1}, "dead"),
        ({"dead": -1, "key": "k"}, "dead"),
    ],
)
def test_each_message_is_counted_once_by_its_state(columns, state):
    """CAR-40; the count and the message agree on the state."""
    message = add(**columns)
    assert found() == {state: 1}
    assert message.state == state


@pytest.mark.parametrize("lease", [60, -1])
def test_messages_of_a_live_worker_are_running(lease):
    running, other = add(leased=lease), add(leased=60)
    beat(running=[running.pk])
    beat("gone", running=[other.pk], seen=-31)
    assert found() == {"running": 1, "leased": 1}
    assert queues.counts("mail").in_flight == 2


def test_depth_is_all_but_the_dead():
    for columns in ({}, {"after": 60}, {"leased": 60}, {"held": -1}, {"dead": -1}):
        add(**columns)
    add(blocked_by=1, key="k")
    assert queues.counts("mail").depth == 5


def test_oldest_is_for_how_long_a_message_has_been_due():
    add(after=-100, priority=0)
    add(after=-300, priority=5)
    add(after=-900, held=-900)
    add(after=-900, expires=-900)
    add("other", after=-900)
    oldest = queues.counts("mail").oldest
    assert timedelta(seconds=300) <= oldest < timedelta(seconds=330)


@pytest.mark.parametrize("style", ["sql_standard", "postgres_verbose", "iso_8601"])
def test_a_role_that_writes_intervals_another_way_can_count(style):
    """The driver reads only the default style."""
    add(after=-100)
    with connection.cursor() as cursor:
        cursor.execute(f"set local intervalstyle = {style}")
    assert queues.counts("mail").oldest >= timedelta(seconds=100)


def test_nothing_is_due():
    add(after=60)
    assert queues.counts("mail").oldest is None


def test_pause_is_shown_and_hides_no_state():
    decided = decide(paused=-1, until=60, backoff=30, backoff_level=4)
    add()
    counts = queues.counts("mail")
    assert counts.paused
    assert counts.processable == 1
    assert counts.paused_until == decided.paused_until
    assert (counts.backoff_level, counts.backoff_until) == (4, decided.backoff_until)


@pytest.mark.parametrize(("seconds", "lives"), [(9, True), (-9, False)])
def test_a_probe_and_an_owner_count_while_they_live(seconds, lives):
    until = Now() + timedelta(seconds=seconds)
    decided = decide(
        backoff=-1, backoff_level=4, probe_by="a:1", probe_until=until, owner="b", owned_until=until
    )
    counts = queues.counts("mail")
    assert (counts.backoff_level, counts.backoff_until) == (4, None)
    assert counts.probe_by == ("a:1" if lives else None)
    assert counts.owner == ("b" if lives else None)
    assert counts.owned_until == (decided.owned_until if lives else None)


def test_an_unknown_queue_is_empty():
    assert found("nothing") == {}
    assert queues.counts("nothing").queue == "nothing"
    with pytest.raises(InvalidName):
        queues.counts("no such name")


def test_all_queues(settings):
    settings.DJANGO_MQ = {"QUEUES": {"listed": {}}}
    add("b")
    add("a", dead=-1)
    with handlers.isolated():
        counts = queues.counts()
    assert {name: each.depth for name, each in counts.items()} == {
        "a": 0,
        "b": 1,
        "default": 0,
        "listed": 0,
    }
    assert list(counts) == sorted(counts)


@pytest.mark.parametrize(
    ("columns", "capped"),
    [
        ({}, {"processable", "held", "expired"}),
        ({"after": 60}, {"delayed", "retrying", "held", "expired"}),
        ({"leased": 60}, {"leased", "running", "processable", "held", "expired"}),
        ({"blocked_by": 1, "key": "k"}, {"blocked"}),
        ({"dead": -1}, {"dead"}),
    ],
)
def test_counting_ends_somewhere(monkeypatch, columns, capped):
    monkeypatch.setattr(counting, "MAX_COUNT", 2)
    # The estimate reads the whole table, though other tests may have left much empty space in it.
    monkeypatch.setattr(sampled, "PAGES", 1_000_000)
    message = add(**columns)
    add(**columns)
    state = message.state.value
    assert queues.counts("mail").shown(state) == "2"
    assert not queues.counts("mail").capped
    add(**columns)
    counts = queues.counts("mail")
    assert counts.shown(state) == "≈ 3"
    assert counts.capped == capped
    if state != "dead":
        assert (counts.shown("depth"), counts.about("depth")) == ("≈ 3", 3)
    if state == "leased":
        assert counts.shown("in_flight") == "≈ 3"
    monkeypatch.setattr(sampled, "estimates", lambda cursor, queues: {name: {} for name in queues})
    assert queues.counts("mail").shown(state) == "2+"


def test_count_beyond_its_limit_is_estimated_from_a_sample(monkeypatch):
    """Without statistics, and for a state whose rows are adjacent in the table."""
    monkeypatch.setattr(counting, "MAX_COUNT", 1_000)
    monkeypatch.setattr(sampled, "PAGES", 100)
    with connection.cursor() as cursor:
        cursor.execute(
            "insert into django_mq_queuedmessage (queue, type, payload, dead_at)"
            " select case when n <= 3000 then 'rare' else 'mail' end, 't', '{}',"
            "        case when n <= 12000 then now() end from generate_series(1, 20000) n"
        )
    with pages_read() as read:
        counts = queues.counts("mail")
    assert read.total < 1_500
    assert counts.dead == 1_000
    assert counts.about("dead") == pytest.approx(9_000, rel=0.35)
    assert counts.about("processable") == pytest.approx(8_000, rel=0.35)
    assert counts.shown("dead").startswith("≈ ")
    assert queues.counts("rare").about("dead") == pytest.approx(3_000, rel=0.6)


def test_only_counts_are_capped():
    names = {field.name for field in fields(queues.QueueCounts)}
    everything = counting._DUE | counting._NOT_DUE | counting._IN_FLIGHT | counting._WAITING
    assert everything < set(STATES) < names


def test_counts_read_by_the_indexes():
    """EXPLAIN: with any number of rows in a queue, no plan walks the table."""
    with connection.cursor() as cursor:
        cursor.execute(
            "insert into django_mq_queuedmessage"
            " (queue, type, payload, processable_after, leased_until, claimed_by, dead_at, key)"
            " select 'q' || n % 3, 't', '{}', now() + n % 2 * interval '1 h',"
            "        case n % 7 when 0 then now() end, case n % 7 when 0 then 'w:1' end,"
            "        case n % 7 when 1 then now() end, case n % 7 when 2 then 'k' end"
            "   from generate_series(1, 3000) n"
        )
    with reading("default") as cursor:
        cursor.execute("analyze django_mq_queuedmessage")
        values = {"queues": ["q0", "q1"], "limit": 10, "gone_after": 30.0}
        values |= {"ordered": ["q0"], "skipping": ["q1"]}
        cursor.execute(f"explain {census.COUNTS}", values)
        plan = "\n".join(line for (line,) in cursor.fetchall())
    for index in ("mq_claim", "mq_lease", "mq_dead", "mq_key"):
        assert index in plan
    assert "Seq Scan on django_mq_queuedmessage" not in plan


def test_counts_leave_the_session_as_it_was(transactional_db):
    def jit():
        with connection.cursor() as cursor:
            cursor.execute("show jit")
            return cursor.fetchone()[0]

    before = jit()
    queues.counts()
    assert jit() == before


@pytest.mark.parametrize(
    "columns",
    [{}, {"leased": 60}, {"leased": -1}, {"dead": -1}, {"key": "k", "blocked_by": 1}],
)
def test_a_queue_with_a_row_has_a_name(columns):
    add("z", **columns)
    add("a", **columns)
    assert {"a", "z"} <= set(queues.names())


def test_names_of_decided_configured_and_handled_queues(settings):
    """CAR-39: the names of queues; the turn of the chores is no queue."""
    settings.DJANGO_MQ = {"DEFAULT_QUEUE": "main", "QUEUES": {"listed": {}}}
    decide("decided", paused=-1)
    decide("resumed")
    decide("over", paused=-2, until=-1)
    decide(":")
    with handlers.isolated():
        handlers.handler("a", name="a", queue="own", queues=("allowed",))(lambda delivery: None)
        handlers.handler("b", name="b")(lambda delivery: None)
        assert queues.names() == ["allowed", "decided", "listed", "main", "own"]
