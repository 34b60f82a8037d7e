"""Settling: every state against every change; the fence; the row's new place."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from random import Random
from typing import Any

import psycopg
import pytest
from django.utils import timezone

from django_mq.messages import Fence
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.store import claim_lapsed as lapsed
from django_mq.store import leases, open_transaction, recover, routing, settle
from django_mq.store.settle import FailedDelivery
from tests.database import lock as lock_all
from tests.database import second_connection, until_blocked
from tests.rows import add, stored
from tests.store.conftest import lock

pytestmark = pytest.mark.django_db(transaction=True)

Cursor = psycopg.Cursor[Any]
Change = Callable[[Cursor, Fence], Any]
AT = (timezone.now() + timedelta(days=30)).replace(microsecond=123)


def failed(fence: Fence, **given: Any) -> FailedDelivery:
    values: dict[str, Any] = {
        "at": None,
        "delay": 0.0,
        "dead_reason": "",
        "error_class": "ValueError",
        "error_text": "no",
        "traceback": "where",
        "last_error": "ValueError: no",
        "seconds": 1.5,
    }
    return FailedDelivery(fence, **{**values, **given})


#: Every change by fence, and the part of its result that shows that it changed the row.
CHANGES: dict[str, tuple[Change, Callable[[Any], bool]]] = {
    "lock": (lambda c, f: lock_all(c, [f]), lambda locked: not locked.missing),
    "still_ours": (lambda c, f: settle.still_ours(c, [f]), bool),
    "ack": (lambda c, f: settle.ack(c, [f]), bool),
    "fail": (lambda c, f: settle.fail(c, [failed(f)]), bool),
    "snooze": (lambda c, f: settle.snooze(c, [settle.SnoozedDelivery(f, None, 5.0)]), bool),
    "hold": (lambda c, f: settle.hold(c, [settle.Hold(f, "why", 5.0)]), bool),
    "dead-letter": (lambda c, f: settle.dead_letter_unstarted(c, {f: "expired"}), bool),
    "release": (lambda c, f: settle.release(c, [f]), bool),
    "forget_lapse": (lambda c, f: lapsed.forget_lapse(c, [f]), bool),
    "start": (lambda c, f: leases.start(c, [f], lease=60.0), bool),
    "lock_running": (lambda c, f: recover.lock_running(c, [f]), bool),
    "split": (lambda c, f: routing.split(c, f, handlers=["h", "i"], max_attempts=[1, 2]), bool),
}


def values(message: QueuedMessage) -> dict[str, Any]:
    return QueuedMessage.objects.values().get(pk=message.pk)


def fence_of(message: QueuedMessage) -> Fence:
    assert message.claimed_by is not None
    return Fence(message.pk, message.attempts, message.claimed_by)


@pytest.mark.parametrize("change", CHANGES)
def test_the_owner_changes_the_row(cursor: Cursor, change: str) -> None:
    do, changed = CHANGES[change]
    message = add(leased=30, attempts=3, claimed_by="me:1")
    assert changed(do(cursor, fence_of(message)))


class Counting:
    """A cursor that counts its statements."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self.count = 0

    def execute(self, *args: Any) -> Any:
        self.count += 1
        return self._cursor.execute(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)


@pytest.mark.parametrize("change", ["ack", "fail", "snooze", "hold", "dead-letter", "release"])
def test_lease_ends_in_the_statement_of_the_settle(cursor: Cursor, change: str) -> None:
    """CAR-29: no session ever sees one without the other."""
    message = add(leased=30, attempts=3, claimed_by="me:1")
    counting: Any = Counting(cursor)
    CHANGES[change][0](counting, fence_of(message))
    assert counting.count == 1
    left = list(QueuedMessage.objects.values_list("leased_until", "claimed_by"))
    assert left == ([] if change == "ack" else [(None, None)])


