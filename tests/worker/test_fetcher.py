"""When to claim, from where and how much: the fetcher, with a real table and nothing else."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, cast

import psycopg
import pytest
from django.db.models.functions import Now

from django_mq.executor.stopped_queues import StoppedQueues
from django_mq.messages import ClaimedRow
from django_mq.models import QueuedMessage, QueueState
from django_mq.store.claim import Lane, claim
from django_mq.worker import fetcher as fetcher_module
from django_mq.worker import watermarks as marks_module
from django_mq.worker.claims import TOGETHER, ClaimOptions, ClaimRouter
from django_mq.worker.fetcher import LOOK_AGAIN, Fetcher
from django_mq.worker.intake import Intake
from django_mq.worker.ordered_queues import OrderedQueues
from django_mq.worker.watermarks import Watermarks
from tests.database import second_connection
from tests.rows import add, decide, stored

pytestmark = pytest.mark.django_db(transaction=True)


class Counting:
    """A cursor that keeps what was asked."""

    def __init__(self, cursor: psycopg.Cursor[Any], clock: Clock) -> None:
        self._cursor = cursor
        self._clock = clock
        #: Seconds that a statement takes.
        self.takes = 0.0
        self.asked: list[str] = []

    def execute(self, statement: str, params: Any = None) -> Any:
        self._clock.now += self.takes
        kinds = {"with taken": "claim", "with found": "lapsed", "with recursive": "look"}
        head = statement.strip()
        found = (kind for start, kind in kinds.items() if head.startswith(start))
        self.asked.append(next(found, "gate"))
        return self._cursor.execute(statement, params)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)


class Clock:
    """Stands still unless told."""

    def __init__(self) -> None:
        self.now = 1000.0  # not the machine's: sums would be rounded as long as that is up

    def __call__(self) -> float:
        return self.now


class Rig:
    """A fetcher with options and room that the test decides."""

    def __init__(self, cursor: Counting, clock: Clock) -> None:
        self.cursor = cursor
        self.clock = clock
        self.taken: list[ClaimedRow] = []
        self.rooms: dict[str, int] = {"sync": 1000, "async": 1000, "both": 1000}
        self.options: dict[str, ClaimOptions] = {}
        self._claims = itertools.count(1)

    def make(self, *patterns: str, poll: float = 1.0) -> Rig:
        self.fetcher = Fetcher(
            patterns=patterns or ["#"],
            options=lambda queue: self.options.get(queue, ClaimOptions("sync", 30.0, 100, 1 << 22)),
            intake=cast(Intake, self),
            claims=ClaimRouter(
                worker="rig",
                claimer=self._claimer,
                owned=(),
                holding=lambda queue: False,
                probing=lambda queue, claimer: None,
                stopped=StoppedQueues(),
            ),
            ordered_queues=OrderedQueues("rig", [], on_owned=lambda: None),
            poll=poll,
        )
        return self

    def _claimer(self) -> str:
        return f"rig:{next(self._claims)}"

    def room(self, kind: str) -> int:
        return self.rooms[kind]

    def drop(self, withdrawn: Collection[str], backing_off: Collection[str]) -> None:
        """Nothing waits here."""

    def take(self, cursor: Any, rows: list[ClaimedRow], **given: Any) -> None:
        self.taken.extend(rows)
        for row in rows:
            kind = self.options.get(row.queue, ClaimOptions("sync", 0, 0, 0)).kind
            self.rooms[kind] -= 1

    def settle(self, *, most: float = 0.1) -> float:
        """Fetch, moving the clock along short sleeps, until it would sleep for long."""
        for _ in range(100):
            sleep = self.fetcher.fetch(self.cursor)
            if sleep > most:
                return sleep
            self.clock.now += sleep
        raise AssertionError(f"it spins: {self.cursor.asked[-10:]}")

    def pass_time(self, seconds: float) -> int:
        """Fetch whenever it is time for it; return how often that was."""
        end, wakes = self.clock.now + seconds, 0
        while self.clock.now < end:
            sleep = self.fetcher.fetch(self.cursor)  # which takes its time
            self.clock.now += sleep
            wakes += 1
        return wakes

    def ids(self) -> list[int]:
        ids = [row.id for row in self.taken]
        self.taken.clear()
        return ids


@pytest.fixture
def half_claimed(rig: Rig) -> Iterator[Callable[..., list[int]]]:
    """Makes a backlog; a worker that froze in its claim has the first message, and its place."""

    def make(count: int, *, batch: int) -> list[int]:
        rows = [add(after=n - 600).pk for n in range(count)]
        claim(
            frozen.cursor(), lanes=[Lane("mail", 0)], claimer="frozen:1", lease=60.0, limit=1,
            max_bytes=1 << 22, apart=True,
        )  # fmt: skip
        rig.options["mail"] = ClaimOptions("sync", 30.0, batch, 1 << 22)
        rig.make()
        return rows

    with second_connection() as frozen:
        frozen.autocommit = False
        yield make


@pytest.fixture
def rig(transactional_db: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    clock = Clock()
    monkeypatch.setattr(fetcher_module, "monotonic", clock)
    # A full scan that took long, as on a busy machine, would put off the next one.
    monkeypatch.setattr(fetcher_module, "perf_counter", clock)
    monkeypatch.setattr(marks_module, "monotonic", clock)
    with second_connection() as own, own.cursor() as cursor:
        yield Rig(Counting(cursor, clock), clock)


def test_takes_what_is_due_and_sleeps_until_the_poll(rig: Rig) -> None:
    """CAR-18: what is to be handled, and how long to sleep."""
    messages = [add(after=-60 + n) for n in range(3)]
    rig.make(poll=1.0)
    assert 0 < rig.settle() <= 1.0
    assert rig.ids() == [m.pk for m in messages]
    assert rig.fetcher.empty


def test_sleeps_until_the_next_due_time(rig: Rig) -> None:
    """PMQ-61, PMQ-62: to the moment, not to the poll; and then it is claimed."""
    soon = add(after=30, priority=3)
    add(after=60)
    rig.make(poll=600.0)
    assert 25 < rig.settle() <= 30
    assert rig.ids() == []
    QueuedMessage.objects.filter(pk=soon.pk).update(processable_after=soon.created_at)
    rig.clock.now += 31
    rig.settle()
    assert rig.ids() == [soon.pk]


def test_a_ring_makes_it_look_at_once_and_once_more(rig: Rig) -> None:
    """PMQ-60, and design 7: producers coalesce their rings, so the later look is needed."""
    rig.make(poll=600.0)
    rig.settle()
    first = add()
    rig.fetcher.on_ring()
    while not rig.taken:
        sleep = rig.fetcher.fetch(rig.cursor)
        assert sleep <= LOOK_AGAIN
        rig.clock.now += sleep
    assert rig.ids() == [first.pk]
    second = add()  # whose ring was left out
    rig.settle()
    assert rig.ids() == [second.pk]


def test_what_somebody_waits_for_starts_before_anything_else_is_asked(rig: Rig) -> None:
    """What is asked besides would keep the processor from the handler."""
    add()
    rig.make(poll=600.0)
    rig.settle()
    rig.ids()
    message = add()
    rig.fetcher.on_ring()
    rig.cursor.asked.clear()
    assert 0 < rig.fetcher.fetch(rig.cursor) <= LOOK_AGAIN
    assert (rig.ids(), rig.cursor.asked) == ([message.pk], ["claim"])
    for _ in range(3):  # and still, where it rings all the time, the rest is asked in between
        add()
        rig.fetcher.on_ring()
        rig.fetcher.fetch(rig.cursor)
    assert "look" in rig.cursor.asked


def test_what_is_left_when_claims_keep_apart_is_claimed_too(
    rig: Rig, half_claimed: Callable[..., list[int]]
) -> None:
    """A worker that froze in its claim keeps its place: of the rest, nothing waits for it."""
    rows = half_claimed(24, batch=2)
    rig.settle()
    assert rig.ids() == [*rows[1:3], *rows[11:], *rows[3:11]]
    assert rig.fetcher.empty


def test_the_first_of_a_backlog_waits_no_longer_than_a_second(
    rig: Rig, half_claimed: Callable[..., list[int]]
) -> None:
    """A scan from the front does not keep apart from the claims of other workers."""
    rows = half_claimed(40, batch=1)
    for _ in range(3):
        rig.fetcher.fetch(rig.cursor)
    assert rig.ids() == [rows[1], *rows[6:10], *rows[14:18]]
    rig.clock.now += 1.01
    rig.fetcher.fetch(rig.cursor)
    assert rig.ids() == rows[2:6]


def test_a_claim_of_one_batch_does_not_keep_apart(
    rig: Rig, half_claimed: Callable[..., list[int]]
) -> None:
    rows = half_claimed(9, batch=2)
    for _ in range(2):
        rig.rooms["sync"] = 2
        rig.fetcher.fetch(rig.cursor)
    assert rig.ids() == rows[1:5]


def test_a_ring_does_not_shorten_a_backoff(rig: Rig) -> None:
    """PMQ-40: however many rings come; when the wait is over, one message probes."""
    state = decide(backoff_level=3, backoff=3600)
    messages = [add() for _ in range(3)]
    rig.make(poll=600.0)
    rig.settle()
    for _ in range(5):
        rig.fetcher.on_ring()
        rig.settle()
    assert rig.ids() == []
    assert stored(state).backoff_until == state.backoff_until
    QueueState.objects.update(backoff_until=Now())
    rig.fetcher.on_ring()
    rig.settle()
    assert rig.ids() == [messages[0].pk]


def test_a_ring_that_was_too_early_is_looked_after(rig: Rig) -> None:
    """Another's ring stood for this message, which was committed a little later."""
    rig.make(poll=600.0)
    rig.settle()
    rig.fetcher.on_ring()
    while not rig.fetcher.empty:
        assert rig.fetcher.fetch(rig.cursor) <= LOOK_AGAIN
        rig.clock.now += 0.002
    late = add()
    rig.settle()
    assert rig.ids() == [late.pk]


