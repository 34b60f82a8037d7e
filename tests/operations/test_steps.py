"""Operations act once on every matching message, in steps that any worker may continue."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import connection, transaction
from django.db.models.functions import Now
from django.utils import timezone

from django_mq import queues
from django_mq.executor.watchdog import Link
from django_mq.models import FailedAttempt, Operation, QueuedMessage
from django_mq.operations import steps
from django_mq.operations.filter_words import public_words
from django_mq.outbox import notify
from django_mq.policy.column_bounds import MAX_BIGINT
from django_mq.policy.message_filter import STATES, MessageFilter
from django_mq.policy.names import check_key
from django_mq.store import message_filters as filters
from django_mq.store import operations
from django_mq.worker.operation_runner import OperationRunner
from tests.database import listening, second_connection
from tests.rows import add, add_all, decide, insert_all, stored
from tests.test_docs import ROOT, snippets


def take_step():
    with transaction.atomic(), connection.cursor() as cursor:
        return steps.take_step(cursor)


def run_all():
    """Take steps as a worker would, until none is left."""
    count = 0
    while take_step() is not None:
        count += 1
    return count


def turn():
    """Take a worker's turn, on a separate thread like a worker."""
    freed = []
    runner = OperationRunner(
        "default",
        poll_interval=1.0,
        on_freed=lambda: freed.append(1),
        on_turn=lambda: None,
        link=Link(),
    )
    thread = threading.Thread(target=runner.take_turn)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    return len(freed)


@pytest.mark.django_db(transaction=True)
def test_with_parameters_that_the_server_binds(monkeypatch):
    """OPTIONS = {"server_side_binding": True}: each parameter has one type."""
    options = {**connection.settings_dict["OPTIONS"], "server_side_binding": True}
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    add()
    asked = queues.operate("cancel", queue="mail")
    turn()
    assert (stored(asked).state, stored(asked).done) == ("done", 1)
    assert not QueuedMessage.objects.exists()


class ReadsElsewhere:
    """A router that reads from a replica, which cannot be reached."""

    def db_for_read(self, model, **hints):
        return "replica"

    def db_for_write(self, model, **hints):
        return "default"


@pytest.mark.django_db
def test_an_operation_is_not_read_back_from_a_replica(settings):
    settings.DATABASE_ROUTERS = [ReadsElsewhere()]
    asked = queues.operate("cancel", queue="mail")
    assert (asked.pk is not None, asked.state) == (True, "waiting")


@pytest.mark.django_db
def test_five_thousand_messages_in_steps_and_later_ones_stay(caplog):
    boss = User.objects.create(username="ada")
    insert_all({"dead": -1} for _ in range(5000))
    others = [add(), add("other", dead=-1), add(leased=60)]
    made = queues.operate("requeue", queue="mail", by="ada", user_id=boss.pk, matched=5000)
    assert (made.state, made.started_at) == ("waiting", None)
    later = add(dead=-1)
    assert take_step() == (1000, True)
    assert (stored(made).state, made.done, made.after_id > 0) == ("running", 1000, True)
    caplog.set_level("INFO", "django_mq")
    assert run_all() == 5
    assert (stored(made).state, made.done, made.skipped) == ("done", 5000, 0)
    assert made.ended_at >= made.started_at
    assert list(QueuedMessage.objects.dead().order_by("pk")) == [others[1], later]
    entry = LogEntry.objects.get()
    assert (entry.user, entry.object_id) == (boss, str(made.pk))
    assert "5,000 changed" in entry.change_message
    assert "everything" not in entry.get_change_message()
    assert str(entry.object_repr).count("requeue") == 0
    events = [each for each in caplog.records if getattr(each, "event", "") == "operation_ended"]
    assert [each.done for each in events] == [5000]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("action", "columns", "rings"),
    [
        ("requeue", {"dead": -1}, [""]),
        ("run_now", {"after": 3600}, [""]),
        ("cancel", {"key": "k"}, [""]),
        ("discard", {"dead": -1}, []),
        ("requeue", {}, []),
    ],
)
def test_step_rings_for_messages_that_may_run_now(monkeypatch, action, columns, rings):
    """The worker that takes the step may serve different queues from those of the messages."""
    monkeypatch.setattr(notify, "_last", {})
    add(**columns)
    with listening() as bell:
        queues.operate(action, everything=True)
        bell.heard()
        turn()
        assert bell.heard() == rings


