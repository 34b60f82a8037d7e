"""When an event loop counts as blocked, and when to look at it again."""

from __future__ import annotations

import pytest

from django_mq.executor import loop_watch
from django_mq.executor.async_slots import Slots
from django_mq.executor.loop_watch import ASK_AFTER, BLOCKED_AFTER, REPORT_AFTER, LoopWatch


class Case:
    """A watch with a clock of its own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.moved: list[float] = []
        self.watch = LoopWatch(lambda: self.moved.append(self.now))

    def after(self, seconds: float) -> LoopWatch:
        self.now += seconds
        return self.watch


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    case = Case()
    monkeypatch.setattr(loop_watch, "monotonic", lambda: case.now)
    return case


def test_a_busy_loop_is_not_blocked(case: Case) -> None:
    """Each turn takes long, but less than BLOCKED_AFTER: nobody is poked, nothing is reported."""
    for _ in range(20):
        case.watch.ask()
        assert not case.after(0.9 * BLOCKED_AFTER).blocked()
        case.watch.moved()
    assert case.watch.is_to_be_reported() is None
    assert case.moved == []


def test_later_questions_do_not_hide_that_the_first_has_no_answer(case: Case) -> None:
    for _ in range(11):
        case.watch.ask()
        case.after(BLOCKED_AFTER / 10)
    assert case.watch.blocked()


def test_a_loop_that_was_not_asked_is_not_blocked(case: Case) -> None:
    assert not case.after(100 * BLOCKED_AFTER).blocked()


def test_blocked_loop_reports_that_it_moves_again(case: Case) -> None:
    case.watch.ask()
    assert case.after(BLOCKED_AFTER).blocked()
    assert not case.watch.moved()
    assert case.moved == [case.now]
    assert not case.watch.blocked()
    assert case.watch.moved()
    assert len(case.moved) == 1


def test_loop_that_moved_unseen_reports_nothing(case: Case) -> None:
    case.watch.ask()
    case.after(BLOCKED_AFTER).moved()
    assert case.moved == []


def test_it_is_asked_only_if_it_has_not_moved_for_a_while(case: Case) -> None:
    assert case.watch.is_to_be_asked()
    case.watch.ask()
    assert not case.after(ASK_AFTER).is_to_be_asked()
    case.watch.moved()
    assert not case.after(ASK_AFTER / 2).is_to_be_asked()
    assert case.after(ASK_AFTER).is_to_be_asked()


def test_it_is_reported_once_each_time_that_it_is_blocked(case: Case) -> None:
    for _ in range(2):
        case.watch.ask()
        assert case.after(60).blocked()  # a frozen process is no reason: the loop gets its time
        assert case.watch.is_to_be_reported() is None
        assert case.after(REPORT_AFTER).is_to_be_reported() == 60 + REPORT_AFTER
        assert case.watch.is_to_be_reported() is None
        case.watch.moved()


def test_the_next_look(case: Case) -> None:
    watch = case.watch
    watch.moved()
    assert watch.look_in(starting=False) == float("inf")
    assert watch.look_in(starting=True) == ASK_AFTER
    case.after(ASK_AFTER).ask()
    assert watch.look_in(starting=False) == float("inf")
    assert watch.look_in(starting=True) == BLOCKED_AFTER
    assert case.after(BLOCKED_AFTER).blocked()
    assert watch.look_in(starting=False) == REPORT_AFTER
    assert watch.look_in(starting=True) == 0.0
    assert case.after(REPORT_AFTER).is_to_be_reported()
    assert watch.look_in(starting=False) == float("inf")


def test_slots_are_used_again_as_calls_end_or_the_loop_moves() -> None:
    """Three calls go on, awaiting something, while a fourth blocks the loop."""
    slots = Slots(8)
    slots.take(4)
    slots.reset()
    assert slots.room() == slots.to_claim(0) == 4 - 4
    slots.end([(1, 1, "me:1")], failed=False, seconds=9.0)
    assert slots.room() == 5 - 3
    assert slots.widen()
    assert slots.room() == 8 - 3
    assert not slots.widen()