@pytest.mark.parametrize("change", CHANGES)
def test_a_lapsed_lease_is_still_the_owners_until_taken(cursor: Cursor, change: str) -> None:
    do, changed = CHANGES[change]
    message = add(leased=-30, attempts=3, claimed_by="me:1")
    assert changed(do(cursor, fence_of(message)))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("state", "given"),
    [
        ("waiting", {"attempts": 3}),
        ("dead", {"attempts": 3, "dead": -1}),
        ("another attempt", {"attempts": 4, "leased": 30, "claimed_by": "me:1"}),
        ("an earlier attempt", {"attempts": 2, "leased": 30, "claimed_by": "me:1"}),
        ("another claimer", {"attempts": 3, "leased": 30, "claimed_by": "you:1"}),
        ("another claim of ours", {"attempts": 3, "leased": 30, "claimed_by": "me:2"}),
        ("gone", None),
    ],
)
def test_wrong_fence_changes_nothing(
    cursor: Cursor, change: str, state: str, given: dict[str, Any] | None
) -> None:
    """Guarantee 4: fenced by id, attempt and claimer; zero rows otherwise."""
    do, changed = CHANGES[change]
    message = add(**(given or {}))
    before = values(message)
    fence = Fence(message.pk, 3, "me:1")
    if given is None:
        message.delete()
    assert not changed(do(cursor, fence))
    if given is not None:
        assert values(QueuedMessage(pk=before["id"])) == before
    assert QueuedMessage.objects.count() == (given is not None)
    assert FailedAttempt.objects.count() == 0


def test_several_at_once_and_only_ours(cursor: Cursor) -> None:
    ours = [add(leased=30, attempts=n, claimed_by=f"me:{n}") for n in (1, 2)]
    theirs = add(leased=30, attempts=1, claimed_by="you:1")
    fences = [*map(fence_of, ours), Fence(theirs.pk, 1, "me:1"), Fence(10**12, 1, "me:1")]
    mine = {m.pk for m in ours}
    assert settle.still_ours(cursor, fences) == mine
    assert settle.release(cursor, fences) == mine
    # Fences are not mixed up with each other.
    crossed = [Fence(ours[0].pk, 2, "me:2"), Fence(ours[1].pk, 1, "me:1")]
    QueuedMessage.objects.filter(pk__in=mine).delete()
    again = [add(leased=30, attempts=n, claimed_by=f"me:{n}") for n in (1, 2)]
    crossed = [Fence(again[0].pk, 2, "me:2"), Fence(again[1].pk, 1, "me:1")]
    assert settle.ack(cursor, crossed) == set()
    assert settle.ack(cursor, [*map(fence_of, again)]) == {m.pk for m in again}
    assert values(theirs)["claimed_by"] == "you:1"


def test_mixed_claims_and_attempts_keep_their_own_fences(cursor: Cursor) -> None:
    """Guarantee 4: they are given in runs, of a single message in the worst case."""
    random = Random(4)
    for _ in range(20):
        QueuedMessage.objects.all().delete()
        claimers = ["me:1", "me:2", "me:3"]
        rows = [
            add(leased=30, attempts=random.choice([1, 2]), claimed_by=random.choice(claimers))
            for _ in range(12)
        ]
        back, gone = add(attempts=1), add(leased=30, attempts=1, claimed_by="me:1")
        others = [Fence(back.pk, 1, "me:1"), Fence(gone.pk, 1, "me:1")]
        gone.delete()
        fences = [
            Fence(row.pk, random.choice([1, row.attempts]), random.choice([row.claimed_by, "me:2"]))
            for row in rows
        ]
        right = {f.id for f, row in zip(fences, rows, strict=True) if f == fence_of(row)}
        fences += others
        random.shuffle(fences)
        wrong = {fence.id for fence in fences} - right
        assert lock_all(cursor, fences).missing == wrong
        assert settle.ack(cursor, fences) == right
        left = set(QueuedMessage.objects.values_list("pk", flat=True))
        assert left == {row.pk for row in [*rows, back]} - right


