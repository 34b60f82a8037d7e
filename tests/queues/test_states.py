"""The state of a queue, and its first messages."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now

from django_mq import queues
from django_mq.exceptions import InvalidName
from django_mq.models import QueuedMessage
from django_mq.queues import State
from django_mq.store import peek, queue_state
from tests.pages_read import pages_read
from tests.rows import add, decide, insert_all

pytestmark = pytest.mark.django_db


class TestState:
    @pytest.mark.parametrize(
        ("columns", "kind"),
        [
            (None, "empty"),
            ({}, "processable"),
            ({"after": -3600}, "processable"),
            ({"after": 3600}, "after"),
        ],
    )
    def test_one_row(self, columns, kind):
        """PMQ-24, PMQ-25."""
        if columns is not None:
            message = add(**columns)
        state = queues.state("mail")
        at = message.processable_after if kind == "after" else None
        assert state == State(kind, at, False, 0, None)

    def test_message_due_now_is_processable(self):
        """PMQ-24: a due time equal to now counts; the claim follows the same rule."""
        add(after=0)
        assert queues.state("mail").kind == "processable"

    def test_a_message_due_now_is_not_hidden_behind_a_later_one(self):
        """PMQ-26."""
        add(after=3600, priority=9)
        add()
        assert queues.state("mail").kind == "processable"

    def test_the_earliest_due_time_of_all_priorities(self):
        """PMQ-26."""
        for priority, after in ((9, 300), (0, 100), (-3, 200)):
            add(after=after, priority=priority)
        soonest = QueuedMessage.objects.get(priority=0)
        assert queues.state("mail").at == soonest.processable_after

    def test_a_leased_message_is_awaited_not_processable(self):
        """PMQ-27: an idle worker sleeps until the lease lapses."""
        message = add(leased=20)
        add(after=3600)
        assert queues.state("mail") == State("after", message.leased_until, False, 0, None)

    def test_a_delayed_message_may_come_before_a_lapse(self):
        add(leased=3600)
        message = add(after=20)
        assert queues.state("mail").at == message.processable_after

    def test_a_lapsed_lease_is_processable(self):
        add(leased=-1)
        assert queues.state("mail").kind == "processable"

    @pytest.mark.parametrize(
        "columns", [{"dead": -1}, {"blocked_by": 1}, {"expires": -1}, {"queue": "other"}]
    )
    def test_unclaimable_message_is_not_processable(self, columns):
        add(**columns)
        assert queues.state("mail").kind == "empty"

    def test_expired_message_hides_no_other(self):
        add(expires=-1)
        add()
        assert queues.state("mail").kind == "processable"

    def test_a_message_behind_its_key_is_not_processable(self):
        head = add(key="k", leased=20)
        add(key="k")
        assert queues.state("mail") == State("after", head.leased_until, False, 0, None)
        add(key="k2")
        assert queues.state("mail").kind == "processable"

    def test_a_key_is_of_one_handler(self):
        add(key="k", handler="a", leased=20)
        add(key="k", handler="b")
        assert queues.state("mail").kind == "processable"

    @pytest.mark.parametrize(("policy", "kind"), [("block", "after"), ("skip", "processable")])
    def test_a_dead_head(self, settings, policy, kind):
        settings.DJANGO_MQ = {"QUEUES": {"mail": {"on_dead_head": policy}}}
        add(key="k", dead=-1)
        add(key="k")
        assert queues.state("mail").kind == kind

    @pytest.mark.parametrize(
        ("head", "policy", "kind"),
        [
            ({}, "block", "processable"),
            ({"leased": -1}, "block", "processable"),
            ({"after": 3600}, "block", "after"),
            ({"leased": 3600}, "block", "after"),
            ({"dead": -1}, "block", "empty"),
            ({"dead": -1}, "skip", "processable"),
            ({"expires": -1}, "block", "empty"),
            ({"expires": -1}, "skip", "processable"),
        ],
    )
    def test_the_first_of_an_ordered_queue_decides(self, settings, head, policy, kind):
        """PMQ-24, PMQ-43, PMQ-44: no message of the line starts before its first."""
        settings.DJANGO_MQ = {"QUEUES": {"mail": {"ordered": True, "on_dead_head": policy}}}
        first = add(ordered=True, **head)
        add(ordered=True, priority=9), add(ordered=True, key="k")
        at = (first.leased_until or first.processable_after) if kind == "after" else None
        assert queues.state("mail") == State(kind, at, False, 0, None)

    def test_an_ordered_queue_whose_messages_are_not_in_line_yet(self, settings):
        settings.DJANGO_MQ = {"QUEUES": {"mail": {"ordered": True}}}
        add()
        assert queues.state("mail").kind == "processable"

    def test_the_first_of_an_ordered_queue_may_be_locked(self, settings, lock):
        settings.DJANGO_MQ = {"QUEUES": {"mail": {"ordered": True}}}
        first = add(ordered=True)
        add(ordered=True)
        assert queues.state("mail").kind == "processable"
        lock(first)
        assert queues.state("mail").kind == "after"

    def test_pause_and_backoff_are_shown_beside_the_kind(self):
        decided = decide(paused=-1, backoff=60, backoff_level=2)
        add()
        assert queues.state("mail") == State("processable", None, True, 2, decided.backoff_until)

    def test_a_pause_and_a_backoff_end(self):
        decide(paused=-9, until=-1, backoff=-1, backoff_level=2)
        assert queues.state("mail") == State("empty", None, False, 2, None)

    def test_a_bad_name(self):
        with pytest.raises(InvalidName):
            queues.state("no such name")

    def test_message_locked_by_another_session(self, lock, settings):
        """PMQ-27: no spinning while another worker's claim is not committed."""
        settings.DJANGO_MQ = {"POLL_INTERVAL": 7}
        message = add()
        lock(message)
        state = queues.state("mail")
        assert state.kind == "after"
        now = QueuedMessage.objects.annotate(now=Now()).get().now
        assert timedelta(seconds=6) < state.at - now <= timedelta(seconds=7)
        add()
        assert queues.state("mail").kind == "processable"

    def test_a_lapsed_lease_that_is_locked_still_runs(self, lock):
        message = add(leased=-1)
        lock(message)
        assert queues.state("mail").kind == "after"
        add(leased=-1)
        assert queues.state("mail").kind == "processable"

    def test_it_leaves_nothing_locked(self, other):
        message = add()
        with transaction.atomic():
            assert queues.state("mail").kind == "processable"
            other.execute(
                "select id from django_mq_queuedmessage where id = %s for update nowait",
                [message.pk],
            )
            assert other.fetchall() == [(message.pk,)]

    def test_the_transaction_around_it_stays_usable(self, transactional_db):
        with transaction.atomic():
            add()
            queues.state("mail")
        assert QueuedMessage.objects.count() == 1


