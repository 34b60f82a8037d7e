"""When the steps of the lease keeper are due: renewals, heartbeats, figures."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from django_mq.executor.outage import RECONNECT_WAIT


class KeeperStep(Enum):
    """A step of the lease keeper, in the order in which it takes them."""

    RENEWAL = auto()
    HEARTBEAT = auto()
    FIGURES = auto()


class StepTimes:
    """The times at which steps are due, on the clock of `now`, in seconds; at first 0.

    A step that succeeded is due again after its interval in `every`. A failed one is tried again
    after a wait that doubles up to `max_retry_wait`; only figures wait for their interval.
    """

    def __init__(self, every: Mapping[KeeperStep, float], *, max_retry_wait: float) -> None:
        self._every = every
        self._max_retry_wait = max_retry_wait
        self._due = dict.fromkeys(KeeperStep, 0.0)
        self._retry_wait = RECONNECT_WAIT

    def is_due(self, step: KeeperStep, now: float) -> bool:
        """Return whether to take `step` now."""
        return now >= self._due[step]

    def succeeded(self, step: KeeperStep, now: float) -> None:
        """Note that a step succeeded."""
        self._due[step] = now + self._every[step]

    def failed(self, step: KeeperStep, now: float, *, commits_hang: bool) -> None:
        """Note that a step failed: the next one is a renewal, as soon as this step is due again."""
        soon = now + min(self._retry_wait, self._max_retry_wait)
        self._due[step] = now + self._every[step] if step is KeeperStep.FIGURES else soon
        self.pull_forward(KeeperStep.RENEWAL, self._due[step])
        if commits_hang:  # only a heartbeat shows that they no longer do
            self.pull_forward(KeeperStep.HEARTBEAT, soon)
        self._retry_wait *= 2

    def all_succeeded(self) -> None:
        """Note that no due step failed: the wait for another try is short again."""
        self._retry_wait = RECONNECT_WAIT

    def pull_forward(self, step: KeeperStep, at: float) -> None:
        """Make `step` due at `at`, unless it is due before that."""
        self._due[step] = min(self._due[step], at)

    def seconds_left(self, now: float) -> float:
        """Return the seconds until a step is due."""
        return max(0.0, min(self._due.values()) - now)
