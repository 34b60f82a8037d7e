"""The progress of a slice, and the deliveries that run again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from django_mq.executor.calls import is_conflict
from django_mq.executor.ended import Ended
from django_mq.executor.settlement import MAX_CONFLICTS
from django_mq.executor.tasks import Line, Task

#: How often the connection may be lost after a delivery ran, before the delivery is charged.
#: Without this limit, a handler that exceeds a limit of the server or a pooler would run for ever.
MAX_LOSSES = 3
#: PostgreSQL keeps 64 subtransactions of a transaction in shared memory; if there are more, the
#: snapshots of all other backends overflow. The rest is for the blocks of the last handler.
MAX_SAVEPOINTS = 50


class SliceAborted(Exception):
    """A handler ended the transaction of its slice, or its connection was lost."""


class NotLocked(Exception):
    """Another session had locked or removed a message when its handler used the connection."""


class SettleIncomplete(Exception):
    """The settle changed fewer rows than it was given: some leases are no longer ours."""


@dataclass(slots=True)
class RanDeliveries:
    """Deliveries that ran: `ended[i]` is how the delivery of `tasks[i]` ended.

    `hooks[id]` are the on_commit hooks registered by the message with that id, or by the batch that
    begins with it.
    """

    tasks: list[Task] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    hooks: dict[int, list[Any]] = field(default_factory=dict)

    def clear(self) -> None:
        """Discard the deliveries: they run again."""
        self.tasks, self.ended, self.hooks = [], [], {}


@dataclass(slots=True)
class SliceState:
    """The progress of one slice.

    `bound` deliveries used the connection, or were locked before they started: they commit or roll
    back with the transaction. `unbound` deliveries used nothing: they are settled after the
    transaction, whatever its outcome. `settled` deliveries wait for their hooks and reports, which
    come last.

    The other tasks run in later slices. `left` did not start, or ran in a transaction that a
    neighbour ended. `to_rerun` run again, each alone. `not_locked` have rows that could not be
    locked: their leases may be lost.

    `current` is the index in `tasks` of the delivery that runs, or runs next. The `running` tasks,
    one delivery or a batch, have time until `deadline`, and no delivery starts after `until` (both
    on the monotonic clock), nor once the slice is `stopped`. `attempted`: a handler was called.
    With `announcing`, each start is announced by a signal. `seconds`: how long the deliveries ran,
    without the settle and the commit.

    `driver` is the connection when the slice began, and `settings` are those of its transaction.
    `begun`: BEGIN was sent. From then on, `xid` is the id of the transaction, `missing` has the ids
    of messages that it could not lock, and `expired` those of messages that have expired.
    `savepoints` counts those that were opened, also by `atomic()` in handlers. `committing`: only
    COMMIT is left.

    `aborted`: a handler ended the transaction, that of the `culprit` unless a batch ran. Do not
    infer this from the slice's error: Django may replace it with a reconnect error. `halted_lines`
    are the keys and ordered queues in which a delivery did not end well: nothing behind it starts.
    Nor do deliveries from the queues in `backing_off`, which a failure in this slice slowed down.
    """

    tasks: Sequence[Task]
    settings: dict[str, str]
    until: float
    announcing: bool = False
    bound: RanDeliveries = field(default_factory=RanDeliveries)
    unbound: RanDeliveries = field(default_factory=RanDeliveries)
    settled: list[RanDeliveries] = field(default_factory=list)
    left: list[Task] = field(default_factory=list)
    to_rerun: list[Task] = field(default_factory=list)
    not_locked: list[Task] = field(default_factory=list)
    halted_lines: set[Line | None] = field(default_factory=set)
    backing_off: set[str] = field(default_factory=set)
    seconds: float = 0.0
    current: int = 0
    running: Sequence[Task] = ()
    deadline: float = 0.0
    begun: bool = False
    xid: str | None = None
    missing: set[int] = field(default_factory=set)
    expired: set[int] = field(default_factory=set)
    driver: Any = None
    committing: bool = False
    aborted: bool = False
    culprit: Ended | None = None
    savepoints: int = 0
    stopped: bool = False
    attempted: bool = False

    def rerun_bound(self) -> None:
        """Discard the ends of the bound deliveries: each runs again, alone."""
        self.to_rerun.extend(self.bound.tasks)
        self.bound.clear()

    def unstarted(self) -> list[Task]:
        """Return the tasks that did not start."""
        ids = {task.delivery.id for task in self._known()}
        if self.culprit is not None:
            ids.add(self.culprit.delivery.id)
        return [task for task in self.tasks if task.delivery.id not in ids]

    def _known(self) -> Iterable[Task]:
        yield from self.bound.tasks
        yield from self.unbound.tasks
        yield from self.to_rerun
        yield from self.not_locked


@dataclass(slots=True)
class Remainder:
    """The tasks that a slice did not settle.

    Tasks in `left` run next, in order. Tasks in `to_rerun` run again, each alone. Tasks in
    `not_locked` are still ours, but their rows could not be locked: they run later, after the
    others. `seconds`: how long the slice ran.
    """

    left: list[Task] = field(default_factory=list)
    to_rerun: list[Task] = field(default_factory=list)
    not_locked: list[Task] = field(default_factory=list)
    seconds: float = 0.0


class Conflicts:
    """Counts how often other transactions, or a lost connection, undid each delivery.

    The first few times are not charged.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._losses: Counter[int] = Counter()
        #: The ids of deliveries whose effects the database may have refused: these are skipped.
        self.refused_effects: set[int] = set()

    def may_repeat(self, tasks: Sequence[Task], error: BaseException) -> bool:
        """Count `error` if it is a conflict; return whether `tasks` run again uncharged."""
        return is_conflict(error) and self.count(tasks)

    def count(self, tasks: Sequence[Task]) -> bool:
        """Count a conflict of `tasks`; return whether they run again uncharged."""
        self._counts.update(task.delivery.id for task in tasks)
        return all(self._counts[task.delivery.id] <= MAX_CONFLICTS for task in tasks)

    def count_loss(self, task: Task) -> bool:
        """Count a connection lost after `task` ran; return whether that was one loss too many."""
        self._losses[task.delivery.id] += 1
        return self._losses[task.delivery.id] > MAX_LOSSES

    def discard(self, ended: Sequence[Ended]) -> None:
        """Drop the counts of settled deliveries: their next attempts start from zero."""
        if self._counts or self._losses or self.refused_effects:
            for each in ended:
                self.refused_effects.discard(each.delivery.id)
                self._counts.pop(each.delivery.id, None)
                self._losses.pop(each.delivery.id, None)