def test_a_storm_of_rings_is_not_a_storm_of_scans(rig: Rig, monkeypatch: Any) -> None:
    """Everybody with a login may NOTIFY; when scans are dear they take a tenth of the time."""
    costs = iter(range(10**6))
    monkeypatch.setattr(fetcher_module, "perf_counter", lambda: next(costs) * 0.05)
    rig.make(poll=600.0)
    rig.settle()
    rig.fetcher._watermarks._usual = 0.001  # a bad day: full scans take 50 ms, others 1 ms
    rig.cursor.asked.clear()
    until = rig.clock.now + 5.0
    while rig.clock.now < until:
        rig.fetcher.on_ring()
        rig.clock.now += max(rig.fetcher.fetch(rig.cursor), 0.01)
    assert rig.cursor.asked.count("claim") < 5.0 / 0.05 / 4


def test_no_spinning_at_a_row_that_somebody_holds(rig: Rig) -> None:
    """PMQ-27: a row locked elsewhere is not waited for at full speed."""
    message = add()
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuedmessage for update")
        rig.make(poll=1.0)
        rig.settle()
        assert rig.fetcher.empty
        rig.cursor.asked.clear()
        until = rig.clock.now + 10.0
        while rig.clock.now < until:
            rig.clock.now += rig.fetcher.fetch(rig.cursor)
        assert rig.cursor.asked.count("claim") <= 20
        assert rig.cursor.asked.count("look") <= 11
        assert rig.ids() == []
    rig.clock.now += 1.1
    rig.settle()
    assert rig.ids() == [message.pk]


