"""Which ordered queues a worker process hands over to which others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from django_mq.exceptions import InvalidName
from django_mq.policy.routing import Pattern


class UnusedWorker(NamedTuple):
    """A worker process with `unused` threads at its last heartbeat, at `seen_at` (epoch seconds).

    `patterns` are those of the queues that it serves; none means all.

    >>> UnusedWorker("p", ("a.*", "not a pattern!"), 1, 0.0).serves("a.b")
    True
    >>> UnusedWorker("p", ("not a pattern!",), 1, 0.0).serves("a.b")
    False
    """

    id: str
    patterns: tuple[str, ...]
    unused: int
    seen_at: float

    def serves(self, queue: str) -> bool:
        """Return whether it takes messages of `queue`."""
        return not self.patterns or any(_matches(text, queue) for text in self.patterns)


def _matches(pattern: str, queue: str) -> bool:
    with suppress(InvalidName):  # a newer version may know more kinds
        return Pattern(pattern).matches(queue)
    return False


class LineShares:
    """Chooses which queues to hand over, and remembers it.

    After a process got queues, it gets no others before its next heartbeat, which counts them. It
    gets each queue once: if the queue comes back, that process could not own it.

    >>> shares = LineShares()
    >>> p, q = UnusedWorker("p", ("#",), 1, 60.0), UnusedWorker("q", ("a", "b"), 2, 60.0)
    >>> names = lambda chosen: [(queue, worker.id) for queue, worker in chosen]
    >>> names(shares.choose(["a", "b", "c"], [p, q], most=2))
    [('a', 'q'), ('b', 'p')]
    >>> shares.record("a", q)
    >>> names(shares.choose(["b", "c"], [p, q], most=9))
    [('b', 'p')]
    >>> names(shares.choose(["a", "b"], [q._replace(seen_at=70.0)], most=9))
    [('b', 'q')]
    """

    def __init__(self) -> None:
        self._handed: set[tuple[str, str]] = set()
        self._used: dict[str, float] = {}

    def choose(
        self, queues: Iterable[str], workers: Sequence[UnusedWorker], *, most: int
    ) -> list[tuple[str, UnusedWorker]]:
        """Return which of `queues` to hand over, `most` at most, and to which of `workers`.

        Each worker gets as many as it has unused threads; the one with the most is the next.
        """
        unused = {each: each.unused for each in workers if self._used.get(each.id) != each.seen_at}
        chosen: list[tuple[str, UnusedWorker]] = []
        for queue in queues:
            able = [each for each in unused if unused[each] > 0 and self._may_get(each, queue)]
            if able and len(chosen) < most:
                worker = max(able, key=unused.__getitem__)
                unused[worker] -= 1
                chosen.append((queue, worker))
        return chosen

    def record(self, queue: str, worker: UnusedWorker) -> None:
        """Note that `queue` was handed over to `worker`."""
        self._handed.add((queue, worker.id))
        self._used[worker.id] = worker.seen_at

    def _may_get(self, worker: UnusedWorker, queue: str) -> bool:
        return worker.serves(queue) and (queue, worker.id) not in self._handed
