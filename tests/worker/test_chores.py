"""Chores as a worker runs them: turns, and log lines."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from django_mq.conf import get_settings
from django_mq.executor.statements import Statements
from django_mq.models import Operation, QueuedMessage, QueueState, UniqueKey, WorkerHeartbeat
from django_mq.states import GONE_AFTER
from django_mq.store import Cursor
from django_mq.worker import chores, expiring, retention
from tests.database import listening, second_connection
from tests.rows import add, beat, columns, stored
from tests.worker.conftest import Said

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def cursor(transactional_db: None) -> Iterator[Cursor]:
    statements = Statements("default", limits=chores.LIMITS)
    yield statements.cursor()
    statements.close()


def turn(cursor: Cursor) -> None:
    """Make the next turn of the fleet due now."""
    QueueState.objects.update(chores_ran_at=None)
    chores.run(cursor, get_settings())


def warnings(said: Said) -> list[tuple[str, int, int]]:
    return [
        (data["queue"], data["depth"], data["warn_depth"])
        for name, _, data in said.all
        if name == "queue_deep"
    ]


def test_deep_queue_is_logged_once(cursor: Cursor, said: Said, settings: Any, caplog: Any) -> None:
    """CAR-38: by one of the fleet, once per warn_every, even if the depth fell in between."""
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"warn_depth": 2, "warn_every": 3600}}}
    rows = [add() for _ in range(2)]
    add("post")
    turn(cursor)
    assert warnings(said) == []
    rows += [add(after=60), add(blocked_by=rows[0].pk, key="k")]
    chores.run(cursor, get_settings())  # a sibling has just done the chores
    assert warnings(said) == []
    turn(cursor)
    turn(cursor)
    assert warnings(said) == [("mail", 4, 2)]
    [line] = [each for each in caplog.records if getattr(each, "event", "") == "queue_deep"]
    assert (line.levelname, line.queue) == ("WARNING", "mail")
    assert "4 waiting messages" in line.getMessage()
    for row in rows[:3]:
        row.delete()
    turn(cursor)
    rows = [add() for _ in range(5)]
    turn(cursor)
    assert len(warnings(said)) == 1
    QueueState.objects.update(warned_at=columns({"created": -3700})["created_at"])
    turn(cursor)
    assert warnings(said)[1:] == [("mail", 6, 2)]


def test_the_default_is_a_thousand_and_nothing_is_never(
    cursor: Cursor, said: Said, settings: Any
) -> None:
    """CAR-38: a queue that the settings do not list has the defaults; 0 turns the warning off."""
    settings.DJANGO_MQ = {"QUEUES": {"quiet": {"warn_depth": 0}}}
    for queue, count in (("mail", 1000), ("quiet", 1500)):
        cursor.execute(
            "insert into django_mq_queuedmessage (queue, type, payload)"
            " select %s, 't', '{}' from generate_series(1, %s)",
            [queue, count],
        )
    turn(cursor)
    assert warnings(said) == []
    add()
    turn(cursor)
    assert warnings(said) == [("mail", 1001, 1000)]


def test_a_large_number_is_not_counted_out(
    cursor: Cursor, said: Said, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(chores, "MAX_COUNTED", 1200)
    cursor.execute(
        "insert into django_mq_queuedmessage (queue, type, payload)"
        " select 'mail', 't', '{}' from generate_series(1, 1500)"
    )
    turn(cursor)
    assert warnings(said) == [("mail", 1200, 1000)]
    assert "at least 1,200 waiting messages" in caplog.text


# ---- in pieces, and side by side


def small(monkeypatch: pytest.MonkeyPatch, name: str, pieces: int = 1) -> None:
    """Limit a piece to two rows."""
    monkeypatch.setattr(chores, "PIECE_ROWS", 2)
    monkeypatch.setitem(chores.CHORES, name, chores.CHORES[name]._replace(pieces=pieces))


def test_walk_resumes_where_the_fleet_stopped(
    cursor: Cursor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker with the next turn continues; at the end the walk starts again."""
    small(monkeypatch, "stranded")
    ahead = [add(key=f"a{n}", handler="h", after=60) for n in range(4)]
    for n, each in enumerate(ahead):
        add(key=f"a{n}", handler="h", blocked_by=each.pk)
    lost = [add(key=f"b{n}", handler="h", blocked_by=2**40 + n) for n in range(3)]
    freed = []
    for _ in range(5):
        with second_connection() as other:
            turn(other.cursor())
        freed.append(sum(stored(each).blocked_by is None for each in lost))
    assert freed == [0, 0, 2, 3, 3]
    again = add(key="c", handler="h", blocked_by=1)
    for _ in range(3):
        turn(cursor)
    assert stored(again).blocked_by is None