@pytest.mark.parametrize("change", [settle.fail, settle.snooze, settle.hold])
def test_nothing_to_settle_changes_nothing(
    cursor: Cursor, change: Callable[[Cursor, list[Any]], set[int]]
) -> None:
    add(leased=30)
    assert change(cursor, []) == set()


def test_ack_removes_the_row(cursor: Cursor) -> None:
    """PMQ-23, CAR-19."""
    message = add(leased=30, attempts=1)
    assert settle.ack(cursor, [fence_of(message)]) == {message.pk}
    assert not QueuedMessage.objects.exists()
    assert settle.ack(cursor, [fence_of(message)]) == set()


@pytest.mark.parametrize("at", [None, AT])
def test_fail_retries_at_a_time_or_after_a_delay(cursor: Cursor, at: datetime | None) -> None:
    """RMQ-14, PMQ-50: the row and its id stay; the attempt is kept."""
    message = add(leased=30, attempts=2, handler="h", held=-5, suspect=True)
    settle.fail(cursor, [failed(fence_of(message), at=at, delay=90.0)])
    stored(message)
    assert (message.attempts, message.claimed_by, message.leased_until) == (2, None, None)
    assert (message.dead_at, message.dead_reason, message.held_since) == (None, "", None)
    assert (message.last_error, message.suspect) == ("ValueError: no", False)
    wait = message.processable_after - timezone.now()
    assert message.processable_after == at if at else 80 < wait.total_seconds() <= 90
    attempt = FailedAttempt.objects.get()
    assert (attempt.attempt, attempt.worker, attempt.handler) == (2, "worker", "h")
    assert (attempt.error_class, attempt.error_text, attempt.traceback) == (
        "ValueError", "no", "where"
    )  # fmt: skip
    assert attempt.started_at is not None
    assert attempt.ended_at - attempt.started_at == timedelta(seconds=1.5)


ODD_TEXTS = [
    '"',
    "\\",
    '\\"',
    "{a,b}",
    "null",
    "NULL",
    "",
    " ",
    "a\nb\tc",
    "'",
    "%s",
    "é\U0001f40d",
]


def test_failures_keep_any_text(cursor: Cursor) -> None:
    failures = [
        failed(fence_of(add(leased=30, attempts=1)), error_text=text, traceback=text[::-1])
        for text in ODD_TEXTS
    ]
    assert len(settle.fail(cursor, failures)) == len(ODD_TEXTS)
    found = FailedAttempt.objects.order_by("message_id").values_list("error_text", "traceback")
    assert list(found) == [(text, text[::-1]) for text in ODD_TEXTS]


def test_a_text_that_the_server_cannot_store_is_refused(cursor: Cursor) -> None:
    """It would end a text, and give the next message the rest."""
    rows = [add(leased=30, attempts=1) for _ in range(2)]
    failures = [
        failed(fence_of(row), error_text=text)
        for row, text in zip(rows, ("a\0b", "c"), strict=True)
    ]
    with pytest.raises(psycopg.DataError):
        settle.fail(cursor, failures)


def test_fail_can_make_it_dead_or_suspect(cursor: Cursor) -> None:
    dead, suspect = (add(leased=30, attempts=2) for _ in range(2))
    settle.fail(
        cursor,
        [
            failed(fence_of(dead), dead_reason="exhausted"),
            failed(fence_of(suspect), suspect=True),
        ],
    )
    stored(dead), stored(suspect)
    assert dead.dead_at is not None
    assert dead.dead_reason == "exhausted"
    assert (suspect.dead_at, suspect.suspect) == (None, True)
    assert FailedAttempt.objects.count() == 2