@pytest.mark.django_db
@pytest.mark.parametrize("user_id", ["", "99999", "no key"])
def test_the_user_may_be_gone(user_id):
    add(dead=-1)
    made = queues.operate("discard", everything=True, user_id=user_id)
    run_all()
    assert stored(made).state == "done"
    assert not QueuedMessage.objects.exists()
    assert not LogEntry.objects.exists()


@pytest.mark.django_db
def test_every_action_changes_its_eligible_messages():
    rows = ({}, {"after": 60}, {"held": -1}, {"dead": -1}, {"leased": 60}, {"blocked_by": 1})
    for action, done in (("run_now", 3), ("cancel", 4), ("requeue", 1), ("discard", 1)):
        QueuedMessage.objects.all().delete()
        for columns in rows:
            add(key="k" if "blocked_by" in columns else None, **columns)
        made = queues.operate(action, everything=True)
        run_all()
        assert (action, stored(made).done) == (action, done)
        assert QueuedMessage.objects.filter(leased_until__isnull=False).count() == 1


@pytest.mark.django_db
def test_a_cancelled_operation_stops_where_it_is(caplog):
    insert_all({"dead": -1} for _ in range(1500))
    made = queues.operate("discard", everything=True)
    take_step()
    caplog.set_level("INFO", "django_mq")
    assert queues.cancel_operation(made.pk)
    assert not queues.cancel_operation(made.pk)
    assert run_all() == 0
    assert (stored(made).state, made.done) == ("cancelled", 1000)
    assert queues.operations() == [made]
    [event] = [each for each in caplog.records if getattr(each, "event", "") == "operation_ended"]
    assert (event.action, event.state, event.done, event.skipped) == (
        "discard",
        "cancelled",
        1000,
        0,
    )


@pytest.mark.django_db(transaction=True)
def test_step_of_a_dying_worker_is_undone_and_repeated():
    """No step is half done, and no message is acted on twice."""
    insert_all({"dead": -1, "attempts": 3, "max_attempts": 3} for _ in range(2500))
    made = queues.operate("requeue", everything=True)
    take_step()
    with transaction.atomic():
        with connection.cursor() as cursor:
            steps.take_step(cursor)
            pid = connection.connection.info.backend_pid
        with second_connection() as other:  # no other worker finds it in the meantime
            assert (
                other.execute(
                    "select id from django_mq_operation for update skip locked"
                ).fetchall()
                == []
            )
            other.execute("select pg_terminate_backend(%s, 60000)", [pid])
        transaction.set_rollback(True)
        connection.close_if_unusable_or_obsolete()
    connection.close()
    assert stored(made).done == 1000
    assert turn() == 2
    assert (stored(made).state, made.done, made.skipped) == ("done", 2500, 0)
    assert set(QueuedMessage.objects.values_list("max_attempts", flat=True)) == {4}


@pytest.mark.django_db(transaction=True)
def test_a_locked_message_is_skipped_and_the_rest_done():
    held, free = add(dead=-1), add(dead=-1)
    made = queues.operate("discard", everything=True)
    with second_connection() as other, other.transaction():
        other.execute("select 1 from django_mq_queuedmessage where id = %s for update", [held.pk])
        turn()
    assert (stored(made).state, made.done, made.skipped) == ("done", 1, 1)
    assert QueuedMessage.objects.get() == held
    assert not QueuedMessage.objects.filter(pk=free.pk).exists()


@pytest.mark.django_db(transaction=True)
def test_an_operation_that_the_database_refuses_fails_alone(monkeypatch):
    add(dead=-1)
    bad = queues.operate("discard", everything=True)
    good = queues.operate("requeue", everything=True)

    def refuse(cursor, ids):
        cursor.execute("select 1 / 0")

    monkeypatch.setitem(steps.CHANGES, "discard", refuse)
    turn()
    assert stored(bad).state == "failed"
    assert "division by zero" in bad.error
    assert (stored(good).state, good.done) == ("done", 1)