def test_an_idle_queue_costs_one_look_a_poll(rig: Rig) -> None:
    """CAR-20, CAR-31 as changed: no sleep grows; a ring or a due time ends it."""
    rig.make(poll=1.0)
    rig.settle()
    rig.cursor.asked.clear()
    until = rig.clock.now + 10.0
    while rig.clock.now < until:
        rig.clock.now += rig.fetcher.fetch(rig.cursor)
    assert len(rig.cursor.asked) <= 11


def test_what_appears_below_the_mark_is_found_within_a_second(rig: Rig) -> None:
    """Design 5: committed late, or released: while the claims go on from the mark."""
    rig.make()
    rig.rooms["sync"] = 10**6
    rig.options["mail"] = ClaimOptions("sync", 30.0, 1, 1 << 22)
    for n in range(40):
        add(after=-30 + n / 10)
    for _ in range(5):
        rig.fetcher.fetch(rig.cursor)
    assert len(rig.taken) == 1 + 4 * TOGETHER  # the first tells how large they are
    late = add(after=-3600)
    for _ in range(3):
        rig.fetcher.fetch(rig.cursor)
    assert late.pk not in {row.id for row in rig.taken}  # so the marks are used
    rig.clock.now += 1.01
    rig.fetcher.fetch(rig.cursor)
    assert late.pk in {row.id for row in rig.taken[-TOGETHER:]}


