"""The settings and callbacks shared by all threads of a worker that run messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from django_mq.executor.ended import Ended, failure_end
from django_mq.executor.outage import Outage
from django_mq.messages import ClaimedRow, Delivery
from django_mq.policy.backoff import RetryPolicy

#: The shortest lease is this many times the longest linger, so that no list needs renewals.
LINGER_SHARE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The database, and the rules for leases, retries and lost connections.

    `policy_of` returns the retry policy of a row, `lease_of` the lease of a queue in seconds;
    `shortest_lease` is the smallest lease. `on_settled` is called, from any thread, with deliveries
    whose end is committed, or whose lease was lost.
    """

    alias: str
    outage: Outage
    policy_of: Callable[[ClaimedRow], RetryPolicy]
    lease_of: Callable[[str], float]
    shortest_lease: float
    on_settled: Callable[[Sequence[Ended]], None]

    @property
    def max_linger(self) -> float:
        """The longest time, in seconds, that messages wait for their list to fill."""
        return self.shortest_lease / LINGER_SHARE

    @property
    def unlocked_for(self) -> float:
        """The seconds after its claim or renewal in which a delivery may start without a lock."""
        return self.shortest_lease / 2

    def failure_end(self, delivery: Delivery, error: BaseException, seconds: float) -> Ended:
        """Decide the outcome of a delivery whose handler raised `error` after `seconds`."""
        policy = self.policy_of(delivery._row)
        return failure_end(delivery, policy, error, seconds=seconds)
