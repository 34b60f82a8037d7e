"""In every order of events, the tables agree with a model.

Each example happens in one transaction, through the public functions and the worker's own code.
`FAULTS_EXAMPLES=1000` plays more examples than the suite does.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from django.db import connection, connections, transaction
from hypothesis import HealthCheck, seed
from hypothesis import settings as plan
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as play

from django_mq import Reject, Retry, RetryPolicy, Snooze, broadcast, handlers, queues
from django_mq.messages import ClaimedRow
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.policy.backoff import fixed
from django_mq.testing import due
from django_mq.worker.inline_run import InlineRun
from django_mq.worker.take_over import take_over
from testproject.shop.models import Product
from tests.faults import model as m
from tests.faults.conftest import SEED

EXAMPLES = int(os.environ.get("FAULTS_EXAMPLES", "15"))
HOUR = 3600.0

SCRIPTS = st.lists(st.sampled_from(m.ACTS), min_size=1, max_size=3).map(tuple)
#: A queue, a script, and the order key or the unique id.
MESSAGES = st.tuples(st.sampled_from(m.QUEUES), SCRIPTS, st.sampled_from(["a", "b", None]))


def run(delivery: Any) -> None:
    """Follow the message's script, after a write that a failure undoes."""
    Product.objects.create(name=str(delivery.payload.get("id", delivery.id)), price=1)
    script = delivery.payload["script"]
    act = script[min(delivery.attempt, len(script)) - 1]
    if act == "fail":
        raise ValueError("as the script says")
    if act == "retry":
        raise Retry
    if act == "snooze":
        raise Snooze(HOUR)
    if act == "reject":
        raise Reject("as the script says")
    if act == "broadcast":
        broadcast(m.PLAIN, {"script": ["ack"], "id": -delivery.id})


class Workers(InlineRun):
    """All workers in one: one message at a time, lapsed ones first."""

    def _claim(self) -> list[ClaimedRow]:
        self._own(m.LINE)
        for queue in m.QUEUES:
            looks = True
            while looks:
                found = take_over(
                    self._cursor(),
                    queues=[queue],
                    claimer="drain:0",
                    lease=HOUR,
                    limit=1,
                    max_bytes=1,
                )
                if found.taken:
                    return found.taken
                looks = bool(found.dead or found.released)  # others may have lapsed behind it
        return super()._claim()