@pytest.mark.django_db(transaction=True)
def test_an_action_of_a_newer_version_is_left_to_its_workers(monkeypatch):
    add(dead=-1)
    newer = queues.operate("discard", everything=True)
    known = queues.operate("requeue", everything=True)
    monkeypatch.delitem(steps.CHANGES, "discard")
    turn()
    assert (stored(newer).state, stored(known).state, known.done) == ("waiting", "done", 1)
    with connection.cursor() as cursor:
        assert not operations.any_open(cursor, steps.CHANGES)
        assert operations.any_open(cursor, ["discard"])


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"queue": ["mail"]}, "its filter cannot be read: a filter of messages has no 'queue'"),
        ({"path": 5, "at_path": "x"}, "its filter cannot be read: 5 is not a path that"),
    ],
)
def test_a_filter_that_cannot_be_read_fails_alone(bad, text):
    """Other programs also write rows."""
    add(dead=-1)
    made = queues.operate("discard", everything=True)
    later = queues.operate("requeue", everything=True)
    Operation.objects.filter(pk=made.pk).update(filter=bad)
    turn()
    assert (stored(made).state, made.error[: len(text)]) == ("failed", text)
    assert (stored(later).state, later.done) == ("done", 1)


@pytest.mark.django_db(transaction=True)
def test_counts_at_the_end_of_their_columns_block_no_operation():
    """Other programs also write rows, and steps take the oldest operation."""
    add(dead=-1)
    locked = add(dead=-1)
    made = queues.operate("requeue", everything=True)
    later = queues.operate("discard", everything=True)
    Operation.objects.filter(pk=made.pk).update(done=MAX_BIGINT, skipped=MAX_BIGINT)
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuedmessage where id = %s for update", [locked.pk])
        turn()
    assert (stored(made).state, made.done, made.skipped) == ("done", MAX_BIGINT, MAX_BIGINT)
    assert stored(later).state == "done"


@pytest.mark.django_db
def test_the_smallest_ids_block_no_operation():
    """Guarantee 24."""
    made = queues.operate("requeue", everything=True)
    Operation.objects.filter(pk=made.pk).update(id=-MAX_BIGINT - 1, last_id=-MAX_BIGINT - 1)
    run_all()
    assert Operation.objects.get().state == "done"


@pytest.mark.django_db
@pytest.mark.parametrize("error", [TypeError, KeyError, AttributeError, RecursionError])
def test_whatever_a_filter_raises_ends_its_operation_alone(monkeypatch, error):
    """Steps take the oldest operation: one that raised every time would block all the others."""

    def refuse(value):
        raise error("no filter")

    made = queues.operate("discard", everything=True)
    monkeypatch.setattr(MessageFilter, "from_json", refuse)
    assert take_step() == (0, False)
    assert (stored(made).state, take_step()) == ("failed", None)


@pytest.mark.django_db
def test_a_page_looks_at_a_bounded_range(monkeypatch):
    monkeypatch.setattr(filters, "WINDOW", 7)
    rows = add_all({"type": "b" if n % 10 == 9 else "a"} for n in range(30))
    wanted = MessageFilter(type="b")
    after, found, pages = 0, [], 0
    with connection.cursor() as cursor:
        while after is not None:
            page = filters.page(
                cursor, wanted, action="cancel", after=after, last=rows[-1].pk, limit=9
            )
            found, after, pages = [*found, *page.ids], page.after, pages + 1
            assert len(page.ids) <= 1
    assert found == [row.pk for row in rows if row.type == "b"]
    assert pages == 5


def line(key, *, count=3, **head):
    """Add a head, and messages that wait behind it."""
    first = add(key=key, attempts=3, max_attempts=3, **head)
    insert_all({"key": key, "blocked_by": first.pk} for _ in range(count))
    return first