class TestManyDueMessages:
    """The first `WINDOW` due messages of each priority are examined."""

    @pytest.fixture(autouse=True)
    def small_window(self, monkeypatch):
        monkeypatch.setattr(queue_state, "WINDOW", 3)

    def stuck(self, n, **given):
        """Add a key whose first message is in flight for an hour, and `n` behind it."""
        head = add(key="k", leased=3600, **given)
        for _ in range(n):
            add(key="k", **given)
        return head

    def test_when_all_were_examined_the_answer_is_exact(self):
        head = self.stuck(3)
        assert queues.state("mail").at == head.leased_until

    def test_when_more_follow_it_is_to_be_asked_again_soon(self, settings):
        settings.DJANGO_MQ = {"POLL_INTERVAL": 7}
        self.stuck(4)
        state = queues.state("mail")
        now = QueuedMessage.objects.annotate(now=Now()).first().now
        assert state.kind == "after"
        assert timedelta(seconds=6) < state.at - now <= timedelta(seconds=7)

    def test_an_earlier_due_time_is_kept(self, settings):
        settings.DJANGO_MQ = {"POLL_INTERVAL": 600}
        self.stuck(4)
        soon = add(after=60)
        assert queues.state("mail").at == soon.processable_after

    def test_each_priority_has_its_own(self):
        self.stuck(9, priority=5)
        add()
        assert queues.state("mail").kind == "processable"

    def test_expired_messages_are_examined_too(self):
        for _ in range(4):
            add(expires=-1)
        assert queues.state("mail").kind == "after"


def test_state_reads_by_its_indexes():
    """EXPLAIN: no plan walks the table, or the rows that are not due."""
    add()
    with connection.cursor() as cursor:
        cursor.execute(
            "insert into django_mq_queuedmessage"
            " (queue, type, payload, priority, processable_after, leased_until, claimed_by)"
            " select 'q' || n % 3, 't', '{}', n % 2, now() + interval '1 h',"
            "        case n % 7 when 0 then now() + interval '1 h' end,"
            "        case n % 7 when 0 then 'w:1' end"
            "   from generate_series(1, 3000) n"
        )
        cursor.execute("analyze django_mq_queuedmessage")
        cursor.execute(
            "explain (analyze, costs off, timing off) " + queue_state.STATE,
            {"queue": "q1", "queues": ["q1"], "skip_dead": False, "window": queue_state.WINDOW},
        )
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert "mq_claim" in plan
    assert "mq_lease" in plan
    assert "Seq Scan on django_mq_queuedmessage" not in plan
    assert "Rows Removed by Filter" not in plan