class Machine(RuleBasedStateMachine):
    """The system beside its model."""

    @initialize()
    def begin(self) -> None:
        self.model = m.Model()
        # One per example: dead rows of one that never ends could not be pruned.
        self.block: Any = transaction.atomic()
        self.block._from_testcase = True  # the way Django's TestCase marks its own
        self.block.__enter__()
        self.isolated = handlers.isolated()
        self.isolated.__enter__()
        for queue in m.QUEUES:
            policy = RetryPolicy(max_attempts=m.ATTEMPTS, backoff=fixed(HOUR))
            # A function is the handler of only one subscription.
            handlers.handler(queue, queue=queue, name=queue, retry=policy)(lambda each: run(each))

    def teardown(self) -> None:
        if hasattr(self, "block"):
            self.isolated.__exit__(None, None, None)
            transaction.set_rollback(True)
            self.block.__exit__(None, None, None)

    @rule(several=st.lists(MESSAGES, min_size=1, max_size=5))
    def broadcasts(self, several: list[tuple[str, tuple[str, ...], str | None]]) -> None:
        for queue, script, name in several:
            key = name if queue == m.KEYED else None
            unique_id = name if queue == m.PLAIN else None
            with transaction.atomic():
                receipt = broadcast(queue, {"script": script}, key=key, unique_id=unique_id)
            if (taker := self.model.taker(queue, unique_id)) is not None:
                assert receipt.outcome == "duplicate"
                assert receipt.copies[0].id == taker.id
            else:
                assert receipt.outcome == "added"
                self.model.add(m.Modelled(receipt.ids[0], queue, script, key, unique_id))

    @precondition(lambda self: self.model.messages)
    @rule(time_passes=st.booleans())
    def workers_run_everything(self, time_passes: bool) -> None:
        Workers(connections["default"], queue=None).run()
        self.model.drain()
        if time_passes:
            self.time_passes()

    @precondition(lambda self: self.model.messages)
    @rule(times=st.integers(1, 3))
    def workers_claim_and_die(self, times: int) -> None:
        for _ in range(times):
            before = {*_states().items()}
            claimed = Workers(connections["default"], queue=None)._claim()
            for id in {id for id, _ in {*_states().items()} - before}:
                message = self.model.messages[id]
                assert self.model.may_start(message)
                self.model.start(message)
            assert claimed or not any(map(self.model.may_start, self.model.messages.values()))

    @precondition(lambda self: self.model.select([m.LEASED]))
    @rule()
    def leases_lapse(self) -> None:
        QueuedMessage.objects.filter(leased_until__isnull=False).update(
            leased_until="2020-01-01T00:00:00Z"
        )
        for each in self.model.messages.values():
            each.lapsed = each.state == m.LEASED

    @precondition(lambda self: self.model.select([m.DELAYED]))
    @rule()
    def time_passes(self) -> None:
        due()
        for each in self.model.messages.values():
            if each.state == m.DELAYED:
                each.state = m.WAITING

    @precondition(lambda self: self.model.messages and not self.model.paused)
    @rule(queue=st.sampled_from(m.QUEUES))
    def pauses(self, queue: str) -> None:
        queues.pause(queue)
        self.model.paused.add(queue)

    @precondition(lambda self: self.model.paused)
    @rule()
    def resumes(self) -> None:
        queues.resume(self.model.paused.pop())

    @precondition(lambda self: self.model.messages)
    @rule(data=st.data())
    def cancels(self, data: st.DataObject) -> None:
        if ids := self._some(data):
            changed = queues.cancel(ids)
            waiting = set(self.model.select([m.WAITING, m.DELAYED]))
            assert set(changed.ids) == waiting & set(ids)
            for id in changed.ids:
                del self.model.messages[id]

    @precondition(lambda self: self.model.messages)
    @rule(data=st.data())
    def requeues(self, data: st.DataObject) -> None:
        if ids := self._some(data):
            changed = queues.requeue(ids)
            again = self._requeued(ids)
            assert set(changed.ids) == again
            for id in again:
                message = self.model.messages[id]
                message.state = m.WAITING
                message.max_attempts = max(message.max_attempts, message.attempts + 1)

    @precondition(lambda self: self.model.select([m.DEAD]))
    @rule(queue=st.sampled_from(m.QUEUES))
    def purges(self, queue: str) -> None:
        changed = queues.purge(queue)
        dead = [i for i in self.model.select([m.DEAD]) if self.model.messages[i].queue == queue]
        assert len(changed.ids) == len(dead)
        for id in dead:
            del self.model.messages[id]

    @invariant()
    def the_tables_agree(self) -> None:
        if not hasattr(self, "model"):
            return
        assert _states() == {each.id: each.row for each in self.model.messages.values()}
        names = Product.objects.filter(price=1).values_list("name", flat=True)
        assert sorted(map(int, names)) == sorted(self.model.effects.elements())
        assert FailedAttempt.objects.count() == self.model.failures

    def _some(self, data: st.DataObject) -> list[int]:
        known = sorted(id for id in self.model.messages if id > 0)
        return data.draw(st.lists(st.sampled_from(known), max_size=4, unique=True)) if known else []

    def _requeued(self, ids: list[int]) -> set[int]:
        """Dead letters whose unique id is free; of several with the same id, the last."""
        found: dict[Any, int] = {}
        for id in sorted(ids):
            message = self.model.messages[id]
            if message.state != m.DEAD or self.model.taker(message.queue, message.unique_id):
                continue
            unique = (message.queue, message.unique_id) if message.unique_id else id
            found[unique] = id
        return set(found.values())


def _states() -> dict[int, tuple[str, str, int, int]]:
    """The table's states, in the model's words."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            select coalesce((payload->>'id')::bigint, id), queue,
                   case when dead_at is not null then 'dead'
                        when leased_until is not null then 'leased'
                        when processable_after > statement_timestamp() then 'delayed'
                        else 'waiting' end,
                   attempts, max_attempts
              from django_mq_queuedmessage
            """
        )
        return {row[0]: row[1:] for row in cursor.fetchall()}


@pytest.mark.django_db(transaction=True)
def test_tables_agree_with_the_model(settings: Any) -> None:
    settings.DJANGO_MQ = {"QUEUES": {m.LINE: {"ordered": True}}}
    machine = seed(SEED)(Machine)
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    play(
        machine,
        settings=plan(
            max_examples=EXAMPLES,
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=checks,
        ),
    )
