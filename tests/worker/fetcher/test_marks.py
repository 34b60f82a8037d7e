"""The times at which a scan resumes at its mark, and at which it is full, by a test clock."""

from __future__ import annotations

import pytest

from django_mq.models import QueuedMessage
from django_mq.worker import fetcher as fetcher_module
from django_mq.worker import lanes as lanes_module
from django_mq.worker import watermarks as marks_module
from django_mq.worker.queue_options import ClaimOptions
from django_mq.worker.watermarks import LaneName, Watermarks
from tests.rows import add, insert_all, stored
from tests.worker.fetcher.conftest import Clock, Rig

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> tuple[Watermarks[LaneName], Clock]:
    clock = Clock()
    monkeypatch.setattr(fetcher_module, "monotonic", clock)
    monkeypatch.setattr(marks_module, "monotonic", clock)
    return Watermarks(), clock


def scan(own: Watermarks[LaneName], seconds: float, *, full: bool) -> None:
    own.begin_scan(full=full)
    own.record_scan({}, seconds, full=full)


def test_a_full_scan_that_is_requested_during_one_is_another_one(
    marks: tuple[Watermarks[LaneName], Clock],
) -> None:
    """A message freed meanwhile may lie behind where the scan is."""
    own, clock = marks
    own.begin_scan(full=True)
    own.request_full()
    own.record_scan({}, 0.001, full=True)
    clock.now += 0.1
    assert own.full_is_due()


def test_full_scans_take_a_tenth_of_the_time(marks: tuple[Watermarks[LaneName], Clock]) -> None:
    own, clock = marks
    assert own.full_is_due()
    scan(own, 0.001, full=True)
    scan(own, 0.001, full=False)
    own.request_full()
    clock.now += 0.01
    assert own.full_is_due()
    scan(own, 0.1015, full=True)  # 0.1 s more than 1.5 times the usual time
    own.request_full()
    clock.now += 0.01
    assert own.full_is_due()  # it may have waited for a lock
    scan(own, 0.1015, full=True)
    own.request_full()
    assert not own.full_is_due()
    assert 0.89 < own.full_in() <= 0.9
    clock.now += 0.91
    assert own.full_is_due()


def test_scans_of_different_groups_have_their_own_rest(
    marks: tuple[Watermarks[LaneName], Clock],
) -> None:
    own, clock = marks
    for _ in range(2):
        for group, seconds in ("quick", 0.001), ("slow", 1.0):
            own.record_scan({}, seconds, full=True, rest_key=group)
    own.request_full()
    clock.now += 1.0
    assert not own.full_is_due()


def test_one_slow_scan_does_not_make_slow_ones_usual(
    marks: tuple[Watermarks[LaneName], Clock],
) -> None:
    own, _ = marks
    scan(own, 0.001, full=False)
    scan(own, 0.1, full=False)
    scan(own, 0.1, full=True)
    scan(own, 0.1, full=True)
    assert 0.7 < own.full_in() < 0.8


def test_a_full_scan_is_due_each_second(marks: tuple[Watermarks[LaneName], Clock]) -> None:
    own, clock = marks
    scan(own, 0.001, full=True)
    assert not own.full_is_due()
    clock.now += 1.0
    assert own.full_is_due()


def test_scans_that_find_little_behind_the_marks_are_full_whatever_they_take(
    marks: tuple[Watermarks[LaneName], Clock],
) -> None:
    own, clock = marks
    scan(own, 50.0, full=True)
    assert not own.full_is_due()
    own.record_sparse_scan()
    scan(own, 50.0, full=True)
    assert own.full_is_due()
    clock.now += 1.1
    assert not own.full_is_due()


def test_marks_move_and_are_forgotten(marks: tuple[Watermarks[LaneName], Clock]) -> None:
    own, _ = marks
    at = stored(add()).processable_after
    own.record_scan({("mail", 0): (at, 7)}, 0.001, full=False)
    assert own.mark(("mail", 0), full=False) == (at, 7)
    assert own.mark(("mail", 0), full=True) != (at, 7)
    own.keep([("mail", 1)])
    assert own.mark(("mail", 0), full=False) == own.mark(("mail", 0), full=True)


@pytest.mark.parametrize("apart", ["by their options", "by their number"])
@pytest.mark.parametrize("rings", [True, False])
def test_a_keyed_queue_that_gives_nothing_puts_off_no_full_scan_of_another(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, apart: str, rings: bool
) -> None:
    """A message freed before the marks of the second claim of a round waits 1 s at most."""
    monkeypatch.setattr(lanes_module, "FIRST_LANES", 1)
    lease = 31.0 if apart == "by their options" else 30.0
    rig.options["idle"] = ClaimOptions("sync", lease, 4, 1 << 22)
    rig.options["mail"] = ClaimOptions("sync", 30.0, 4, 1 << 22)
    rig.rooms["sync"] = 10**6
    add("idle", key="k", after=3600)
    insert_all({"key": f"k{n}", "after": n - 600} for n in range(200))
    rig.make("#", poll=600.0)
    for _ in range(4):
        rig.fetcher.fetch(rig.cursor)
    rig.taken.clear()
    freed = add(key="freed", after=-900)
    if rings:
        rig.fetcher.on_next_in_line()
    for _ in range(6):
        rig.fetcher.fetch(rig.cursor)
        rig.clock.now += 0.25
    assert freed.pk in rig.ids()
    assert QueuedMessage.objects.filter(leased_until=None, queue="mail").exists()


def test_constant_rings_do_not_stop_takeovers(rig: Rig) -> None:
    """Many producers ring at each turn: lapsed messages are taken over nevertheless."""
    rig.make(poll=1.0)
    rig.settle()
    lapsed = add(leased=-1, attempts=1)
    for _ in range(200):
        rig.fetcher.on_ring()
        rig.clock.now += rig.fetcher.fetch(rig.cursor) + 0.01
        if rig.taken:
            break
    assert rig.ids() == [lapsed.pk]