@pytest.mark.django_db
@pytest.mark.parametrize("action", ["requeue", "discard"])
def test_an_action_on_heads_frees_the_lines(action):
    """Each dead head is changed once, regardless of the number of followers and steps."""
    long, short, retrying, alone = (
        line("long", dead=-1, count=2500), line("short", dead=-1), line("c", after=60),
        add(dead=-1),
    )  # fmt: skip
    made = queues.operate(action, queue="mail", state="blocked", heads=True)
    assert run_all() > 2
    assert (stored(made).state, made.done, made.skipped) == ("done", 2, 0)
    dead = set(QueuedMessage.objects.dead().values_list("pk", flat=True))
    assert dead == {alone.pk}
    if action == "requeue":
        assert stored(long).max_attempts == stored(short).max_attempts == 4
    assert stored(retrying).state == "retrying"


@pytest.mark.django_db
def test_a_head_that_dies_again_is_not_requeued_again():
    head = line("k", dead=-1, count=1500)
    made = queues.operate("requeue", heads=True, state="blocked")
    take_step()
    QueuedMessage.objects.filter(pk=head.pk).update(dead_at=Now(), dead_reason="exhausted")
    run_all()
    assert (stored(made).done, stored(head).state) == (1, "dead")


@pytest.mark.django_db
def test_a_head_in_an_ordered_queue(settings):
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"ordered": True}}}
    head = add(ordered=True, dead=-1)
    add(ordered=True)
    queues.operate("discard", queue="mail", state="processable", heads=True)
    run_all()
    assert not QueuedMessage.objects.filter(pk=head.pk).exists()
    assert QueuedMessage.objects.count() == 1


def matching(**given):
    with connection.cursor() as cursor:
        found = set()
        for action in ("cancel", "discard"):
            wanted = MessageFilter.from_json(MessageFilter(**given).as_json())
            last = filters.last_id(cursor)
            page = filters.page(cursor, wanted, action=action, after=0, last=last, limit=1000)
            assert filters.count(cursor, wanted, action=action, last=last) == len(page.ids)
            found.update(page.ids)
    return found


@pytest.mark.django_db
def test_states_are_those_that_people_read():
    decide("paused", paused=-1), decide("backs-off", backoff=60), decide("late", until=-1)
    for queue in ("mail", "paused", "backs-off", "late"):
        for columns in ({}, {"after": 60}, {"attempts": 2}, {"held": -1}, {"expires": -1}):
            for more in ({}, {"dead": -1}, {"leased": 60}, {"blocked_by": 1, "after": 60}):
                add(queue, **{**columns, **more})
        add(queue, after=60, attempts=2)
    for state in STATES - {"in_flight", "leased", "running"}:
        expected = set(QueuedMessage.objects.in_state(state).values_list("pk", flat=True))
        assert expected
        assert (state, matching(state=state)) == (state, expected)
    assert matching(state="leased") == matching(state="in_flight") == set()


@pytest.mark.django_db
def test_every_condition_narrows():
    given = {"handler": "h", "type": "a.b", "key": "k", "unique_id": "u", "blocked_by": 7}
    given |= {"priority": -3}
    mine = add(
        **given,
        metadata={"a": 1, "b": {"c": [1, 2]}},
        payload={"user": {"id": 7}},
        last_error="ValueError: no",
        created=-3600,
        after=-3600,
    )
    other = add("other", type="c.d", metadata={"a": 2})
    FailedAttempt.objects.create(message_id=mine.pk, queue="mail", type="a", attempt=1)
    fingerprint = FailedAttempt.objects.get().fingerprint
    hour = timezone.now() - timedelta(minutes=30)
    for more in (
        *({name: value} for name, value in given.items()),
        {"queues": ("mail",)},
        {"id": mine.pk},
        {"fingerprint": fingerprint},
        {"until": hour},
        {"due_until": hour},
        {"type": "a.*"},
        {"error_class": "ValueError"},
        {"path": ("payload", "user", "id"), "at_path": "7"},
        {"path": ("metadata", "b", "c", "1"), "at_path": "2"},
        {"metadata": {"b": {"c": [2]}}},
        *({"search": each} for each in ("a.b", "k", "u", str(mine.pk))),
    ):
        assert (more, matching(**more)) == (more, {mine.pk})
    assert matching(since=hour) == matching(due_since=hour) == {other.pk}
    assert matching(worker="w") == matching(dead_since=hour) == matching(dead_until=hour) == set()
    assert matching() == {mine.pk, other.pk}
    assert matching(queues=()) == set()