@pytest.mark.parametrize("at", [None, AT])
def test_snooze_refunds_the_attempt(cursor: Cursor, at: datetime | None) -> None:
    message = add(leased=30, attempts=1, suspect=True, held=-60)
    settle.snooze(cursor, [settle.SnoozedDelivery(fence_of(message), at, 90.0)])
    stored(message)
    assert (message.attempts, message.claimed_by, message.leased_until) == (0, None, None)
    assert (message.suspect, message.held_since) == (False, None)
    assert message.processable_after > timezone.now() + timedelta(seconds=80)
    assert at is None or message.processable_after == at
    assert FailedAttempt.objects.count() == 0


@pytest.mark.parametrize(
    ("held", "reason", "expected"),
    [
        (False, "Snooze: away", "Snooze: away"),
        (False, "", "KeyError: 7"),
        (True, "Snooze: away", "Snooze: away"),
        (True, "", ""),  # it said why the message was held
    ],
)
def test_snooze_keeps_the_reason(cursor: Cursor, held: bool, reason: str, expected: str) -> None:
    since = {"held": -60} if held else {}
    message = add(leased=30, attempts=2, last_error="KeyError: 7", **since)
    settle.snooze(cursor, [settle.SnoozedDelivery(fence_of(message), None, 90.0, reason)])
    assert stored(message).last_error == expected


@pytest.mark.parametrize("at", [None, AT - timedelta(days=60)])
def test_the_shortest_snooze_is_a_tenth_of_a_second(cursor: Cursor, at: datetime | None) -> None:
    message = add(leased=30, attempts=1)
    [(before,)] = cursor.execute("select statement_timestamp()").fetchall()
    settle.snooze(cursor, [settle.SnoozedDelivery(fence_of(message), at, 0.0)])
    assert stored(message).processable_after >= before + timedelta(seconds=0.1)


def test_hold_refunds_and_remembers_since_when(cursor: Cursor) -> None:
    fresh = add(leased=30, attempts=1)
    old = add(leased=30, attempts=1, held=-500)
    since = old.held_since
    settle.hold(cursor, [settle.Hold(fence_of(each), "no handler", 9.0) for each in (fresh, old)])
    for message in (fresh, old):
        stored(message)
        assert (message.attempts, message.claimed_by, message.leased_until) == (0, None, None)
        assert message.last_error == "no handler"
        assert message.processable_after > timezone.now()
    assert fresh.held_since is not None
    assert old.held_since == since


def test_bury_is_dead_without_an_attempt(cursor: Cursor) -> None:
    message = add(leased=30, attempts=1, suspect=True)
    settle.dead_letter_unstarted(cursor, {fence_of(message): "expired"})
    stored(message)
    assert (message.attempts, message.dead_reason, message.suspect) == (0, "expired", False)
    assert message.dead_at is not None


def test_release_keeps_the_place_in_line(cursor: Cursor) -> None:
    message = add(leased=30, attempts=1, after=-77, held=-3, suspect=True)
    before = values(message)
    settle.release(cursor, [fence_of(message)])
    changed = {"attempts": 0, "claimed_by": None, "leased_until": None}
    assert values(message) == {**before, **changed}


def test_release_and_lock_skip_locked_rows(cursor: Cursor, other: psycopg.Connection[Any]) -> None:
    """Guarantee 13: no statement waits for a message in flight."""
    busy, free = add(leased=30, attempts=1), add(leased=30, attempts=1)
    lock(other, busy.pk)
    cursor.execute("set statement_timeout = '60s'")
    fences = [fence_of(busy), fence_of(free)]
    assert lock_all(cursor, fences).missing == {busy.pk}
    assert {row.id for row in recover.lock_running(cursor, fences)} == {free.pk}
    assert settle.still_ours(cursor, fences) == {busy.pk, free.pk}
    assert settle.release(cursor, fences) == {free.pk}


