"""A row whose claim the database refuses harms itself alone (guarantee 24).

A user's trigger, a row-level policy or a constraint that is NOT VALID refuses the row's UPDATE, and
with it the whole statement that claims it together with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection
from psycopg.errors import UndefinedTable

from django_mq import Delivery, handler, queues
from django_mq.conf import get_settings
from django_mq.executor.statements import skip_refused_rows
from django_mq.messages import Fence
from django_mq.models import FailedAttempt, QueuedMessage, QueueState
from django_mq.store import Cursor, leases, settle
from django_mq.worker import DeadWorker, Worker, chores, refused_rows
from django_mq.worker.refused_rows import LEAVE_OUT_SECONDS, RefusedRows
from django_mq.worker.releasing import release_skipping_refused
from django_mq.worker.wakeup import Wakeup
from tests.database import second_connection
from tests.rows import add, beat
from tests.worker.conftest import Said, Start, effect, effects

pytestmark = pytest.mark.django_db(transaction=True)

#: The arguments of a message whose worker died.
DIED: dict[str, Any] = {"leased": 600, "claimed_by": "dead:4", "attempts": 1}
FUNCTION = """
create function refuse() returns trigger language plpgsql as
$$ begin raise exception 'no to %', old.id {errcode}; end $$;
"""
TRIGGER = """
create trigger refuse before update on django_mq_queuedmessage
   for each row when (old.payload = '"bad"') execute function refuse()
"""
#: The SQL of rules that refuse every UPDATE of a row with the payload "bad".
REFUSALS = {
    "trigger": FUNCTION.format(errcode="") + TRIGGER,
    "a trigger like a policy": FUNCTION.format(errcode="using errcode = '42501'") + TRIGGER,
    "a trigger of a state of its own": FUNCTION.format(errcode="using errcode = 'QQ001'") + TRIGGER,
    "constraint": """
        alter table django_mq_queuedmessage
          add constraint refuse_row check (payload <> '"bad"') not valid
    """,
    "at the commit": FUNCTION.format(errcode="")
    + """
        create constraint trigger refuse after update on django_mq_queuedmessage
           deferrable initially deferred
           for each row when (old.payload = '"bad"') execute function refuse()
    """,
}
TAKE_OVERS = {
    "its failed attempt": """
        alter table django_mq_failedattempt
          add constraint refuse_row check (type <> 'bad') not valid
    """,
}
REPAIR = """
alter table django_mq_failedattempt drop constraint if exists refuse_row;
alter table django_mq_queuedmessage drop constraint if exists refuse_row;
drop trigger if exists refuse on django_mq_queuedmessage;
drop function if exists refuse()
"""


def execute(sql: str) -> None:
    with second_connection() as other:
        other.execute(sql)


@pytest.fixture
def refuse(transactional_db: None) -> Iterator[Callable[[str], None]]:
    yield lambda how="trigger": execute({**REFUSALS, **TAKE_OVERS}[how])
    connection.close()
    execute(REPAIR)


@pytest.fixture(autouse=True)
def ran() -> list[int]:
    """Handlers of every queue here; the ids of the messages that they received."""
    ran: list[int] = []

    @handler("#", queue="mail", name="h", queues=("other", "line"))
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        if delivery.payload == "writes":
            effect(delivery)

    return ran


def bad(**given: Any) -> int:
    return int(add(handler="h", payload="bad", **given).pk)


def good(count: int = 1, **given: Any) -> list[int]:
    return [add(handler="h", **given).pk for _ in range(count)]


def run_chores(turns: int) -> None:
    for _ in range(turns):
        QueueState.objects.filter(pk=":").delete()
        with second_connection() as own, own.cursor() as cursor:
            assert chores.run(cursor, get_settings())


def run_all(*names: str) -> None:
    assert Worker(queues=names or ["mail"], max_seconds=120).run(until_empty=True)


def left() -> set[int]:
    return set(QueuedMessage.objects.values_list("pk", flat=True))


@pytest.mark.parametrize("how", REFUSALS)
def test_the_others_run(
    how: str, refuse: Callable[[str], None], ran: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    before = good(3)
    id = bad()
    others = before + good(3) + good(3, queue="other")
    refuse(how)
    run_all("mail", "other")
    assert sorted(ran) == sorted(others)
    assert left() == {id}
    [said] = [each for each in caplog.records if getattr(each, "event", "") == "claim_refused"]
    assert said.message_id == id  # type: ignore[attr-defined]
    assert not [each for each in caplog.records if getattr(each, "event", "") == "loop_failed"]


def test_some_of_many_are_refused(refuse: Callable[..., None], ran: list[int]) -> None:
    ids, others = [], []
    for _ in range(20):
        ids.append(bad())
        others += good(9)
    refuse()
    run_all()
    assert sorted(ran) == sorted(others)
    assert left() == set(ids)


def test_a_repaired_row_runs(refuse: Callable[..., None], ran: list[int]) -> None:
    id = bad()
    refuse()
    run_all()
    execute(REPAIR)
    run_all()
    assert ran == [id]


def test_only_the_rest_of_its_key_waits(refuse: Callable[..., None], ran: list[int]) -> None:
    first = good(2, key="k")
    id = bad(key="k")
    behind = good(2, key="k")
    others = good(2, key="other") + good(2)
    refuse()
    run_all()
    assert sorted(ran) == sorted(first + others)
    assert left() == {id, *behind}
    execute(REPAIR)
    run_all()
    assert ran[-3:] == [id, *behind]


def test_only_its_ordered_queue_waits(
    refuse: Callable[..., None], ran: list[int], settings: Any
) -> None:
    settings.DJANGO_MQ = {"QUEUES": {"line": {"ordered": True}}}
    first = good(queue="line", ordered=True)
    id = bad(queue="line", ordered=True)
    behind = good(2, queue="line", ordered=True)
    others = good(2)
    refuse()
    run_all("line", "mail")
    assert sorted(ran) == sorted(first + others)
    execute(REPAIR)
    run_all("line")
    assert ran[-3:] == [id, *behind]


def test_in_a_limited_queue(refuse: Callable[..., None], ran: list[int], settings: Any) -> None:
    settings.DJANGO_MQ = {"QUEUES": {"mail": {"max_in_flight": 2}}}
    id = bad()
    others = good(5)
    refuse()
    run_all()
    assert sorted(ran) == others
    assert left() == {id}


@pytest.mark.parametrize("attempts", [1, 20], ids=["again", "dead"])
@pytest.mark.parametrize("how", ["trigger", "its failed attempt"])
def test_a_take_over(
    refuse: Callable[[str], None], ran: list[int], attempts: int, how: str
) -> None:
    id = bad(leased=-5, attempts=attempts, type="bad")
    others = good(2, leased=-5, attempts=1) + good(2)
    refuse(how)
    run_all()
    assert sorted(ran) == sorted(others)
    assert left() == {id}


@pytest.mark.parametrize("rung", [False, True])
def test_a_missing_right_is_no_matter_of_a_row(
    rung: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is raised as before, also if the listener rang first: leaving rows out would not help."""
    good(2)
    monkeypatch.setattr(Wakeup, "take_ring", lambda self: rung)
    execute("alter table django_mq_queuedmessage rename column suspect to suspected")
    try:
        with pytest.raises(Exception, match="suspect"):
            run_all()
    finally:
        execute("alter table django_mq_queuedmessage rename column suspected to suspect")
    assert "claim_refused" not in [getattr(each, "event", "") for each in caplog.records]


