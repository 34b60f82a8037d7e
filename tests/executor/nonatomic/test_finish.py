"""finish() and extend(): their writes and the ack together, fenced."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction
from django.utils import timezone

from django_mq import LeaseLost
from django_mq.executor import settle_effects
from django_mq.executor.ended import Ended
from django_mq.models import FailedAttempt
from tests.database import listening
from tests.executor.nonatomic.conftest import NonAtomicBench, on, take_over
from tests.rows import add, stored
from tests.worker.conftest import PATIENCE, Said, attempts_of, effect, effects, waiting

pytestmark = pytest.mark.django_db(transaction=True)


# ---- finish()


def test_finish_commits_its_writes_and_the_ack_together(
    nonatomic: NonAtomicBench, said: Said
) -> None:
    """Guarantee 5."""

    @on()
    def h(delivery: Any) -> None:
        with delivery.finish():
            assert connection.in_atomic_block
            effect(delivery)
            assert (effects(), waiting()) == (set(), {delivery.id})
        assert (effects(), waiting()) == ({delivery.id}, set())

    message = add(handler="h")
    nonatomic.go()
    assert said.ids("message_acked") == [message.pk]
    assert FailedAttempt.objects.count() == 0


def test_nothing_is_settled_after_finish(nonatomic: NonAtomicBench, tmp_path: Path) -> None:
    """Its block has settled the message; only the session that it used is reset."""

    @on()
    def h(delivery: Any) -> None:
        with delivery.finish():
            effect(delivery)

    sent, second = nonatomic.traced(tmp_path)
    nonatomic.nonatomic.run([second])
    *_, commit, reset = sent.queries()
    assert "COMMIT" in commit
    assert "reset all" in reset
    assert nonatomic.settled[1:] == [second.delivery.id]


def test_finish_writes_all_effects_of_an_ack(
    nonatomic: NonAtomicBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, in its own transaction, also those that it does not know."""
    written: list[int] = []
    in_block: list[int] = []

    def effect_of_an_ack(cursor: Any, ended: Sequence[Ended]) -> None:
        assert connection.in_atomic_block
        written.extend(each.delivery.id for each in ended if each.is_over)

    monkeypatch.setitem(settle_effects.EFFECTS, "count it", effect_of_an_ack)

    @on()
    def h(delivery: Any) -> None:
        with delivery.finish():
            pass
        in_block.extend(written)

    message = add(handler="h", unique_id="u")
    nonatomic.go()
    assert in_block == written == [message.pk]


