"""The loop and its parts, before the threads run: the loop's wakeups, and its actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from django_mq import handler
from django_mq.executor.lease_clock import lease_clock
from django_mq.executor.tasks import Task
from django_mq.messages import LONG_AGO, Delivery, Fence
from django_mq.models import QueuedMessage
from django_mq.store import Cursor, settle
from django_mq.store.server_errors import LOST
from django_mq.worker import Worker, dispatch, fetcher, lapsed_fetcher, unstarted
from django_mq.worker.parts import Parts
from django_mq.worker.run import Run
from django_mq.worker.unstarted import Unstarted
from tests.database import second_connection
from tests.rows import add, stored

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def run() -> Iterator[Run]:
    @handler("#", queue="mail", name="h")
    def h(delivery: Delivery) -> None: ...

    run = Run(Worker(queues=["mail"]))
    run.parts.fetcher.fetch(run.parts.statements.cursor())
    yield run
    run.parts.statements.close()


@pytest.fixture
def parts(run: Run) -> Parts:
    return run.parts


def test_executors_are_woken_for_messages_only(
    run: Run, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty put would wake them on each turn of the loop."""
    put: list[Any] = []
    monkeypatch.setattr(parts.local_queue, "put", lambda tasks, **_: put.append(tasks))
    run._fetch()
    assert put == []
    add(handler="h")
    parts.wakeup.ring()
    run._fetch()
    run._fetch()
    assert [len(tasks) for tasks in put] == [1]


@pytest.mark.parametrize("taken_over", [False, True])
@pytest.mark.parametrize("name", ["h", ""], ids=["named", "routed"])
def test_a_claimed_delivery_knows_when_its_claim_was_sent(
    run: Run, parts: Parts, monkeypatch: pytest.MonkeyPatch, name: str, taken_over: bool
) -> None:
    """Except for one that was taken over: its last handler may still run somewhere."""
    add(handler=name)
    taken: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            parts.intake, "take", lambda cursor, rows, **given: taken.append((cursor, rows, given))
        )
        parts.wakeup.ring()
        before = lease_clock()
        run._fetch()
    ((cursor, rows, given),) = taken
    parts.intake.take(cursor, rows, **{**given, "taken_over": taken_over})
    slice_ = parts.local_queue.take()
    assert slice_ is not None
    [delivery] = [task.delivery for task in slice_.tasks]
    asked_at = delivery._asked_at
    assert asked_at == LONG_AGO if taken_over else before <= asked_at <= lease_clock()
    assert parts.local_queue.unsettled.all() == [delivery]  # renewals reach the one that runs


def test_a_renewal_lets_no_message_that_was_taken_over_start_unlocked(
    run: Run, parts: Parts
) -> None:
    """Its last handler may still run, however new its lease is."""
    claimed, taken_over = add(handler="h"), add(handler="h", leased=-60, attempts=1)
    deliveries = {task.delivery.id: task.delivery for task in claim(run, 2)}
    before = lease_clock()
    try:
        parts.lease_keeper._renew()
    finally:
        parts.lease_keeper._statements.close()
    assert deliveries[claimed.pk]._leased_at >= before
    assert deliveries[taken_over.pk]._leased_at == LONG_AGO


def test_a_message_needs_its_lock_after_half_of_the_shortest_lease(settings: Any) -> None:
    """A process that was frozen starts no message that has lapsed, however short its lease."""
    settings.DJANGO_MQ = {"QUEUES": {"quick": {"lease": 0.2}}}
    [executor, *_] = Run(Worker(queues=["mail"])).parts.executors
    assert executor._context.unlocked_for == 0.1


def test_the_loop_is_woken_for_room_only_where_it_waits_for_it(run: Run, parts: Parts) -> None:
    """NSQ-24: it claims again as soon as there is room, and sleeps after it took all there was."""

    def woken() -> bool:
        return not parts.wakeup._quiet.locked()

    add(handler="h")
    parts.wakeup.ring()
    run._fetch()
    parts.wakeup.sleep(0)
    assert parts.local_queue.take() is not None
    assert not woken()
    parts.prefetch.reset()
    for _ in range(2):
        add(handler="h")
    parts.wakeup.ring()
    while parts.local_queue.waiting() == 0:
        run._fetch()
    run._fetch()
    parts.wakeup.sleep(0)
    assert parts.local_queue.take() is not None
    assert woken()