def test_what_this_process_gave_back_is_found_at_once(rig: Rig) -> None:
    rig.make(poll=600.0)
    message = add()
    rig.settle()
    QueuedMessage.objects.update(claimed_by=None, leased_until=None)
    rig.fetcher.on_freed()
    rig.settle()
    assert rig.ids() == [message.pk, message.pk]


def test_a_new_lane_is_found_after_a_ring(rig: Rig) -> None:
    add()
    rig.make(poll=600.0)
    rig.settle()
    rig.ids()
    urgent, other = add(priority=50), add("post")
    rig.fetcher.on_ring()
    rig.settle()
    assert set(rig.ids()) == {urgent.pk, other.pk}


def test_who_has_no_room_for_one_kind_wakes_for_the_other(rig: Rig) -> None:
    """To the moment when it falls due, not to the poll."""
    rig.options["waits"] = ClaimOptions("async", 30.0, 100, 1 << 22)
    rig.rooms["sync"] = 0
    add()
    soon = add("waits", after=30)
    rig.make(poll=600.0)
    assert 25 < rig.settle() <= 30
    QueuedMessage.objects.filter(pk=soon.pk).update(processable_after=soon.created_at)
    rig.clock.now += 31
    rig.settle()
    assert rig.ids() == [soon.pk]


def test_a_new_lane_is_found_while_another_is_busy(rig: Rig) -> None:
    """Within a poll interval: a backlog of priority 0 does not hide a priority 9."""
    rig.make(poll=1.0)
    rig.options["mail"] = ClaimOptions("sync", 30.0, 2, 1 << 22)
    for n in range(40):
        add(after=-60 + n)
    rig.fetcher.fetch(rig.cursor)
    urgent = add(priority=9)
    rig.clock.now += 1.01
    rig.taken.clear()
    rig.fetcher.fetch(rig.cursor)
    assert rig.taken[0].id == urgent.pk


@pytest.mark.parametrize("differ", [False, True], ids=["same options", "different options"])
def test_queues_are_preferred_as_named(rig: Rig, differ: bool) -> None:
    """Strictly: nothing of a later queue while an earlier one has anything due."""
    if differ:
        rig.options["b"] = ClaimOptions("sync", 99.0, 2, 1 << 22)
    for queue in "zcba":
        for n in range(3):
            add(queue, after=-60 + n, priority=n)
    rig.make("a", "b", "c")
    rig.rooms["sync"] = 10**6
    rig.settle()
    assert [row.queue for row in rig.taken] == ["a"] * 3 + ["b"] * 3 + ["c"] * 3
    assert [row.priority for row in rig.taken] == [2, 1, 0] * 3