def test_a_zombies_writes_are_fenced(
    nonatomic: NonAtomicBench, said: Said, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee 5: refused before the block runs; its writes are fenced like its ack."""
    seen: list[BaseException] = []

    @on()
    def h(delivery: Any) -> None:
        take_over(delivery.id)  # as if frozen for longer than its lease
        try:
            with delivery.finish():
                effect(delivery)
        except LeaseLost as error:
            seen.append(error)
            raise

    message = add(handler="h")
    nonatomic.go()
    assert len(seen) == 1
    assert str(message.pk) in str(seen[0])
    assert effects() == set()
    assert stored(message).claimed_by == "other:1"
    assert FailedAttempt.objects.count() == 0
    assert "lease_lost" in [getattr(r, "event", "") for r in caplog.records]
    assert said.count("message_acked") == 0


@pytest.mark.parametrize("fails", [True, False])
def test_a_zombie_without_finish_settles_nothing(
    nonatomic: NonAtomicBench, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its writes stay, and the log does not say otherwise."""

    @on()
    def h(delivery: Any) -> None:
        effect(delivery)
        take_over(delivery.id)
        if fails:
            raise ValueError

    message = add(handler="h")
    nonatomic.go()
    stored(message)
    assert (message.claimed_by, message.attempts) == ("other:1", 2)
    assert FailedAttempt.objects.count() == 0
    assert effects() == {message.pk}
    (lost,) = (r for r in caplog.records if getattr(r, "event", "") == "lease_lost")
    assert "its end was not recorded" in lost.getMessage()
    assert lost.getMessage().endswith("what a non-atomic one has committed stays")


def test_an_error_inside_finish_undoes_both(nonatomic: NonAtomicBench) -> None:
    @on()
    def h(delivery: Any) -> None:
        with delivery.finish():
            effect(delivery)
            raise ValueError

    message = add(handler="h")
    nonatomic.go()
    assert effects() == set()
    assert attempts_of(message) == ["ValueError"]


def test_an_error_inside_finish_that_is_caught_is_an_ack_without_it(
    nonatomic: NonAtomicBench,
) -> None:
    @on()
    def h(delivery: Any) -> None:
        try:
            with delivery.finish():
                effect(delivery)
                raise ValueError
        except ValueError:
            with delivery.finish():
                pass

    add(handler="h")
    nonatomic.go()
    assert (effects(), waiting()) == (set(), set())


def test_an_error_after_finish_changes_nothing(nonatomic: NonAtomicBench, said: Said) -> None:
    """The row is deleted: there is nothing to retry."""

    @on()
    def h(delivery: Any) -> None:
        with delivery.finish():
            effect(delivery)
        raise ValueError

    message = add(handler="h")
    nonatomic.go()
    assert (effects(), waiting()) == ({message.pk}, set())
    assert FailedAttempt.objects.count() == 0
    assert said.ids("message_acked") == [message.pk]


def test_an_on_commit_hook_that_raises_does_not_undo_the_ack(
    nonatomic: NonAtomicBench, said: Said, caplog: pytest.LogCaptureFixture
) -> None:
    """The commit stands: neither is the lease lost, nor did the message fail."""

    def hook() -> None:
        raise ZeroDivisionError

    @on()
    def h(delivery: Any) -> None:
        with delivery.finish():
            effect(delivery)
            transaction.on_commit(hook)

    message = add(handler="h")
    nonatomic.go()
    assert (effects(), waiting()) == ({message.pk}, set())
    assert said.ids("message_acked") == [message.pk]
    assert [getattr(r, "event", "") for r in caplog.records] == ["failed_after_finish"]
    assert "ZeroDivisionError" in caplog.text


def test_finish_twice_is_refused(nonatomic: NonAtomicBench) -> None:
    seen: list[str] = []

    @on()
    def h(delivery: Any) -> None:
        with delivery.finish():
            effect(delivery)
        try:
            with delivery.finish():
                seen.append("ran")
        except LeaseLost as error:
            seen.append(str(error))

    message = add(handler="h")
    nonatomic.go()
    assert seen == [
        f"finish() was already called for message {message.pk} in queue mail, attempt 1: it is done"
    ]


@pytest.mark.parametrize(("given", "rings"), [({}, 0), ({"key": "k"}, 1), ({"ordered": True}, 1)])
def test_the_next_of_a_line_need_not_wait_for_the_rest_of_the_handler(
    nonatomic: NonAtomicBench, given: dict[str, Any], rings: int
) -> None:
    heard: list[int] = []

    @on()
    def h(delivery: Any) -> None:
        with listening() as listener:
            with delivery.finish():
                pass
            heard.append(len(listener.heard()))

    add(handler="h", **given)
    assert nonatomic.nonatomic.run(nonatomic.claim_with_keys())
    assert heard == [rings]


def test_finish_inside_a_block_is_refused(nonatomic: NonAtomicBench) -> None:
    """It commits, which it could not inside somebody's transaction."""

    @on()
    def h(delivery: Any) -> None:
        with transaction.atomic(), delivery.finish():
            effect(delivery)

    message = add(handler="h")
    nonatomic.go()
    assert effects() == set()
    assert attempts_of(message) == ["RuntimeError"]


def test_finish_with_a_swallowed_error_commits_nothing(nonatomic: NonAtomicBench) -> None:
    """A rollback that Django does quietly must not look like an ack."""

    @on()
    def h(delivery: Any) -> None:
        with delivery.finish():
            effect(delivery)
            with contextlib.suppress(DatabaseError):
                connection.cursor().execute("select 1/0")

    message = add(handler="h")
    nonatomic.go()
    assert effects() == set()
    assert message.pk in waiting()
    assert len(attempts_of(message)) == 1


@pytest.mark.parametrize("how", ["set_rollback", "close", "raw rollback", "raw commit"])
def test_ending_the_transaction_of_finish_is_no_silent_ack(
    nonatomic: NonAtomicBench, how: str
) -> None:
    """Guarantee 2, for a block that acks first: without a commit it must not count as done."""

    @on()
    def h(delivery: Any) -> None:
        with delivery.finish():
            effect(delivery)
            if how == "set_rollback":
                transaction.set_rollback(True)
            elif how == "close":
                connection.close()
            elif how == "raw rollback":
                connection.cursor().execute("rollback")
            else:
                connection.cursor().execute("commit")

    message = add(handler="h")
    nonatomic.go()
    if how == "raw commit":
        assert (effects(), waiting()) == ({message.pk}, set())
        assert FailedAttempt.objects.count() == 0
    else:
        assert effects() == set()
        assert waiting() == {message.pk}
        assert len(attempts_of(message)) == 1


# ---- extend()


def test_extend_moves_lease_and_deadline(nonatomic: NonAtomicBench) -> None:
    """NSQ-21: a handler may exceed its timeout if it asks in time."""
    seen: list[float] = []

    @on(timeout=1000)
    def h(delivery: Any) -> None:
        for seconds in (None, 5000, 500):
            if seconds:
                delivery.extend(seconds)
            (entry,) = nonatomic.scoreboard.read("bench")
            assert not entry.atomic
            seen.append(entry.deadline - monotonic())
        assert stored(message).leased_until > timezone.now() + timedelta(seconds=4500)

    message = add(handler="h")
    nonatomic.go()
    for left, given in zip(seen, (1000, 5000, 500), strict=True):
        assert given - PATIENCE < left <= given
    assert waiting() == set()
    assert nonatomic.scoreboard.running() == []


def test_extend_refuses_a_zombie(nonatomic: NonAtomicBench) -> None:
    seen: list[str] = []

    @on()
    def h(delivery: Any) -> None:
        take_over(delivery.id)
        try:
            delivery.extend(60)
        except LeaseLost:
            seen.append("refused")

    message = add(handler="h")
    nonatomic.go()
    assert seen == ["refused"]
    assert stored(message).claimed_by == "other:1"