def test_a_row_is_left_out_for_a_while_and_named_once(
    refuse: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    id = bad()
    refuse()
    now = 1000.0
    monkeypatch.setattr(refused_rows, "monotonic", lambda: now)
    rows = RefusedRows()
    with second_connection() as own, own.cursor() as cursor:

        def claim() -> str:
            if id not in rows.ids():
                cursor.execute("update django_mq_queuedmessage set attempts = 1")
            return "claimed"

        for _ in range(3):
            assert (
                rows.claim_without_refused(cursor, claim, lambda *, excluded: {id: "mail"})
                == "claimed"
            )
            assert rows.ids() == [id]
            assert rows.queues() == {"mail"}
            now += LEAVE_OUT_SECONDS
            assert rows.ids() == []
    assert [getattr(each, "event", "") for each in caplog.records] == ["claim_refused"]


@pytest.mark.parametrize("payload", ["writes", {}])
def test_a_message_ends_although_the_next_of_its_key_cannot_be_freed(
    refuse: Callable[..., None], ran: list[int], payload: Any
) -> None:
    [head] = good(key="k", payload=payload)
    behind = bad(key="k", blocked_by=head)
    other = good(key="other", payload=payload)
    refuse()
    run_all()
    assert left() == {behind}
    assert not FailedAttempt.objects.exists()
    if payload:
        assert effects() == {head, *other}


def test_one_of_several_cannot_expire(refuse: Callable[..., None]) -> None:
    """A chore finds those that no claim meets: delayed, blocked or in a paused queue."""
    ids = [*good(after=3600, expires=-9), bad(after=3600, expires=-8)]
    ids += good(2, after=3600, expires=-7)
    refuse()
    run_chores(2)
    dead = QueuedMessage.objects.filter(dead_reason="expired").values_list("pk", flat=True)
    assert sorted(dead) == [ids[0], *ids[2:]]


def test_the_refused_one_expired_at_the_same_moment(
    refuse: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """As all messages of one transaction do, if they have the same lifetime."""
    ids = [bad(after=3600, expires=-9), *good(2, after=3600, expires=-9), bad(after=9, expires=-9)]
    at = QueuedMessage.objects.get(pk=ids[0]).expires_at
    QueuedMessage.objects.filter(pk__in=ids).update(expires_at=at)
    refuse()
    run_chores(1)
    dead = QueuedMessage.objects.filter(dead_reason="expired").values_list("pk", flat=True)
    assert sorted(dead) == ids[1:3]
    assert [getattr(each, "event", "") for each in caplog.records].count("chore_failed") == 1


def test_one_of_several_that_are_stranded_cannot_be_freed(refuse: Callable[..., None]) -> None:
    ids = [*good(key="a", blocked_by=1), bad(key="b", blocked_by=2)]
    ids += [*good(key="c", blocked_by=3), *good(key="d", blocked_by=3)]
    refuse()
    run_chores(3)
    blocked = QueuedMessage.objects.filter(blocked_by__isnull=False).values_list("pk", flat=True)
    assert list(blocked) == [ids[1]]


def test_the_neighbours_of_a_refused_message_of_a_dead_worker_run(
    refuse: Callable[..., None],
    ran: list[int],
    start: Start,
    said: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("django_mq.executor.outage.MAX_RECONNECT_WAIT", 0.25)
    fences = {
        name: [Fence(add(handler="h", payload=name, **DIED).pk, 1, "dead:4") for _ in range(2)]
        for name in ("bad", "good")
    }
    waited = add(handler="h", **DIED).pk
    refuse()
    running = start(queues=["mail"])
    said.wait("worker_started")
    running.worker.recover(
        DeadWorker("dead", "was killed", lost=[*fences["bad"], *fences["good"]]), lambda: None
    )
    said.wait("message_acked", 3)
    assert sorted(ran) == sorted([waited, *(fence.id for fence in fences["good"])])
    assert running.stop()


def test_why_reports_the_refusal(refuse: Callable[..., None]) -> None:
    id, behind = bad(key="k"), good(key="k")[0]
    fine = good()[0]
    beat(queues=["mail"])
    refuse()
    found = queues.why(id)
    assert "the database refuses it (psycopg.errors.RaiseException)" in found.text
    assert f"no to {id}" in found.error
    assert "the database refuses it" in queues.why(behind).text
    assert "refuses" not in queues.why(fine).text
    assert QueuedMessage.objects.filter(attempts=0).count() == 3  # it only tried


Change = Callable[[Cursor, list[Any]], Any]
CHANGES: dict[str, Change] = {
    "renew": lambda cursor, fences: leases.renew(cursor, fences, lease=60.0),
    "release": lambda cursor, fences: settle.release(cursor, fences),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_one_of_several_claims_cannot_be_changed(
    change: Change, refuse: Callable[..., None]
) -> None:
    """The leases of its neighbours are renewed all the same, and they are released."""
    ids = [bad(leased=30, attempts=1), *good(5, leased=30, attempts=1)]
    fences = [(id, 1, "worker:1") for id in ids]
    refuse()
    with second_connection() as own, own.cursor() as cursor:
        done = skip_refused_rows(lambda some: change(cursor, list(some)), fences)
    assert set(done) == set(ids[1:])


def test_an_error_without_rows_is_raised(transactional_db: None) -> None:
    """No row explains it: the search for one would never end."""

    def fail(rows: Any) -> set[int]:
        raise UndefinedTable("missing")

    with pytest.raises(UndefinedTable):
        skip_refused_rows(fail, [])


def test_one_of_the_claims_of_a_dead_worker_cannot_be_released(refuse: Callable[..., None]) -> None:
    bad(leased=30, attempts=1)
    ids, running = good(5, leased=30, attempts=1), good(leased=30, attempts=1)
    refuse()
    with second_connection() as own, own.cursor() as cursor:
        assert release_skipping_refused(cursor, worker="worker", kept=running) == set(ids)
