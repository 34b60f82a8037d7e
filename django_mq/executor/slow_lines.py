"""Which lines of a claim have slow handlers, and how much it takes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from django_mq.executor.pace import WORTH_DIVIDING, Paces
from django_mq.handlers import Handler
from django_mq.policy.line_limits import UNLIMITED, SlowLine, limit_of, line_limits


class SlowLines:
    """Limits what claims take of slow lines; used by the thread that claims.

    `paces` say which handlers are slow. `unused` returns how many of the `threads` that run
    messages have none to start; `handlers_of(queue)`, which handlers a queue may have.
    """

    def __init__(
        self,
        paces: Paces,
        *,
        threads: int,
        unused: Callable[[], int],
        handlers_of: Callable[[str], Iterable[Handler]],
    ) -> None:
        self._paces = paces
        self._threads = threads
        self._unused = unused
        self._handlers_of = handlers_of
        self._left_all = False

    def limits(self, handlers: Sequence[str]) -> list[int]:
        """Return the most messages to claim of each of some lines, given their handlers."""
        by_handler = {name: self._slow(name) for name in set(handlers)}
        self._left_all = False
        if not any(by_handler.values()):
            return [UNLIMITED] * len(handlers)
        lines = [by_handler[name] for name in handlers]
        limits = line_limits(lines, unused=self._unused(), threads=self._threads)
        self._left_all = 0 in limits and len(lines) <= self._threads
        return limits

    def ordered_limit(self, queue: str) -> int:
        """Return the most messages to claim of an ordered queue, by the slowest of its handlers.

        It stays where it is claimed, so its messages take the room of others while they wait.
        """
        slow = filter(None, (self._slow(each.name) for each in self._handlers_of(queue)))
        return min(map(limit_of, slow), default=UNLIMITED)

    def wait_for_thread(self) -> bool:
        """Return whether a claim would leave all slow lines, since no thread is unused."""
        return self._left_all and not self._unused()

    def _slow(self, handler: str) -> SlowLine | None:
        pace = self._paces.find(handler)
        if pace is None or pace.listed or pace.seconds <= WORTH_DIVIDING:
            return None
        return SlowLine(pace.seconds, takes_thread=not pace.is_async)
