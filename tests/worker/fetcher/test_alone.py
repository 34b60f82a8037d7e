"""Queues that are claimed alone resume at marks, but only while expensive full scans rest."""

from __future__ import annotations

from typing import Any

import pytest

from django_mq.models import QueuedMessage
from django_mq.policy.line_marks import FRONT
from django_mq.store import ordered_queues
from django_mq.worker import claims as claims_module
from django_mq.worker.queue_options import ClaimOptions
from tests.rows import add
from tests.waiting import until
from tests.worker.fetcher.conftest import Rig

pytestmark = pytest.mark.django_db(transaction=True)

#: Seconds for which full scans rest.
REST = 5.0


@pytest.fixture
def alone(rig: Rig) -> Rig:
    """Claims single messages from `mail`, which has a limit, and from `line`, which is ordered."""
    rig.options["mail"] = ClaimOptions("sync", 30.0, 1, 1 << 22, max_in_flight=1000)
    rig.options["line"] = ClaimOptions("sync", 30.0, 1, 1 << 22, ordered=True)
    rig.owned["line"] = FRONT
    assert ordered_queues.own(rig.cursor, queue="line", worker="rig", lease=600.0)
    return rig.make(poll=600.0)


def take_all(rig: Rig) -> list[int]:
    """Claim and delete until nothing is left; return the ids."""
    ids = []
    while QueuedMessage.objects.exists():
        rig.fetcher.fetch(rig.cursor)
        QueuedMessage.objects.filter(leased_until__isnull=False).delete()
        ids += rig.ids()
    return ids


def id_before_the_mark(rig: Rig) -> int:
    """Claim from `line` until its mark has moved: transactions of other databases hold it up."""
    reserved = add("line", ordered=True).pk

    def moves() -> bool:
        add("line", ordered=True)
        rig.fetcher.on_freed()
        take_all(rig)
        return rig.owned["line"].first > reserved

    until(moves, "the mark moves")
    return reserved


def let_full_scans_rest(rig: Rig, queue: str) -> None:
    """As after two expensive ones."""
    rig.marks[f"alone {queue}"]._allowed_at = rig.clock.now + REST


@pytest.mark.parametrize("given", [{"queue": "mail"}, {"queue": "line", "ordered": True}])
def test_message_before_a_mark_is_found_by_the_next_full_scan(
    alone: Rig, given: dict[str, Any]
) -> None:
    """It was committed late, or requeued. Meanwhile the worker neither spins nor believes it is
    done."""
    reserved = add(**given).pk
    QueuedMessage.objects.all().delete()
    for n in range(20):
        add(after=n - 60, **given)
    take_all(alone)
    # Transactions of other tests may keep the claims from moving it.
    alone.owned["line"] = alone.owned["line"]._replace(first=reserved + 1)
    let_full_scans_rest(alone, given["queue"])
    early = add(id=reserved, after=-3600, **given)
    behind = add(after=-1, **given)
    alone.fetcher.on_ring()
    assert alone.settle(maximum=1.0) > REST / 2
    assert alone.ids() == [behind.pk]
    assert not alone.fetcher.empty
    QueuedMessage.objects.filter(pk=behind.pk).delete()
    alone.clock.now += REST
    alone.settle()
    assert alone.ids() == [early.pk]
    assert alone.fetcher.empty


def test_other_queues_continue_while_full_scans_rest(alone: Rig) -> None:
    """Those that are still unknown, and those with something that falls due."""
    reserved = id_before_the_mark(alone)
    let_full_scans_rest(alone, "line")
    add("line", ordered=True, id=reserved, after=-60)
    fresh, _ = add("fresh"), add("later", after=REST / 2)
    alone.fetcher.on_ring()
    assert 1.0 < alone.settle(maximum=1.0) <= REST / 2
    assert alone.ids() == [fresh.pk]


def test_a_worker_with_a_message_before_a_mark_is_not_done(alone: Rig) -> None:
    """A poll found it, for nobody rang."""
    reserved = id_before_the_mark(alone)
    alone.settle()
    assert alone.fetcher.empty
    let_full_scans_rest(alone, "line")
    add("line", ordered=True, id=reserved, after=-60)
    alone.fetcher._poll_at = alone.clock.now
    alone.settle(maximum=1.0)
    assert not alone.fetcher.empty


def test_with_keys_a_limited_queue_is_scanned_from_the_front(alone: Rig) -> None:
    """A message that is freed when the one before it ends lies there."""
    for n in range(5):
        add(key=f"k{n}", after=n - 60)
    take_all(alone)
    let_full_scans_rest(alone, "mail")
    early = add(key="k", after=-3600)
    alone.fetcher.on_ring()
    alone.settle()
    assert alone.ids() == [early.pk]


def test_skipped_scan_does_not_count_as_a_full_scan(
    alone: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it end a rest: of two scans, the quicker one counts."""
    marks = alone.marks["alone line"]
    marks.record_scan({}, 1.0, full=True, rest_key=alone.options["line"])
    monkeypatch.setattr(alone.fetcher._claims, "_has_any", lambda queue: queue == "line")
    add("line", ordered=True)
    alone.settle()
    assert alone.ids() == []
    marks.record_scan({}, 1.0, full=True, rest_key=alone.options["line"])
    assert marks.full_in() > REST


def test_counts_at_the_limit_do_not_pass_for_quick_scans(
    alone: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two expensive scans of the lanes, the queue is at its limit."""
    alone.options["mail"] = alone.options["mail"]._replace(max_in_flight=1)
    monkeypatch.setattr(claims_module, "perf_counter", lambda: alone.cursor.asked.count("claim"))
    marks = alone.marks["alone mail"]
    for _ in range(2):
        message = add()
        alone.fetcher.on_ring()
        alone.settle()
        assert alone.ids() == [message.pk]
        add(after=-1)
        alone.fetcher.on_ring()
        alone.settle()
        assert alone.ids() == []
        QueuedMessage.objects.all().delete()
    assert marks.full_in() > 0


def test_marks_of_queues_that_are_gone_are_forgotten(
    alone: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    add("line", ordered=True), add()
    take_all(alone)
    assert {"alone line", "alone mail"} <= alone.marks.keys()
    alone.clock.now += 3600
    alone.settle()
    assert not {"alone line", "alone mail"} & alone.marks.keys()