def test_a_full_batch_of_one_queue_does_not_let_a_later_one_in(rig: Rig) -> None:
    rig.options["a"] = ClaimOptions("sync", 30.0, 2, 1 << 22)
    for n in range(5):
        add("a", after=-60 + n)
        add("b", after=-60 + n)
    rig.make("a", "b")
    rig.settle()
    assert "".join(row.queue for row in rig.taken) == "aaaaabbbbb"


def test_async_handlers_do_not_wait_for_threads(rig: Rig) -> None:
    """Room is counted for each kind: a full hand leaves the loop its slots."""
    rig.options["a"] = ClaimOptions("sync", 30.0, 100, 1 << 22)
    rig.options["b"] = ClaimOptions("async", 30.0, 100, 1 << 22)
    for _ in range(3):
        add("a")
        add("b")
    rig.rooms.update(sync=2, **{"async": 2})
    rig.make("a", "b")
    rig.settle()
    assert sorted(row.queue for row in rig.taken) == ["a", "a", "b", "b"]


def test_without_room_nothing_is_asked_and_room_is_used_at_once(rig: Rig) -> None:
    """KAF-16, NSQ-23: the claim's size is the backpressure."""
    for _ in range(5):
        add()
    rig.rooms["sync"] = 2
    rig.make(poll=600.0)
    rig.settle()
    assert len(rig.ids()) == 2
    assert not rig.fetcher.empty
    rig.cursor.asked.clear()
    for _ in range(5):
        rig.fetcher.fetch(rig.cursor)
    assert "claim" not in rig.cursor.asked
    rig.rooms["sync"] = 2
    rig.fetcher.fetch(rig.cursor)
    assert len(rig.ids()) == 2


def test_lapsed_rows_come_before_the_backlog(rig: Rig) -> None:
    """Guarantee 6: whatever the backlog."""
    for n in range(20):
        add(after=-600 + n)
    lapsed = add(leased=-1, attempts=1)
    dead = add(leased=-1, attempts=20)
    rig.make()
    rig.fetcher.fetch(rig.cursor)
    assert rig.taken[0].id == lapsed.pk
    assert stored(dead).dead_reason == "exhausted"


def test_many_lapsed_rows_need_not_many_polls(rig: Rig) -> None:
    """A claim has room for a few: what a whole host lost is not taken at a few a second."""
    for _ in range(30):
        add(leased=-1, attempts=1)
    rig.options["mail"] = ClaimOptions("sync", 30.0, 4, 1 << 22)
    rig.make(poll=600.0)
    rig.settle()
    assert len(rig.taken) == 30


def test_lapsed_rows_are_not_forgotten_when_there_was_no_room(rig: Rig) -> None:
    lapsed = add(leased=-1, attempts=1)
    rig.rooms["sync"] = 0
    rig.make(poll=600.0)
    rig.settle()
    assert not rig.fetcher.empty
    rig.rooms["sync"] = 1
    rig.fetcher.fetch(rig.cursor)
    assert rig.ids() == [lapsed.pk]


@pytest.mark.parametrize(("poll", "takes"), [(1.0, 0.003), (1.0, 0.08), (0.1, 0.008)])
def test_who_is_idle_wakes_up_once_a_poll(rig: Rig, poll: float, takes: float) -> None:
    """Beside a handler that runs past its lease; whenever the last ring was."""
    add(leased=-1, attempts=1)
    rig.cursor.takes = takes
    rig.make(poll=poll)
    with second_connection() as other, other.transaction():
        other.execute("select from django_mq_queuedmessage for update")
        rig.settle(most=0.05)
        rig.clock.now += 0.4 * poll
        rig.fetcher.on_ring()
        rig.settle(most=0.05)
        rig.pass_time(2 * poll)  # of the poll in which it rang
        rig.cursor.asked.clear()
        wakes = rig.pass_time(10 * poll)
    assert wakes <= 10
    assert Counter(rig.cursor.asked) == {"look": wakes, "lapsed": wakes}


