"""The order in which a worker tries its lanes, without a database."""

from __future__ import annotations

import pytest

from django_mq.conf import get_settings
from django_mq.worker import lanes as lanes_module
from django_mq.worker import queue_options
from django_mq.worker.lanes import LANE_TTL, Lanes
from django_mq.worker.watermarks import LaneName


def in_order(lanes: Lanes) -> list[LaneName]:
    return [lane for _, group in lanes.groups(lambda lane: None) for lane in group]


def queues(lanes: Lanes) -> str:
    return "".join(queue for queue, _ in in_order(lanes))


def named(text: str) -> list[LaneName]:
    """One lane of priority 0 for each letter."""
    return [(queue, 0) for queue in text]


def test_patterns_as_named_then_priorities_then_names() -> None:
    lanes = Lanes(["mail", "shop.*"])
    seen = [("shop.a", 9), ("mail", 0), ("shop.b", -1), ("shop.b", 9), ("mail", 5)]
    lanes.update(seen, 0.0)
    assert in_order(lanes) == [
        ("mail", 5), ("mail", 0), ("shop.a", 9), ("shop.b", 9), ("shop.b", -1),
    ]  # fmt: skip


def test_lanes_up_to_the_last_that_gave_messages_go_behind_their_equals() -> None:
    lanes = Lanes(["#"])
    lanes.update(named("abcde"), 0.0)
    lanes.pass_turn(in_order(lanes), {("b", 0)})
    assert queues(lanes) == "cdeab"
    lanes.pass_turn(in_order(lanes), {("d", 0), ("c", 0)})
    assert queues(lanes) == "eabcd"


def test_a_turn_never_moves_a_lane_behind_one_that_is_less_preferred() -> None:
    lanes = Lanes(["a", "#"])
    lanes.update([("a", 0), ("b", 5), ("c", 5), ("b", 0)], 0.0)
    lanes.pass_turn(in_order(lanes), {("b", 5)})
    assert in_order(lanes) == [("a", 0), ("c", 5), ("b", 5), ("b", 0)]


def test_all_lanes_of_a_claim_had_their_turn_if_its_rows_are_of_other_priorities() -> None:
    """An ordered queue, and the followers of a key, do not go by priority."""
    lanes = Lanes(["#"])
    lanes.update(named("abc"), 0.0)
    lanes.pass_turn(named("ab"), {("a", 7)})
    assert queues(lanes) == "cab"


def test_after_a_release_the_lane_that_started_nothing_for_longest_is_first() -> None:
    """Whichever lane was claimed from last, and only among equals."""
    lanes = Lanes(["a", "#"])
    lanes.update([("a", 0), *named("bcde"), ("b", 5)], 0.0)
    lanes.pass_turn(named("bc"), {("c", 0)})
    starts = {("a", 0): 9.0, ("b", 5): 8.0, ("b", 0): 3.0, ("c", 0): 1.0, ("d", 0): 2.0}
    lanes.order_by_start(lambda lane: starts.get(lane, 0.0))
    assert in_order(lanes) == [("a", 0), ("b", 5), *named("ecdb")]
    lanes.pass_turn(named("e"), {("e", 0)})
    assert queues(lanes) == "abcdbe"


def test_a_look_keeps_the_turns_and_adds_new_lanes_behind() -> None:
    lanes = Lanes(["#"])
    lanes.update(named("bcd"), 0.0)
    lanes.pass_turn(named("b"), {("b", 0)})
    lanes.update(named("abd"), LANE_TTL)
    assert queues(lanes) == "dba"
    assert lanes.known == named("abd")


def test_new_lanes_are_shuffled_among_their_equals_and_once() -> None:
    lanes = Lanes(["a", "#"], shuffle=list.reverse)
    lanes.update([*named("abc"), ("b", 5), ("d", 5)], 0.0)
    assert in_order(lanes) == [("a", 0), ("d", 5), ("b", 5), *named("cb")]
    lanes.update(named("abcde"), 1.0)
    assert in_order(lanes) == [("a", 0), ("d", 5), ("b", 5), *named("cbed")]


def test_named_queues_are_lanes_before_any_message() -> None:
    lanes = Lanes(["b", "a", "c.#"])
    lanes.update([], 0.0)
    assert queues(lanes) == "ba"


def test_neighbours_share_a_group_but_never_the_first_lanes_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes_module, "FIRST_LANES", 3)
    lanes = Lanes(["#"])
    lanes.update(named("aAbcdE"), 0.0)
    groups = lanes.groups(lambda lane: lane[0].isupper())
    assert [(key, "".join(queue for queue, _ in group)) for key, group in groups] == [
        (True, "AE"), (False, "a"), (False, "bcd"),
    ]  # fmt: skip


def grouped(lanes: Lanes) -> list[str]:
    """The queues of each group; queues in upper case need another statement."""
    groups = lanes.groups(lambda lane: lane[0].isupper())
    return ["".join(queue for queue, _ in group) for _, group in groups]


def test_equal_lanes_of_a_group_need_not_be_neighbours() -> None:
    """Otherwise a worker of many queues of a few kinds would send a claim for each of them."""
    lanes = Lanes(["#"])
    lanes.update(named("ABcd"), 0.0)
    lanes.order_by_start(lambda lane: "cAdB".index(lane[0]))
    assert grouped(lanes) == ["cd", "AB"]


def test_a_group_never_brings_a_lane_before_one_that_is_preferred() -> None:
    lanes = Lanes(["#"])
    lanes.update([("a", 5), ("B", 0), ("c", 0), ("D", -5), ("e", -5)], 0.0)
    assert grouped(lanes) == ["a", "B", "c", "D", "e"]


def test_no_lane_waits_for_its_turn_behind_more_claims_than_lanes() -> None:
    """Each claim is filled by the last lane of its group."""
    lanes = Lanes(["#"])
    lanes.update(named("ABCxyz"), 0.0)
    lanes.order_by_start(lambda lane: "AxByCz".index(lane[0]))
    served = []
    for _ in range(6):
        _, group = next(lanes.groups(lambda lane: lane[0].isupper()))
        lanes.pass_turn(group, {group[0]})
        served.append(group[0][0])
    assert "".join(served) == "AxByCz"


def test_ever_new_queues_take_no_ever_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "REMEMBERED_QUEUES", 3)
    monkeypatch.setattr(queue_options, "REMEMBERED_QUEUES", 3)
    lanes = Lanes(["#"])
    options = queue_options.ClaimOptionsCache(get_settings(), batch_size=None)
    for n in range(9):
        lanes.preference(f"tenant.{n}")
        options.of(f"tenant.{n}")
    assert lanes.preference.cache_info().currsize == 3
    assert options.of.cache_info().currsize == 3
