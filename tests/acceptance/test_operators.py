"""Guarantees 13, 14: operators and workers in a storm lose and repeat nothing."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import pytest
from django.db import connections, transaction
from django.db.models.functions import Now

from django_mq import Message, broadcast, broadcast_many, queues
from django_mq.models import QueuedMessage, UniqueKey
from tests.acceptance.app.witness import Witness
from tests.acceptance.conftest import Queue
from tests.acceptance.processes import Worker
from tests.samples import SEED

#: The number of calls per operator.
DEEDS = 60
KEYS = "abcde"
UNIQUE = 8


class Storm:
    """Several operators and a producer, each in a thread; `removed` are the ids they removed."""

    def __init__(self) -> None:
        #: The name of every message that was stored, by id.
        self.sent: dict[int, str] = {}
        self.removed: set[int] = set()

    def send(self) -> None:
        """Send the initial messages: lines, and messages that die before they succeed."""
        lines = [
            Message(
                "acceptance.line",
                {"name": f"{key}-{n:03}", "line": key, "share": 0.1, "pause": 0.002},
                key=key,
                queue="keyed",
            )
            for n in range(24)
            for key in KEYS
        ]
        dying = [Message("acceptance.fail", {"name": f"fail-{n}", "until": 5}) for n in range(40)]
        with transaction.atomic():
            for message, receipt in zip(
                [*lines, *dying], broadcast_many([*lines, *dying]), strict=True
            ):
                self.sent[receipt.ids[0]] = message.payload["name"]

    def produce(self, seed: int) -> None:
        """Broadcast under a few unique ids again and again."""
        dice = random.Random(seed)
        for number in range(DEEDS):
            name = f"unique-{number}"
            with transaction.atomic():
                receipt = broadcast(
                    "acceptance.write", {"name": name}, unique_id=f"id-{dice.randrange(UNIQUE)}"
                )
            if receipt.outcome == "added":
                self.sent[receipt.ids[0]] = name
        connections.close_all()

    def operate(self, seed: int) -> None:
        """Pause, resume, limit, cancel, requeue, purge and run now, in random order."""
        dice = random.Random(seed)
        for _ in range(DEEDS):
            deed = dice.choice([self.pause, self.limit, self.cancel, self.requeue, self.purge])
            deed(dice)
            queues.run_now(self.some(dice))
        connections.close_all()

    def some(self, dice: random.Random) -> list[int]:
        return dice.sample(sorted(self.sent), 10)

    def pause(self, dice: random.Random) -> None:
        queue = dice.choice(["work", "keyed"])
        queues.pause(queue)
        queues.resume(queue)

    def limit(self, dice: random.Random) -> None:
        queues.limit(dice.choice(["work", "keyed"]), dice.choice([1, 2, None]))

    def cancel(self, dice: random.Random) -> None:
        self.removed |= set(queues.cancel(dice.sample(sorted(self.sent), 1)).ids)

    def requeue(self, dice: random.Random) -> None:
        queues.requeue(queue="work", limit=5)

    def purge(self, dice: random.Random) -> None:
        self.removed |= set(queues.purge("work", limit=1).ids)


@pytest.mark.slow
def test_a_storm_of_operators(start: Callable[..., Worker], queue: Queue, witness: Witness) -> None:
    """Only messages reported as removed are missing; lines stay in order, and never overlap."""
    storm = Storm()
    storm.send()
    workers = [start("--processes", 1, "--threads", 2) for _ in range(2)]
    for worker in workers:
        worker.has_started(1)

    with ThreadPoolExecutor(4) as pool:
        threads = [pool.submit(storm.operate, SEED * 10 + n) for n in range(3)]
        threads.append(pool.submit(storm.produce, SEED))
    for thread in threads:
        thread.result()

    for name in ("work", "keyed"):
        queues.resume(name)
        queues.limit(name, None)

    def end() -> bool:
        """Run the remaining messages until all are done: dead ones are requeued."""
        queues.requeue(queue="work")
        QueuedMessage.objects.filter(leased_until=None, dead_at=None, key=None).update(
            processable_after=Now()
        )
        return queue.empty()

    workers[0].until(end, "an empty queue")
    kept = [name for id, name in storm.sent.items() if id not in storm.removed]
    assert queue.done() == dict.fromkeys(kept, 1)
    assert storm.removed, "the storm removed nothing"
    lines = [name for name, _, _ in queue.effects() if name[:2] in {f"{key}-" for key in KEYS}]
    for _, line in groupby(sorted(lines, key=lambda name: name[0]), lambda name: name[0]):
        ran = list(line)  # sorted() is stable: these are in the order of their effects
        assert ran == sorted(ran)
    assert not [name for name, _, _ in witness.started() if name.startswith("overlap")]
    assert not UniqueKey.objects.exclude(message_id=None).exists()
    for worker in workers:
        worker.tell(signal.SIGTERM)
        assert worker.ends() == 0
