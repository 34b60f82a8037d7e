"""The lanes that a worker claims from, and the order in which it tries them.

A lane is one queue at one priority.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, groupby
from operator import itemgetter
from typing import TypeVar

from django_mq.policy.routing import Pattern
from django_mq.worker.queue_options import REMEMBERED_QUEUES
from django_mq.worker.watermarks import LaneName

#: Seconds for which a lane is still claimed from after a poll last saw a message in it.
LANE_TTL = 60.0
#: How many lanes are claimed from before the others. Mostly they fill the claim, and each further
#: lane would cost it as much as a tenth of a message.
FIRST_LANES = 50

Key = TypeVar("Key")


class Lanes:
    """The known lanes of the queues that match `patterns`.

    They are in the order of the patterns, then of the priorities. Equal lanes take turns at being
    first: a claim uses up the turn of its lanes, a release gives it to lanes that started nothing.
    `shuffle` puts new lanes in order, in place. By name, each successor of a process that was ended
    for a handler that hangs would begin with the same queue, and those behind it never start.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        *,
        shuffle: Callable[[list[LaneName]], None] = lambda lanes: None,
    ) -> None:
        self._shuffle = shuffle
        self._patterns = [Pattern(text) for text in patterns]
        self._fixed = [(text, 0) for text in patterns if "*" not in text and "#" not in text]
        self._seen_at: dict[LaneName, float] = {}
        # Equal lanes, by preference and priority. The inner dictionaries serve as ordered sets.
        self._equals: dict[tuple[int, int], dict[LaneName, None]] = {}
        #: Returns the index of the first pattern that a queue matches; None if it matches none.
        self.preference = lru_cache(REMEMBERED_QUEUES)(self._preference)
        #: Every known lane, sorted.
        self.known: list[LaneName] = []

    def update(self, lanes: Iterable[LaneName], now: float) -> None:
        """Add `lanes`, in which a poll saw messages at `now`; forget lanes not seen for long."""
        self._seen_at.update(dict.fromkeys(lanes, now))
        self._seen_at = {lane: at for lane, at in self._seen_at.items() if now - at < LANE_TTL}
        known = {*self._fixed, *self._seen_at}
        self.known = sorted(known)
        ordered = dict.fromkeys(lane for lane in self._in_order() if lane in known)
        new = [lane for lane in self.known if lane not in ordered]
        self._shuffle(new)
        ordered |= dict.fromkeys(new)
        self._equals = {}
        for lane in sorted(ordered, key=self._rank):
            self._equals.setdefault(self._rank(lane), {})[lane] = None

    def groups(self, key: Callable[[LaneName], Key]) -> Iterator[tuple[Key, list[LaneName]]]:
        """Yield lanes with equal keys; the first FIRST_LANES apart from the others.

        Lanes of equal rank with the same key follow the first of them, so that one claim serves
        them: their turns still come round, since each claim moves some lanes of its own group
        behind the others.
        """
        lanes = self._in_order()
        for part in lanes[:FIRST_LANES], lanes[FIRST_LANES:]:
            for shared, groups in groupby(self._gathered(part, key), itemgetter(0)):
                yield shared, [lane for _, group in groups for lane in group]

    def pass_turn(self, lanes: Sequence[LaneName], taken: Collection[LaneName]) -> None:
        """Move `lanes`, up to the last one that is in `taken`, behind their equals."""
        last = max((n for n, lane in enumerate(lanes) if lane in taken), default=len(lanes))
        for lane in lanes[: last + 1]:
            equals = self._equals[self._rank(lane)]
            del equals[lane]
            equals[lane] = None

    def order_by_start(self, last_start: Callable[[LaneName], float]) -> None:
        """Order equal lanes by their last start, the longest ago first.

        For when claimed messages were released unstarted. Their lanes must not wait for another
        turn, nor simply get this one back: an equal lane may have waited for longer.
        """
        for rank, equals in self._equals.items():
            self._equals[rank] = dict.fromkeys(sorted(equals, key=last_start))

    def _gathered(
        self, lanes: Sequence[LaneName], key: Callable[[LaneName], Key]
    ) -> Iterator[tuple[Key, list[LaneName]]]:
        for _, equals in groupby(lanes, self._rank):
            by_key: dict[Key, list[LaneName]] = {}
            for lane in equals:
                by_key.setdefault(key(lane), []).append(lane)
            yield from by_key.items()

    def _in_order(self) -> list[LaneName]:
        return list(chain.from_iterable(self._equals.values()))

    def _rank(self, lane: LaneName) -> tuple[int, int]:
        queue, priority = lane
        return self.preference(queue) or 0, -priority

    def _preference(self, queue: str) -> int | None:
        for index, pattern in enumerate(self._patterns):
            if pattern.matches(queue):
                return index
        return None