def test_lock_holds_and_returns_expiry_and_transaction(
    cursor: Cursor, other: psycopg.Connection[Any]
) -> None:
    fresh, expired, never = (
        add(leased=30, attempts=1, **given) for given in ({"expires": 60}, {"expires": 0}, {})
    )
    theirs = other.cursor()
    locked = lock_all(
        theirs,
        [fence_of(m) for m in (fresh, expired, never)],
        {"lock_timeout": "1234", "idle_in_transaction_session_timeout": "60000"},
    )
    assert (locked.missing, locked.expired) == (set(), {expired.pk})
    theirs.execute("select current_setting('lock_timeout'), pg_current_xact_id()::text")
    assert theirs.fetchone() == ("1234ms", locked.xid)
    assert lock_all(cursor, [fence_of(fresh)]).missing == {fresh.pk}
    xid = locked.xid
    assert open_transaction.transaction_status(cursor, xid) == "in progress"
    other.commit()
    assert open_transaction.transaction_status(cursor, xid) == "committed"
    theirs.execute("show lock_timeout")
    assert theirs.fetchone() == ("0",)
    lock_all(theirs, [fence_of(fresh)])
    theirs.execute("select pg_current_xact_id()::text")
    row = theirs.fetchone()
    assert row is not None
    other.rollback()
    assert open_transaction.transaction_status(cursor, row[0]) == "aborted"


def test_split_gives_each_handler_its_copy(cursor: Cursor) -> None:
    message = add(
        leased=30, attempts=1, payload=[1], metadata={"a": 1}, priority=5, key="k",
        schema_version=3, retry={"kind": "fixed", "seconds": 1}, expires=99, held=-5,
    )  # fmt: skip
    fence = fence_of(message)
    assert routing.split(cursor, fence, handlers=["a", "b", "c"], max_attempts=[1, 2, 3])
    rows = {m.handler: m for m in QueuedMessage.objects.all()}
    assert {name: m.max_attempts for name, m in rows.items()} == {"a": 1, "b": 2, "c": 3}
    assert rows["a"].pk == message.pk
    assert (rows["a"].claimed_by, rows["a"].held_since) == ("worker:1", None)
    same = (
        "queue", "type", "payload", "metadata", "priority", "key", "schema_version", "retry",
        "expires_at", "processable_after", "created_at",
    )  # fmt: skip
    for name in "bc":
        assert (rows[name].attempts, rows[name].claimed_by) == (0, None)
        assert [getattr(rows[name], n) for n in same] == [getattr(rows["a"], n) for n in same]
    # Once more, since the answer was lost: no second copies.
    assert not routing.split(cursor, fence, handlers=["a", "b", "c"], max_attempts=[1, 2, 3])
    assert QueuedMessage.objects.count() == 3


@pytest.mark.parametrize("change", ["ack", "start", "fail"])
def test_change_that_waited_for_a_takeover_has_no_effect(
    cursor: Cursor, other: psycopg.Connection[Any], change: str
) -> None:
    """Guarantee 4: the fence is checked again on the row as it is after the wait."""
    lapsed_rows = [add(leased=-n, attempts=1) for n in (3, 2)]
    mine = add(leased=60, attempts=1)
    taken = lapsed.claim_lapsed(
        other.cursor(), queues=["mail"], claimer="me:8", lease=30.0, limit=10, max_bytes=1000
    )
    assert len(taken.taken) == 2
    fences = [Fence(row.pk, 1, "worker:1") for row in (lapsed_rows[0], mine, lapsed_rows[1])]
    calls: dict[str, Callable[[Cursor], Any]] = {
        "ack": lambda c: settle.ack(c, fences),
        "start": lambda c: leases.start(c, fences, lease=60.0),
        "fail": lambda c: settle.fail(c, [failed(fence) for fence in fences]),
    }
    with second_connection() as waiting, ThreadPoolExecutor() as pool:
        found = pool.submit(calls[change], waiting.cursor())
        until_blocked(waiting.info.backend_pid)
        other.commit()
        assert set(found.result(30)) == {mine.pk}
    assert {stored(row).claimed_by for row in lapsed_rows} == {"me:8"}
