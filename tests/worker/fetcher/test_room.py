"""The lanes and queues that the fetcher claims from, and the room for each."""

from __future__ import annotations

from collections import Counter

import pytest

from django_mq.models import QueuedMessage
from django_mq.worker import lanes as lanes_module
from django_mq.worker.claim_sizes import GROWTH, SIMILAR_CLAIMS
from django_mq.worker.claims import MAX_BATCHES
from django_mq.worker.queue_options import ClaimOptions
from tests.rows import add
from tests.worker.fetcher.conftest import Rig

pytestmark = pytest.mark.django_db(transaction=True)


def test_message_below_the_mark_is_found_within_a_second(rig: Rig) -> None:
    """Committed late, or released, while the claims continue from the mark."""
    rig.make()
    rig.rooms["sync"] = 10**6
    rig.options["mail"] = ClaimOptions("sync", 30.0, 1, 1 << 22)
    for n in range(40):
        add(after=-30 + n / 10)
    for _ in range(5):
        rig.fetcher.fetch(rig.cursor)
    assert len(rig.taken) == 1 + 4 * MAX_BATCHES  # the first one tells their size
    late = add(after=-3600)
    for _ in range(3):
        rig.fetcher.fetch(rig.cursor)
    assert late.pk not in {row.id for row in rig.taken}  # so the marks are used
    rig.clock.now += 1.01
    rig.fetcher.fetch(rig.cursor)
    assert late.pk in {row.id for row in rig.taken[-MAX_BATCHES:]}


def test_message_released_by_this_process_is_found_at_once(rig: Rig) -> None:
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


def test_fetcher_without_room_for_one_kind_wakes_for_the_other(rig: Rig) -> None:
    """Exactly when it falls due, not at the poll."""
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
    """Strictly: nothing from a later queue while an earlier one has anything due."""
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
    """Room is counted per kind: full threads leave the loop its slots."""
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


def test_equal_queues_take_turns(rig: Rig) -> None:
    """A name's place in the alphabet does not let the others starve."""
    for n in range(6):
        add("a", after=-60 + n)
        add("b", after=-60 + n)
    rig.options = {name: ClaimOptions("sync", 30.0, 2, 1 << 22) for name in "ab"}
    rig.make("#")
    rig.fetcher.fetch(rig.cursor)
    rig.fetcher.fetch(rig.cursor)
    assert {row.queue for row in rig.taken} == {"a", "b"}


@pytest.fixture
def two_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "FIRST_LANES", 2)


@pytest.mark.usefixtures("two_first")
def test_lanes_that_fill_a_claim_keep_it_from_all_others(rig: Rig) -> None:
    """With 1,000 queues, most of a claim's time went to lanes that it did not reach."""
    for queue in "abcdef":
        add(queue)
    rig.rooms["sync"] = 2
    rig.make("#")
    rig.fetcher.fetch(rig.cursor)
    assert rig.cursor.asked.count("claim") == 1
    assert rig.cursor.lanes == [2]
    assert sorted(row.queue for row in rig.taken) == ["a", "b"]


@pytest.mark.usefixtures("two_first")
def test_one_round_claims_from_all_lanes_if_the_first_do_not_fill_it(rig: Rig) -> None:
    for queue in "bdf":
        add(queue)
    rig.make("a", "b", "c", "d", "e", "f")
    rig.fetcher.fetch(rig.cursor)
    assert rig.cursor.lanes == [2, 4]
    assert [row.queue for row in rig.taken] == ["b", "d", "f"]


@pytest.mark.usefixtures("two_first")
def test_each_of_many_equal_queues_has_its_turn(rig: Rig) -> None:
    """However much waits in those before it."""
    for queue in "abcde":
        rig.options[queue] = ClaimOptions("sync", 30.0, 2, 1 << 22)
        for n in range(20):
            add(queue, after=-60 + n)
    rig.rooms["sync"] = 10**6
    rig.make("#")
    for _ in range(5):
        rig.fetcher.fetch(rig.cursor)
    assert {row.queue for row in rig.taken} == set("abcde")


@pytest.mark.usefixtures("two_first")
def test_a_queue_without_room_keeps_its_turn(rig: Rig) -> None:
    """Those of another kind go on meanwhile."""
    for queue in "abcd":
        rig.options[queue] = ClaimOptions("async" if queue in "ac" else "sync", 30.0, 1, 1 << 22)
        for n in range(5):
            add(queue, after=-60 + n)
    rig.make("#")
    rig.rooms.update(sync=0, **{"async": 3})
    for _ in range(3):
        rig.fetcher.fetch(rig.cursor)
    assert {row.queue for row in rig.taken} == {"a", "c"}
    rig.taken.clear()
    for _ in "bd":
        rig.rooms["sync"] = 1
        rig.fetcher.fetch(rig.cursor)
    assert "".join(row.queue for row in rig.taken) == "bd"


def test_claim_behind_large_messages_reads_no_more_than_fit(rig: Rig) -> None:
    """It reads and locks all rows up to its limit; small ones show how many batches may fit."""
    rig.make()
    options = rig.options["mail"] = ClaimOptions("sync", 30.0, 10, batch_bytes=10_000)
    claims = rig.fetcher._due._claims
    for n in range(10 + 4):
        add(after=-100 + n)
    rig.fetcher.fetch(rig.cursor)
    assert claims.max_per_claim("mail", options) == 10 * MAX_BATCHES
    for n in range(8):
        add(after=-50 + n, payload="x" * 3_000)
    counts = []
    for _ in range(3):
        before = len(rig.taken)
        rig.fetcher.fetch(rig.cursor)
        counts.append((len(rig.taken) - before, claims.max_per_claim("mail", options)))
    assert counts == [(7, 7), (3, 3), (2, 3)]
    for n in range(30):
        add(after=-20 + n / 10)
    rig.fetcher.fetch(rig.cursor)
    assert claims.max_per_claim("mail", options) == 3 * GROWTH  # large ones may come again


def test_queue_with_large_messages_does_not_slow_down_the_others(rig: Rig) -> None:
    rig.make()
    for queue in ("big", "small"):
        rig.options[queue] = ClaimOptions("sync", 30.0, 10, batch_bytes=10_000)
    for n in range(100):
        add("small", after=-100 + n / 100)
        add("big", after=-100 + n / 100, payload="é" * 1_500)  # two bytes each
    counts = []
    for _ in range(6):
        before = len(rig.taken)
        rig.fetcher.fetch(rig.cursor)
        counts.append(Counter(row.queue for row in rig.taken[before:]))
    assert [each["big"] for each in counts if each["big"]] == [3] * 3
    assert [each["small"] for each in counts if each["small"]] == [10] + [10 * MAX_BATCHES] * 2


def test_queues_of_few_small_messages_are_claimed_together_like_a_long_one(rig: Rig) -> None:
    """After claims that show that payloads are small, also of queues not claimed from before."""
    rig.make()
    names = [f"tenant.{n:02}" for n in range(20)]
    for queue in names:
        rig.options[queue] = ClaimOptions("sync", 30.0, 10, batch_bytes=10_000)
        for _ in range(10):
            add(queue)
    counts = []
    while len(rig.taken) < 10 * len(names):
        before = len(rig.taken)
        rig.fetcher.fetch(rig.cursor)
        counts.append(len(rig.taken) - before)
    assert counts == [10] * SIMILAR_CLAIMS + [10 * MAX_BATCHES] * 3