@pytest.mark.parametrize("key", ["a\u00a0b", "\U0001f469\u200d\U0001f4bb", "\u3000"], ids=ascii)
def test_a_filter_has_every_key_that_a_message_can_have(key):
    wanted = MessageFilter(key=check_key(key, "key"))
    assert MessageFilter.from_json(wanted.as_json()) == wanted
    assert len(public_words({"key": "a\u2028b"}).splitlines()) == 1  # it is logged


@pytest.mark.parametrize(
    "bad",
    [
        {"state": "gone"},
        {"fingerprint": "x"},
        {"id": 0},
        {"priority": "3"},
        {"priority": 2**15},
        {"queues": "mail"},
        {"since": "yesterday"},
        {"path": ["payload", "a"]},
        {"path": ["id", "a"], "at_path": "1"},
        {"path": [], "at_path": "1"},
        *({"path": each, "at_path": "1"} for each in (5, 1.5, True, {}, {"a": 1}, "payload")),
        {"path": [["payload"]], "at_path": "1"},
        {"type": "a\x00"},
        {"key": "a\nb"},
        {"key": "\ud800"},
        {"heads": False},
        {"else": 1},
        [],
    ],
)
def test_a_filter_is_checked(bad):
    with pytest.raises(ValueError, match=r"."):
        MessageFilter.from_json(bad)


@pytest.mark.django_db
def test_invalid_operation_is_refused():
    with pytest.raises(ValueError, match="there is no action"):
        queues.operate("drop")
    with pytest.raises(ValueError, match="not both"):
        queues.operate("cancel", MessageFilter(), queue="mail")
    with pytest.raises(ValueError, match="not an action on heads"):
        queues.operate("cancel", heads=True)


@pytest.mark.django_db
@pytest.mark.parametrize("given", [{}, {"queue": None, "type": None}, {"heads": True}], ids=str)
def test_action_on_every_message_must_be_explicit(django_assert_num_queries, given):
    """A variable that happens to be None is no reason to discard all dead letters."""
    with django_assert_num_queries(0), pytest.raises(TypeError, match="everything=True"):
        queues.operate("discard", **given)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("given", "by", "filter"),
    [
        ({"queue": "mail", "state": "dead", "by": "ada"}, "ada", "state dead, queue mail"),
        ({"everything": True}, "", "no filter"),
        ({"metadata": {"patient": "Q4711"}}, "", "metadata ..."),
    ],
)
def test_operation_is_logged_with_user_and_filter(caplog, given, by, filter):
    """Without values of payloads and metadata; in the order of jsonb."""
    caplog.set_level("INFO", "django_mq")
    made = queues.operate("requeue", **given)
    [record] = [each for each in caplog.records if each.event == "operation_asked_for"]
    name = f" by {by}" if by else ""
    assert record.getMessage() == (
        f"operation {made.pk}: requeue requested{name} for all messages that match ({filter})"
    )
    assert (record.by, record.filter) == (by, filter)
    assert "Q4711" not in str(vars(record))


@pytest.mark.django_db
def test_everything_is_no_filter_and_goes_with_none():
    assert stored(queues.operate("discard", everything=True)).filter == {}
    assert stored(queues.operate("discard", everything=True, heads=True)).filter == {"heads": True}
    assert stored(queues.operate("discard", MessageFilter())).filter == {}  # the admin's
    for wanted, given in ((None, {"queue": "mail"}), (MessageFilter(), {})):
        with pytest.raises(ValueError, match=r"everything=True.*not both"):
            queues.operate("discard", wanted, everything=True, **given)
    with pytest.raises(ValueError, match="everything must be True or False"):
        queues.operate("discard", everything="yes")
    with pytest.raises(TypeError, match="everything=True"):
        queues.operate("discard", everything=False)


@pytest.mark.django_db
def test_the_page_of_operating_has_an_example_that_runs():
    names = {}
    (code,) = [each for each in snippets(ROOT / "docs/operating.md", "python") if "operate" in each]
    exec(code, names)  # noqa: S102
    assert stored(names["operation"]).filter == {"queues": ["mail"], "handler": "shop.mail"}