def test_a_lease_that_lapses_later_is_found_by_the_poll(rig: Rig) -> None:
    message = add(leased=30, attempts=1)
    rig.make(poll=1.0)
    rig.settle()
    assert rig.ids() == []
    QueuedMessage.objects.update(leased_until=message.created_at)
    rig.clock.now += 1.01
    rig.settle()
    assert rig.ids() == [message.pk]


def test_what_comes_between_claim_and_look_is_not_missed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look before the sleep sees it due, so the sleep is put off: also until_empty."""
    rig.make("mail", poll=600.0)  # a lane that it knows
    rig.settle()
    look = fetcher_module.looking.look
    added: list[QueuedMessage] = []

    def late(cursor: Any) -> Any:
        if not added:
            added.append(add())
        return look(cursor)

    rig.fetcher.on_freed()
    monkeypatch.setattr(fetcher_module.looking, "look", late)
    rig.settle()
    assert added[0].pk in rig.ids()


def test_a_busy_fetcher_sleeps_not_at_all(rig: Rig) -> None:
    rig.options["mail"] = ClaimOptions("sync", 30.0, 1, 1 << 22)
    for _ in range(3 * TOGETHER):
        add()
    rig.make()
    assert [rig.fetcher.fetch(rig.cursor) for _ in range(3)] == [0.0] * 3


def test_equal_queues_take_turns(rig: Rig) -> None:
    """No name's place in the alphabet lets the others starve."""
    for n in range(6):
        add("a", after=-60 + n)
        add("b", after=-60 + n)
    rig.options = {name: ClaimOptions("sync", 30.0, 2, 1 << 22) for name in "ab"}
    rig.make("#")
    rig.fetcher.fetch(rig.cursor)
    rig.fetcher.fetch(rig.cursor)
    assert {row.queue for row in rig.taken} == {"a", "b"}


# ---- marks, by a clock of their own


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> tuple[Watermarks, Clock]:
    clock = Clock()
    monkeypatch.setattr(fetcher_module, "monotonic", clock)
    monkeypatch.setattr(marks_module, "monotonic", clock)
    return Watermarks(full_every=1.0), clock


def test_full_scans_take_a_tenth_of_the_time(marks: tuple[Watermarks, Clock]) -> None:
    own, clock = marks
    assert own.full_is_due()
    own.scanned({}, 0.001, full=True)
    own.scanned({}, 0.001, full=False)
    own.want_full()
    clock.now += 0.01
    assert own.full_is_due()
    own.scanned({}, 0.1015, full=True)  # 0.1 s more than 1.5 times the usual
    own.want_full()
    assert not own.full_is_due()
    assert 0.89 < own.full_in() <= 0.9
    clock.now += 0.91
    assert own.full_is_due()


def test_a_full_scan_is_due_each_second(marks: tuple[Watermarks, Clock]) -> None:
    own, clock = marks
    own.scanned({}, 0.001, full=True)
    assert not own.full_is_due()
    clock.now += 1.0
    assert own.full_is_due()


def test_marks_move_and_are_forgotten(marks: tuple[Watermarks, Clock]) -> None:
    own, _ = marks
    at = stored(add()).processable_after
    own.scanned({("mail", 0): (at, 7)}, 0.001, full=False)
    assert own.lane("mail", 0, full=False)[2:] == (at, 7)
    assert own.lane("mail", 0, full=True)[2:] != (at, 7)
    own.keep([("mail", 1)])
    assert own.lane("mail", 0, full=False) == own.lane("mail", 0, full=True)


def test_rings_without_end_do_not_keep_it_from_all_else(rig: Rig) -> None:
    """Many producers ring at each turn: lapsed messages are taken over all the same."""
    rig.make(poll=1.0)
    rig.settle()
    lapsed = add(leased=-1, attempts=1)
    for _ in range(200):
        rig.fetcher.on_ring()
        rig.clock.now += rig.fetcher.fetch(rig.cursor) + 0.01
        if rig.taken:
            break
    assert rig.ids() == [lapsed.pk]
