"""How far a slice came, and what of it is to run again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from django_mq.worker.calling import is_conflict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_mq.handlers import Handler
    from django_mq.worker.ending import Ended
    from django_mq.worker.locking import Asked
    from django_mq.worker.tasks import Line, Task

#: So often a delivery may fall victim to others before it counts as a failed attempt.
MOST_CONFLICTS = 20
#: And so often the server may be gone when it has run, before that is its own fault: a handler
#: that outlasts a server's or a pooler's limit would otherwise run for ever, uncharged.
MOST_LOSSES = 3


class Gone(Exception):
    """The transaction ended under a handler."""


class NotLocked(Exception):
    """A handler ran while the lock was asked for, and somebody else had the row."""


class Lost(Exception):
    """Settling changed fewer rows than it should: some are no longer ours."""


class Late(NamedTuple):
    """A message whose lock was asked for when its handler first used its connection."""

    task: Task
    asked: Asked


@dataclass(slots=True)
class Progress:
    """How far one slice came.

    `ran` and `ended` go together. `gone` says that the transaction ended under a handler: the
    `culprit`, unless that was a batch, whose messages are to run again one by one. `locked` are
    still ours, but somebody has their rows. `halted` are lines in which something did not end
    well: what comes after it in them does not start; nor does anything else of the queues in
    `eased`, which are to back off. `announcing`: somebody wants to hear of starts. `running` has
    time until `deadline`; `users` are the handlers that used their connection; `owners` the ids of
    the messages whose the hooks are, in their order.

    `aloof`: nothing was locked before it ran, and of what ran only `late` used the connection:
    nothing of the others is lost with the transaction.
    """

    started: float
    announcing: bool = False
    ended: list[Ended] = field(default_factory=list)
    ran: list[Task] = field(default_factory=list)
    left: list[Task] = field(default_factory=list)
    again: list[Task] = field(default_factory=list)
    locked: list[Task] = field(default_factory=list)
    halted: set[Line | None] = field(default_factory=set)
    eased: set[str] = field(default_factory=set)
    hooks: list[Any] = field(default_factory=list)
    xid: str | None = None
    driver: Any = None
    gone: bool = False
    culprit: Ended | None = None
    savepoints: int = 0
    committing: bool = False
    stopped: bool = False
    began: bool = False
    running: Any = None
    deadline: float = 0.0
    owners: list[int] = field(default_factory=list)
    users: set[Handler] = field(default_factory=set)
    aloof: bool = False
    late: Late | None = None

    def not_begun(self) -> None:
        """Nothing that ran counts."""
        self.ended, self.ran, self.left, self.again = [], [], [], []

    def forget(self, task: Task) -> None:
        """Nothing of `task` counts, which was the last that ran."""
        if self.ran and self.ran[-1] is task:
            del self.ran[-1], self.ended[-1]
        self.again = [each for each in self.again if each is not task]


@dataclass(slots=True)
class Remainder:
    """What a slice did not settle: `left` did not start, `again` runs again, each alone.

    The rows of `locked` are still ours, but somebody had them locked: later, after the others.
    """

    left: list[Task] = field(default_factory=list)
    again: list[Task] = field(default_factory=list)
    locked: list[Task] = field(default_factory=list)


class Conflicts:
    """How often each delivery was the victim of others; some times are free."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._losses: Counter[int] = Counter()

    def may_repeat(self, tasks: Sequence[Task], error: BaseException) -> bool:
        """Count it if `error` is a conflict; say whether `tasks` run again uncharged."""
        if not is_conflict(error):
            return False
        self._counts.update(task.delivery.id for task in tasks)
        return all(self._counts[task.delivery.id] <= MOST_CONFLICTS for task in tasks)

    def count_loss(self, task: Task) -> bool:
        """Count that the connection was lost after `task` ran; say whether it was too often."""
        self._losses[task.delivery.id] += 1
        return self._losses[task.delivery.id] > MOST_LOSSES

    def forget(self, ended: Sequence[Ended]) -> None:
        """These are settled: their next attempts begin anew."""
        if self._counts or self._losses:
            for each in ended:
                self._counts.pop(each.delivery.id, None)
                self._losses.pop(each.delivery.id, None)
