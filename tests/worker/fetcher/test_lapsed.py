"""Lapsed rows and the fetcher."""

from __future__ import annotations

import pytest

from django_mq.models import QueuedMessage
from django_mq.worker.fetcher import RENEWALS_AFTER_OUTAGE
from django_mq.worker.lapsed_fetcher import SUSPECTS_AFTER
from django_mq.worker.queue_options import ClaimOptions
from tests.rows import add, stored
from tests.worker.fetcher.conftest import Rig

pytestmark = pytest.mark.django_db(transaction=True)


def test_lapsed_rows_come_before_the_backlog(rig: Rig) -> None:
    """Guarantee 6: regardless of the backlog."""
    for n in range(20):
        add(after=-600 + n)
    lapsed = add(leased=-1, attempts=1)
    dead = add(leased=-1, attempts=20)
    rig.make()
    rig.fetcher.fetch(rig.cursor)
    assert rig.taken[0].id == lapsed.pk
    assert stored(dead).dead_reason == "exhausted"


def test_a_new_process_takes_over_no_suspect_while_other_messages_are_due(rig: Rig) -> None:
    """If it ends the host, each new worker would begin with it, and run nothing else."""
    suspect = add(leased=-1, attempts=2, suspect=True)
    due, lapsed = add(), add(leased=-1, attempts=1)
    rig.rooms["sync"] = 2
    rig.make()
    rig.fetcher.fetch(rig.cursor)
    assert rig.ids() == [lapsed.pk, due.pk]
    waiting = add()
    rig.rooms["sync"] = 0
    rig.pass_time(SUSPECTS_AFTER)
    rig.rooms["sync"] = 2
    rig.fetcher.fetch(rig.cursor)
    assert rig.ids() == [suspect.pk, waiting.pk]


def test_a_new_process_takes_over_a_suspect_at_once_if_nothing_else_is_due(rig: Rig) -> None:
    due, suspect = add(), add(leased=-1, attempts=2, suspect=True)
    rig.make()
    before = rig.clock.now
    rig.settle()
    assert rig.ids() == [due.pk, suspect.pk]
    assert rig.clock.now < before + 1.0


def test_an_outage_of_a_new_process_also_puts_off_what_it_left_out(rig: Rig) -> None:
    """Its next look would take over what living processes are about to renew."""
    rig.rooms["sync"] = 1
    add()
    add(leased=600, attempts=1)
    rig.make()
    rig.fetcher.fetch(rig.cursor)  # leaves out suspects, if there were any
    rig.ids()
    rig.rooms["sync"] = 10
    lapsed = add(leased=-1, attempts=1)
    rig.fetcher.postpone_lapsed()
    rig.pass_time(RENEWALS_AFTER_OUTAGE - 0.1)
    assert rig.ids() == []
    rig.pass_time(2.0)
    assert rig.ids() == [lapsed.pk]


def test_living_processes_renew_their_leases_after_an_outage_before_others_look(rig: Rig) -> None:
    """All of them lapsed while the database was away, and so did the heartbeats."""
    rig.make()
    rig.settle()
    lapsed = add(leased=-1, attempts=1)
    rig.fetcher.postpone_lapsed()
    rig.pass_time(RENEWALS_AFTER_OUTAGE - 0.1)
    assert rig.ids() == []
    assert not rig.fetcher.empty
    rig.pass_time(2.0)
    assert rig.ids() == [lapsed.pk]


def test_many_lapsed_rows_need_not_many_polls(rig: Rig) -> None:
    """A claim has room for a few: a whole host's messages are not taken at a few a second."""
    for _ in range(30):
        add(leased=-1, attempts=1)
    rig.options["mail"] = ClaimOptions("sync", 30.0, 4, 1 << 22)
    rig.make(poll=600.0)
    rig.settle()
    assert len(rig.taken) == 30


def test_dead_letter_of_a_takeover_frees_its_follower_at_once(rig: Rig) -> None:
    """The row dies without a run, so no settle frees its line."""
    rig.options["mail"] = ClaimOptions("sync", 30.0, 100, 1 << 22, skip_dead=True)
    rig.make()
    rig.settle()
    head = add(key="k", leased=-1, attempts=3, max_attempts=3)
    follower = add(key="k", blocked_by=head.pk)
    rig.clock.now += 1.0
    rig.settle()
    assert stored(head).dead_reason == "exhausted"
    assert rig.ids() == [follower.pk]


def test_lapsed_rows_are_not_forgotten_when_there_was_no_room(rig: Rig) -> None:
    lapsed = add(leased=-1, attempts=1)
    rig.rooms["sync"] = 0
    rig.make(poll=600.0)
    rig.settle()
    assert not rig.fetcher.empty
    rig.rooms["sync"] = 1
    rig.fetcher.fetch(rig.cursor)
    assert rig.ids() == [lapsed.pk]


def test_a_lease_that_lapses_later_is_found_by_the_poll(rig: Rig) -> None:
    message = add(leased=30, attempts=1)
    rig.make(poll=1.0)
    rig.settle()
    assert rig.ids() == []
    QueuedMessage.objects.update(leased_until=message.created_at)
    rig.clock.now += 1.01
    rig.settle()
    assert rig.ids() == [message.pk]