def test_put_aside_messages_are_promoted_in_pieces(
    cursor: Cursor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that others wrote badly stop only themselves."""
    small(monkeypatch, "aside")
    aside = {
        "payload": {}, "metadata": {}, "schema_version": 1, "max_attempts": 1, "priority": 0,
        "wants_result": False, "ordered": False,
    }  # fmt: skip
    for n in range(5):
        UniqueKey.objects.create(
            queue="mail", type="t", unique_id=str(n), put_aside={} if n == 3 else aside
        )
    counts = []
    for _ in range(3):
        turn(cursor)
        counts.append(QueuedMessage.objects.count())
    assert counts == [2, 4, 5]  # missing members have defaults
    assert not UniqueKey.objects.filter(put_aside__isnull=False).exists()


def test_the_log_names_no_attempt_of_a_message_that_expired(
    cursor: Cursor, caplog: pytest.LogCaptureFixture
) -> None:
    message = add(type="a", handler="h", expires=-1)
    turn(cursor)
    [record] = [each for each in caplog.records if each.event == "message_dead"]  # type: ignore[attr-defined]
    assert record.getMessage() == (
        f"message {message.pk} (a, queue mail, handler h) is dead: expired"
    )
    assert record.attempt is None  # type: ignore[attr-defined]


def test_all_that_expired_dies_in_pieces(
    cursor: Cursor, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """Those in flight, of which more expired than fit into a piece, are passed over."""
    monkeypatch.setattr(expiring, "PIECE_MESSAGES", 2)
    monkeypatch.setattr(expiring, "WALKED_ROWS", 3)
    at = QueuedMessage.objects.get(pk=add(expires=-60).pk).expires_at
    flying = [add(expires=-70, leased=60, attempts=1) for _ in range(4)]
    waiting = [add(expires=-60 + n) for n in range(5)]
    QueuedMessage.objects.filter(pk__in=[each.pk for each in flying]).update(expires_at=at)
    turn(cursor)
    turn(cursor)
    assert all(stored(each).dead_reason == "expired" for each in waiting)
    assert not any(stored(each).dead_at for each in flying)
    assert said.count("message_dead") == 6


def test_no_message_in_flight_keeps_a_walk_where_it_is(
    cursor: Cursor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk that stays there passes over all that died behind it, in each piece."""
    monkeypatch.setattr(expiring, "PIECE_MESSAGES", 1)
    monkeypatch.setattr(expiring, "WALKED_ROWS", 3)
    add(expires=-70, leased=60, attempts=1)
    waiting = [add(expires=-60 + n) for n in range(2)]
    flying = [add(expires=-50 + n, leased=60, attempts=1) for n in range(3)]
    last = add(expires=-40)
    times = [stored(each).expires_at for each in (waiting[1], flying[2])]
    positions, at = [], None
    while (at := expiring.expire(cursor, get_settings(), at)) is not None:
        positions.append(datetime.fromisoformat(at))
    assert positions[:2] == times
    assert stored(last).dead_reason == "expired"


def test_expiry_scan_resumes_behind_dead_messages(
    cursor: Cursor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a session holds a snapshot, the index keeps entries of all that expired since then."""
    monkeypatch.setattr(expiring, "PIECE_MESSAGES", 1)
    add(expires=-70, leased=60, attempts=1)  # passed over
    first, *others = [add(expires=-60 + n) for n in range(3)]
    at = expiring.expire(cursor, get_settings(), None)
    assert stored(first).dead_reason == "expired"
    older = add(expires=-90)
    while at is not None:
        at = expiring.expire(cursor, get_settings(), at)
    assert [stored(each).dead_reason for each in (*others, older)] == ["expired", "expired", ""]
    expiring.expire(cursor, get_settings(), None)
    assert stored(older).dead_reason == "expired"


def test_locked_unique_id_keeps_no_other_message_alive(
    cursor: Cursor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own message expires once the id is free again."""
    monkeypatch.setattr(expiring, "PIECE_MESSAGES", 1)
    monkeypatch.setattr(expiring, "WALKED_ROWS", 1)
    taken = add(expires=-60, unique_id="u")
    other = add(expires=-50)
    UniqueKey.objects.create(queue="mail", type=taken.type, unique_id="u", message_id=taken.pk)
    with second_connection() as somebody, somebody.transaction(force_rollback=True):
        somebody.execute("select from django_mq_uniquekey for update")
        turn(cursor)
        assert stored(other).dead_reason == "expired"
        assert stored(taken).dead_at is None
    turn(cursor)
    turn(cursor)
    assert stored(taken).dead_reason == "expired"


def test_a_chore_that_fails_stops_no_other(
    cursor: Cursor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee 24; a locked table counts, too."""
    beat("old", seen=-3600)

    def fail(*args: Any) -> Any:
        raise ValueError("no")

    monkeypatch.setitem(chores.CHORES, "expire", chores.Chore(fail, 1))
    with second_connection() as somebody, somebody.transaction(force_rollback=True):
        somebody.execute("lock table django_mq_uniquekey")
        turn(cursor)
    assert not WorkerHeartbeat.objects.exists()
    [line] = [each for each in caplog.records if getattr(each, "event", "") == "chore_failed"]
    assert "chore expire failed" in line.getMessage()


@pytest.mark.parametrize("how", ["expired", "forgotten", "stranded"])
def test_chore_that_frees_a_message_rings(cursor: Cursor, settings: Any, how: str) -> None:
    """The chores have a separate thread: no loop sees the freed messages, here or elsewhere."""
    mail = {"on_dead_head": "skip", "dead_retention": 60}
    settings.DJANGO_MQ = {"QUEUES": {"mail": mail}}
    if how == "expired":
        head = add(key="k", after=3600, expires=-1).pk
    elif how == "forgotten":
        head = add(key="k", dead=-3600).pk
    else:
        head = 2**40  # somebody deleted it
    follower = add(key="k", blocked_by=head)
    with listening() as bell:
        turn(cursor)
        assert "" in bell.heard()
    assert stored(follower).blocked_by is None


def test_a_dead_head_that_is_forgotten_frees_its_line_at_once(
    cursor: Cursor, settings: Any
) -> None:
    """It does not take another turn, in which the walk over blocked rows would find it."""
    settings.DJANGO_MQ = {"DEAD_RETENTION": 60}
    head = add(key="k", dead=-3600)
    follower = add(key="k", blocked_by=head.pk)
    turn(cursor)
    assert not QueuedMessage.objects.filter(pk=head.pk).exists()
    assert stored(follower).blocked_by is None


def test_old_dead_letters_are_looked_for_behind_those_removed_before(
    cursor: Cursor, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    """While a session holds a snapshot, the index keeps entries of all dead letters until then."""
    settings.DJANGO_MQ = {"DEAD_RETENTION": 60}
    monkeypatch.setattr(retention, "PIECE_ROWS", 1)
    monkeypatch.setattr(chores, "PIECE_ROWS", 1)
    piece = chores.CHORES["dead"].piece
    for queue in "ab":
        for seconds in (-100, -90):
            add(queue, dead=seconds)
    # A piece that resumes in a queue does not look for others: that walks over what was removed.
    assert piece(cursor, get_settings(), ["a", "infinity"]) == "a"
    at = piece(cursor, get_settings(), None)
    older = add("a", dead=-200)
    while at is not None:
        at = piece(cursor, get_settings(), at)
    assert list(QueuedMessage.objects.values_list("pk", flat=True)) == [older.pk]
    assert piece(cursor, get_settings(), "a") is None  # the position of other code
    piece(cursor, get_settings(), None)
    assert not QueuedMessage.objects.exists()


def test_ended_operations_have_the_retention_of_failed_attempts(
    cursor: Cursor, settings: Any
) -> None:
    ended = columns({"created": -100})["created_at"]
    Operation.objects.create(action="cancel", filter={}, last_id=1, state="done", ended_at=ended)
    for seconds, left in ((None, 1), (200, 1), (50, 0)):
        settings.DJANGO_MQ = {"ATTEMPT_RETENTION": seconds}
        turn(cursor)
        assert Operation.objects.count() == left


def test_a_worker_that_is_gone_is_shown_for_a_while(cursor: Cursor) -> None:
    for name, times in (("gone", 3), ("longer-gone", 5)):
        beat(name, seen=-times * GONE_AFTER.total_seconds())
    turn(cursor)
    assert WorkerHeartbeat.objects.get().pk == "gone"


def test_chores_that_free_nothing_are_quiet(cursor: Cursor) -> None:
    add(expires=-1)
    with listening() as bell:
        turn(cursor)
        assert bell.heard() == []