@pytest.mark.parametrize("before", ["a ring", "unconfirmed", "a level to write", "one held"])
def test_a_ring_is_claimed_for_first_unless_something_must_come_before(
    run: Run, parts: Parts, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """A producer waits for the claim. But a queue that must back off is not claimed from first."""
    idle: list[bool] = []
    start_or_release = run.unstarted.start_or_release
    for _ in range(3):
        run._fetch()

    def spy(cursor: Any) -> None:
        idle.append(parts.local_queue.idle())
        start_or_release(cursor)

    monkeypatch.setattr(run.unstarted, "start_or_release", spy)
    if before == "unconfirmed":
        run.unstarted.add_unconfirmed(["w:1"], lost=True)
    elif before == "a level to write":
        monkeypatch.setattr(parts.backoffs, "has_pending", lambda: not idle)
        monkeypatch.setattr(parts.backoffs, "write", lambda cursor: None)
    elif before == "one held":
        add(handler="h")
        parts.wakeup.ring()
        while parts.local_queue.waiting() == 0:
            run._fetch()
        run._fetch()
        idle.clear()
    parts.wakeup.ring()
    run._fetch()
    assert len(idle) == (before != "a ring")
    parts.wakeup.ring()
    run._fetch()
    assert len(idle) == 1 + (before != "a ring")  # rings of many producers come without end


def test_a_round_without_an_answer_does_not_end_an_outage(
    run: Run, parts: Parts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An executor met it: a loop that asks the server nothing does not know that it is over."""
    caplog.set_level("INFO", logger="django_mq")
    parts.giving_up.set()  # nobody waits
    parts.outage.wait(psycopg.OperationalError("gone"))
    with monkeypatch.context() as patch:
        patch.setattr(parts.fetcher, "fetch", lambda cursor: 1.0)
        patch.setattr(parts.scheduler, "poll", lambda cursor: 1.0)
        patch.setattr(parts.operation_runner, "poll", lambda cursor: 1.0)
        patch.setattr("django_mq.worker.run.poll.check_writes", lambda cursor: None)
        run._fetch()
    assert "database is back" not in caplog.text
    parts.fetcher.on_freed()
    run._fetch()
    assert "database is back" in caplog.text


def test_a_claim_that_commits_after_its_connection_was_lost_is_released(
    run: Run, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server still waited for a table that a migration had locked; one look came too early."""
    monkeypatch.setattr(unstarted, "LOOK_INTERVAL", 0.0)
    parts.claims.begin_round()
    name, other = parts.claims.next_claimer(), f"{run.id}:99"
    run._wait_out(psycopg.OperationalError("the connection was cut"))
    cursor = parts.statements.cursor()
    run.unstarted.start_or_release(cursor)
    late, settled_late = (add(handler="h", leased=30, attempts=1) for _ in range(2))
    for message, claimer in ((late, name), (settled_late, other)):
        QueuedMessage.objects.filter(pk=message.pk).update(claimed_by=claimer)
    assert run.unstarted.unconfirmed_due
    run.unstarted.start_or_release(cursor)
    assert (stored(late).attempts, stored(late).claimed_by) == (0, None)
    assert (stored(settled_late).attempts, stored(settled_late).claimed_by) == (1, other)
    now = unstarted.monotonic() + unstarted.UNCONFIRMED_SECONDS
    monkeypatch.setattr(unstarted, "monotonic", lambda: now)
    run.unstarted.start_or_release(cursor)
    assert not run.unstarted.unconfirmed_due


def test_a_lost_claim_is_looked_for_while_further_claims_are_lost(
    run: Run, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A COMMIT that waits for a synchronous standby has no limit; all of them wait for it."""
    parts.giving_up.set()  # nobody waits
    lost = psycopg.OperationalError("the connection was cut")
    parts.claims.begin_round()
    name = parts.claims.next_claimer()
    run._wait_out(lost)
    for _ in range(2):
        now = unstarted.monotonic() + 20
        monkeypatch.setattr(unstarted, "monotonic", lambda now=now: now)
        parts.claims.begin_round()
        parts.claims.next_claimer()
        run._wait_out(lost)
        run.unstarted.start_or_release(parts.statements.cursor())
    late = add(handler="h", leased=30, attempts=1)
    QueuedMessage.objects.filter(pk=late.pk).update(claimed_by=name)
    now = unstarted.monotonic() + 20
    monkeypatch.setattr(unstarted, "monotonic", lambda: now)
    run.unstarted.start_or_release(parts.statements.cursor())
    assert (stored(late).attempts, stored(late).claimed_by) == (0, None)


def test_while_commits_hang_lost_claims_are_looked_for(
    run: Run, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a synchronous standby, the claim commits minutes later, and nothing else is lost."""
    parts.giving_up.set()  # nobody waits
    parts.claims.begin_round()
    name = parts.claims.next_claimer()
    run._wait_out(psycopg.OperationalError("the connection was cut"))
    parts.lease_keeper.commits_hang = True
    cursor = parts.statements.cursor()
    for hang in (*[True] * 5, False):
        parts.lease_keeper.commits_hang = hang
        now = unstarted.monotonic() + 20
        monkeypatch.setattr(unstarted, "monotonic", lambda now=now: now)
        run.unstarted.start_or_release(cursor)
    late = add(handler="h", leased=-70, attempts=1)
    QueuedMessage.objects.filter(pk=late.pk).update(claimed_by=name)
    now = unstarted.monotonic() + 10
    monkeypatch.setattr(unstarted, "monotonic", lambda: now)
    run.unstarted.start_or_release(cursor)
    assert (stored(late).attempts, stored(late).claimed_by) == (0, None)
    now += unstarted.UNCONFIRMED_SECONDS
    run.unstarted.start_or_release(cursor)
    assert not run.unstarted.unconfirmed_due


@pytest.mark.parametrize("given", [{}, {"leased": -1, "attempts": 1}], ids=["due", "lapsed"])
def test_while_commits_hang_nothing_is_claimed_or_taken_over(
    run: Run, parts: Parts, monkeypatch: pytest.MonkeyPatch, given: dict[str, int]
) -> None:
    """No living process could renew its leases, and each claim would cost another connection."""
    message = add(handler="h", **given)
    before = message.attempts
    now = fetcher.monotonic()
    for module in (fetcher, lapsed_fetcher):
        monkeypatch.setattr(module, "monotonic", lambda: now)
    for hang in (True, True, False):
        parts.lease_keeper.commits_hang = hang
        for _ in range(3):
            now += fetcher.RENEWALS_AFTER_OUTAGE
            parts.wakeup.ring()
            run._fetch()
        assert stored(message).attempts == before + (not hang)


def test_claims_of_rounds_that_lack_a_right_are_not_looked_for_for_ever(
    run: Run, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right may be missing for days, with a claim in each round: the server answered them."""
    parts.giving_up.set()  # nobody waits
    run._worked = True
    names: list[str] = []
    for _ in range(20):
        now = unstarted.monotonic() + 5
        monkeypatch.setattr(unstarted, "monotonic", lambda now=now: now)
        parts.claims.begin_round()
        names.append(parts.claims.next_claimer())
        run._wait_out(psycopg.errors.InsufficientPrivilege("permission denied"))
        run.unstarted.start_or_release(parts.statements.cursor())
    assert set(run.unstarted._unconfirmed) <= set(names[-10:])


@contextmanager
def locked_row(message: QueuedMessage) -> Iterator[None]:
    """Within the block, another session has the row of `message` locked."""
    with second_connection() as other:
        other.execute("begin")
        other.execute("select from django_mq_queuedmessage where id = %s for update", [message.pk])
        yield
        other.execute("rollback")


def claim(run: Run, count: int) -> list[Task]:
    """Let `run` claim `count` messages; return their tasks, which do not start."""
    tasks: list[Task] = []
    while len(tasks) < count:
        run.parts.wakeup.ring()
        run._fetch()
        tasks += run.parts.local_queue.take_waiting()
    return tasks


@pytest.mark.parametrize("again", [Unstarted.start_or_release, Unstarted.release_all])
def test_a_locked_message_is_released_later(
    run: Run,
    parts: Parts,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    again: Callable[..., None],
) -> None:
    """A renewal whose COMMIT waits for a slow disk, or for a synchronous standby, has locked it."""
    locked = add(handler="h")
    tasks = claim(run, 1)
    cursor = parts.statements.cursor()
    with locked_row(locked):
        parts.dispatch.release(tasks)
        assert stored(locked).attempts == 1
        again(run.unstarted, cursor)  # still locked
    now = dispatch.monotonic() + dispatch.RECONNECT_WAIT
    monkeypatch.setattr(dispatch, "monotonic", lambda: now)
    assert run.unstarted.overdue
    again(run.unstarted, cursor)
    assert (stored(locked).attempts, stored(locked).leased_until) == (0, None)
    assert not run.unstarted.overdue
    assert not caplog.records


@pytest.mark.parametrize("again", [Unstarted.start_or_release, Unstarted.release_all])
def test_a_locked_message_does_not_cost_each_round_a_release(
    run: Run, parts: Parts, monkeypatch: pytest.MonkeyPatch, again: Callable[..., None]
) -> None:
    """While messages come and go, the loop has hundreds of rounds per second."""
    releases: list[int] = []
    release = settle.release

    def counted(cursor: Cursor, fences: Sequence[Fence]) -> set[int]:
        releases.append(len(fences))
        return release(cursor, fences)

    locked = add(handler="h")
    tasks = claim(run, 1)
    with locked_row(locked):
        parts.dispatch.release(tasks)
        monkeypatch.setattr(settle, "release", counted)
        now = dispatch.monotonic()
        monkeypatch.setattr(dispatch, "monotonic", lambda: now)
        for _ in range(2):
            now += dispatch.RECONNECT_WAIT
            for _ in range(10):
                again(run.unstarted, parts.statements.cursor())
    assert releases == [1, 1]


REFUSE = """
create function refuse() returns trigger language plpgsql as
$$ begin raise exception 'no' using errcode = 'check_violation'; end $$;
create trigger refuse before update on django_mq_queuedmessage
   for each row when (new.priority = 7 and new.leased_until is null) execute function refuse()
"""


def test_a_refused_message_does_not_keep_a_locked_one_from_its_release(
    run: Run, parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    """The locked one runs soon, and its attempt is refunded."""
    locked, refused = add(handler="h"), add(handler="h", priority=7)
    tasks = claim(run, 2)
    with second_connection() as other:
        other.execute(REFUSE)
        try:
            with locked_row(locked):
                parts.dispatch.release(tasks)
            assert [fence.id for fence in parts.dispatch.unreleased] == [locked.pk]
            parts.dispatch.release([])
        finally:
            other.execute("drop trigger refuse on django_mq_queuedmessage; drop function refuse")
    assert (stored(locked).attempts, stored(locked).leased_until) == (0, None)
    assert stored(refused).attempts == 1
    assert [each.getMessage().split(":")[0] for each in caplog.records] == [
        "could not release 1 message(s)"
    ]


def test_while_a_message_stays_locked_released_ones_are_forgotten(run: Run, parts: Parts) -> None:
    """Each statement names those that were taken over, and are still to release."""
    taken_over = {"leased": -60, "claimed_by": "gone:1", "attempts": 1}
    locked, free = (add(handler="h", **taken_over) for _ in range(2))
    tasks = claim(run, 2)
    with locked_row(locked):
        parts.dispatch.release(tasks)
        assert [fence.id for fence in parts.dispatch._lapsed_once] == [locked.pk]
    parts.dispatch.release([])
    assert not parts.dispatch._lapsed_once
    assert not any(stored(each).suspect for each in (locked, free))


@pytest.mark.parametrize("again", [Unstarted.start_or_release, Unstarted.release_all])
@pytest.mark.parametrize("lapsed", [False, True])
def test_a_release_that_the_database_lost_is_tried_again(
    run: Run, parts: Parts, lapsed: bool, again: Callable[[Unstarted, Cursor], None]
) -> None:
    """With a long lease, nobody would run the messages for as long; no suspect, it never ran."""
    taken_over = {"leased": -60, "claimed_by": "gone:1", "attempts": 1}
    message = add(handler="h", **(taken_over if lapsed else {}))
    parts.wakeup.ring()
    while parts.local_queue.waiting() == 0:
        run._fetch()
    with second_connection() as other:
        other.execute(
            "select pg_terminate_backend(%s)",
            [parts.statements.cursor().connection.info.backend_pid],
        )
    with pytest.raises(LOST) as lost:
        parts.dispatch.release(parts.local_queue.take_waiting())
    assert run.unstarted.overdue
    parts.giving_up.set()  # nobody waits
    run._wait_out(lost.value)
    assert stored(message).attempts == lapsed + 1
    again(run.unstarted, parts.statements.cursor())
    released = stored(message)
    assert (released.attempts, released.leased_until) == (int(lapsed), None)
    assert not released.suspect
    assert not parts.dispatch.unreleased


@pytest.mark.parametrize("too_long", [False, True])
def test_messages_prefetched_for_too_long_are_released(
    run: Run, parts: Parts, monkeypatch: pytest.MonkeyPatch, too_long: bool
) -> None:
    """Fast messages had taught it to hold many: it starts small again, and rings for the others."""
    message = add(handler="h")
    parts.wakeup.ring()
    while parts.local_queue.waiting() == 0:
        run._fetch()
    parts.prefetch.target = 64
    rung: list[Any] = []
    left: list[set[str]] = []

    def disown_unused(cursor: Any, queues: set[str]) -> bool:
        left.append(queues)
        return False

    monkeypatch.setattr(run.unstarted, "disown_unused", disown_unused)
    monkeypatch.setattr(parts.prefetch, "holds_too_much", lambda waiting, taken: too_long)
    monkeypatch.setattr(unstarted.notify, "ring_if_room", rung.append)
    cursor = parts.statements.cursor()
    run.unstarted.start_or_release(cursor)
    assert (stored(message).leased_until is None) == too_long
    assert (parts.prefetch.target == 64) != too_long
    assert ({"mail"} in left) == too_long
    assert rung == [cursor] * too_long


@pytest.mark.parametrize("takes_turns", [False, True])
def test_a_suspect_that_takes_turns_stays_when_all_executors_are_busy(
    run: Run, parts: Parts, monkeypatch: pytest.MonkeyPatch, takes_turns: bool
) -> None:
    """Its wait would begin anew, and with busy executors it would never run."""
    released: list[bool] = []

    def take_waiting(*, suspects: bool) -> list[Task]:
        released.append(suspects)
        return []

    monkeypatch.setattr(parts.local_queue, "waiting", lambda: 1)
    monkeypatch.setattr(parts.local_queue, "stuck", lambda: True)
    monkeypatch.setattr(parts.local_queue, "suspect_takes_turns", lambda: takes_turns)
    monkeypatch.setattr(parts.local_queue, "take_waiting", take_waiting)
    run.unstarted.start_or_release(parts.statements.cursor())
    assert released == [not takes_turns]


@pytest.mark.parametrize("is_written", [False, True])
def test_another_level_moves_the_time_at_which_its_queue_is_due(
    run: Run, parts: Parts, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    pending, freed = [True], []

    def write(cursor: Any) -> None:
        if is_written:
            pending.clear()

    monkeypatch.setattr(parts.backoffs, "has_pending", lambda: bool(pending))
    monkeypatch.setattr(parts.backoffs, "write", write)
    monkeypatch.setattr(parts.fetcher, "on_freed", lambda: freed.append(True))
    run.unstarted.start_or_release(parts.statements.cursor())
    assert bool(freed) == is_written


@pytest.mark.parametrize("owned", [False, True])
def test_a_drain_rings_for_the_ordered_queues_that_it_leaves(
    run: Run, parts: Parts, monkeypatch: pytest.MonkeyPatch, owned: bool
) -> None:
    """A sibling takes the line at once, although no message was released."""
    rung: list[Any] = []
    monkeypatch.setattr(unstarted.notify, "ring_if_room", rung.append)
    monkeypatch.setattr(run.unstarted, "disown_unused", lambda cursor, queues: owned)
    cursor = parts.statements.cursor()
    run.unstarted.release_all(cursor)
    assert rung == [cursor] * owned


def test_a_round_that_the_database_refused_does_not_count_as_progress(
    run: Run, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its tables, or its rights, a worker is not ready, although the database answers."""
    run._fetch()
    assert parts.answered_rounds == 1

    def refuse(cursor: Any) -> float:
        cursor.execute("select from dropped")
        raise AssertionError

    monkeypatch.setattr(parts.fetcher, "fetch", refuse)
    with pytest.raises(psycopg.errors.UndefinedTable):
        run._fetch()
    assert (parts.rounds, parts.answered_rounds) == (2, 1)