class TestPeek:
    def test_messages_by_queue_in_the_order_of_ids(self):
        """PMQ-17: the limit applies to all queues together."""
        ids = [add(queue).pk for queue in ("b", "a", "b", "c", "a")]
        found = queues.peek(limit=4)
        assert {queue: [each.pk for each in found[queue]] for queue in found} == {
            "b": [ids[0], ids[2]],
            "a": [ids[1]],
            "c": [ids[3]],
        }

    def test_one_queue(self):
        ids = [add(queue).pk for queue in ("b", "a", "b", "b")]
        assert [each.pk for each in queues.peek("b", limit=2)] == [ids[0], ids[2]]
        assert queues.peek("nothing") == []

    @pytest.mark.parametrize("window", [3, 4, 100])
    @pytest.mark.parametrize("skip_locked", [True, False])
    def test_dead_letters_in_front_hide_nothing(self, monkeypatch, lock, window, skip_locked):
        """Dead letters of all queues are looked for at the beginning of the table first."""
        monkeypatch.setattr(peek, "FIRST", window)
        insert_all([{"dead": -1}] * 3)
        leased, locked = add("a", leased=60), add("b")
        free = [add("b"), add("a")]
        lock(locked)
        found = queues.peek(limit=3, skip_locked=skip_locked)
        shown = sorted(each.pk for rows in found.values() for each in rows)
        every = free if skip_locked else [leased, locked, *free]
        assert shown == [each.pk for each in every][:3]

    @pytest.mark.parametrize("given", [{}, {"skip_locked": True}, {"dead": True}])
    def test_many_queues_cost_no_more(self, given):
        """With 2,000 it took 50 ms."""

        def rows(first: int, last: int) -> int:
            insert_all({"queue": f"q{n}"} for n in range(first, last))
            with pages_read() as read:
                assert queues.peek(limit=5, **given)
            return read.rows

        insert_all([{"dead": -1}] * 5)
        for n in range(100):
            decide(f"idle{n}")
        with connection.cursor() as cursor:  # like in a table larger than this one
            cursor.execute("set local enable_seqscan = off")
        few = rows(0, 10)
        assert rows(10, 400) <= few + 10

    def test_ten_by_default(self):
        for _ in range(11):
            add()
        assert len(queues.peek("mail")) == 10

    def test_of_a_longer_queue_the_first_of_each_kind(self):
        """Through one index per kind: none has the ids of a queue in order."""
        late, first = add(after=90), add(after=-90)
        blocked, leased = add(blocked_by=1, key="k"), add(leased=60)
        insert_all([{}] * 5)
        for limit, found in ((1, [first]), (2, [first, blocked]), (3, [first, blocked, leased])):
            assert queues.peek("mail", limit=limit) == found
        assert queues.peek("mail", limit=9)[0] == late

    def test_of_many_dead_letters_those_dead_longest(self):
        recent, old, older = add(dead=-1), add(dead=-60), add(dead=-90)
        assert queues.peek("mail", dead=True, limit=2) == [old, older]
        assert queues.peek(dead=True, limit=3) == {"mail": [recent, old, older]}

    def test_whatever_their_state(self):
        """CAR-41: state, attempts, due time and age of each."""
        add(after=60, attempts=2)
        add(leased=60)
        add(blocked_by=1, key="k")
        add(priority=9)
        add(dead=-1)
        found = queues.peek("mail")
        states = [each.state for each in found]
        assert states == ["retrying", "leased", "blocked", "processable"]
        assert found[0].attempts == 2
        assert found[0].created_at < found[0].processable_after

    def test_dead_letters_only_when_asked_for(self):
        add()
        dead = add(dead=-1)
        assert queues.peek(dead=True) == {"mail": [dead]}
        assert queues.peek("mail", dead=True) == [dead]

    def test_skip_locked_leaves_out_leased_and_locked_messages(self, lock):
        """PMQ-17: without it they are listed."""
        leased, locked, lapsed, waiting = add(leased=60), add(), add(leased=-1), add()
        lock(locked)
        assert queues.peek("mail") == [leased, locked, lapsed, waiting]
        assert queues.peek("mail", skip_locked=True) == [lapsed, waiting]
        assert queues.peek("mail", skip_locked=True, limit=1) == [lapsed]

    def test_it_leaves_nothing_locked(self, other):
        add()
        with transaction.atomic():
            queues.peek(skip_locked=True)
            other.execute("select id from django_mq_queuedmessage for update nowait")
            assert len(other.fetchall()) == 1

    def test_payloads_are_deferred_until_they_are_read(self):
        add(payload={"to": "ann"})
        [message] = queues.peek("mail")
        assert "payload" in message.get_deferred_fields()
        assert message.payload == {"to": "ann"}

    def test_bad_arguments(self):
        with pytest.raises(InvalidName):
            queues.peek("no such name")
        for limit in (0, True, 2.5, "5", 2**63):
            for dead in (False, True):
                with pytest.raises(ValueError, match="limit"):
                    queues.peek(limit=limit, dead=dead)
