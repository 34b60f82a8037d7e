"""Build the parts of one run of a worker, and connect them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from django_mq.executor.async_runner import AsyncRunner
from django_mq.executor.async_slots import Slots
from django_mq.executor.ended import DONE, Ended, any_row_kept
from django_mq.executor.executor import Executor
from django_mq.executor.local_queue import LocalQueue
from django_mq.executor.outage import Outage
from django_mq.executor.retry_policies import policies
from django_mq.executor.run_context import RunContext
from django_mq.executor.scoreboard import MonitoredPart
from django_mq.executor.scoreboard_entries import ExecutorEntries
from django_mq.executor.statements import Statements
from django_mq.executor.time_limits import time_limits
from django_mq.executor.watchdog import Link, Watchdog
from django_mq.messages import fence_of
from django_mq.worker.claims import ClaimRouter
from django_mq.worker.commands import CommandRunner
from django_mq.worker.dispatch import Dispatch
from django_mq.worker.fetcher import Fetcher
from django_mq.worker.heartbeat import heartbeat
from django_mq.worker.intake import Intake
from django_mq.worker.lease_keeper import LeaseKeeper, beat_interval
from django_mq.worker.listener import PING_INTERVAL, Listener
from django_mq.worker.liveness import Liveness
from django_mq.worker.maintenance import Maintenance
from django_mq.worker.operation_runner import OperationRunner
from django_mq.worker.ordered_queues import LEASE_SECONDS, OrderedQueues
from django_mq.worker.prefetch import Prefetch
from django_mq.worker.queue_backoff import BackoffLevels
from django_mq.worker.queue_options import ClaimOptionsCache
from django_mq.worker.quota import Quota
from django_mq.worker.recovery import Recovery
from django_mq.worker.resolver import Resolver, line_of
from django_mq.worker.scheduler import Scheduler
from django_mq.worker.wakeup import Wakeup
from django_mq.worker.worker_options import WorkerOptions

#: Batches that a slice of short handlers may have, so that many messages share a commit. The local
#: queue holds at most twice as many: those claimed while a slice runs, and those that run next.
SLICE_BATCHES = 4


class Parts:
    """The parts of one run of `worker`, connected but not started.

    `id` names the worker process, and `on_order` carries out an operator's order.
    """

    def __init__(
        self, worker: WorkerOptions, id: str, *, on_order: Callable[[str, str], None]
    ) -> None:
        self._worker = worker
        self._alias = worker.alias
        self._on_order = on_order
        self._settings = settings = worker.settings
        self._id = id
        self._policy_of = policies(settings, floor=settings.retry_floor)
        #: Set when the drain is over: nothing waits for the database any longer.
        self.giving_up = threading.Event()
        self.wakeup = Wakeup()
        self.outage = Outage(self.giving_up)
        self.watchdog = Watchdog()
        self.statements = Statements(worker.alias, link=self._link())
        #: The rounds of the loop that have begun, and those in which the database refused nothing.
        self.rounds = self.answered_rounds = 0
        self.scoreboard = worker.scoreboard()
        self.liveness = Liveness(
            self.scoreboard, self.watchdog, self.outage, poll_interval=settings.poll_interval
        )
        self.quota = Quota(worker.max_messages, self.scoreboard)
        self.options = ClaimOptionsCache(settings, batch_size=worker.batch_size)
        self._build_running()
        self._build_dispatch()
        self._build_claiming()
        self._build_threads()
        self._build_lease_keeper()
        self._build_listener()

    def _build_running(self) -> None:
        """Build the parts that run messages."""
        worker, batch = self._worker, self._worker.batch
        slice_size = batch * SLICE_BATCHES
        self.prefetch = Prefetch(minimum=worker.threads, maximum=2 * slice_size, batch=batch)
        self._context = RunContext(
            alias=self._alias,
            outage=self.outage,
            policy_of=self._policy_of,
            lease_of=self.options.lease_of,
            shortest_lease=self.options.shortest_lease(),
            on_settled=self._on_settled,
        )
        self.local_queue = LocalQueue(
            batch=batch,
            slice_size=slice_size,
            poke=self.wakeup.poke,
            max_linger=self._context.max_linger,
            slots=Slots(worker.async_slots),
        )
        self.backoffs = BackoffLevels(self._settings, stop_queue=self.local_queue.stop_queue)
        self.executors = [self._executor(number, slice_size) for number in range(worker.threads)]
        self.runner = AsyncRunner(
            self._context,
            local_queue=self.local_queue,
            scoreboard=self.scoreboard,
            first_entry=worker.threads * batch,
            batch=min(batch, worker.async_slots),
            poke=self.wakeup.poke,
            link=self._link(),
        )

    def _executor(self, number: int, slice_size: int) -> Executor:
        """Build executor `number`, whose slices have up to `slice_size` messages."""
        batch = self._worker.batch
        return Executor(
            number,
            self._context,
            local_queue=self.local_queue,
            entries=ExecutorEntries(self.scoreboard, number * batch, batch),
            slice_seconds=self._settings.slice_seconds,
            slice_size=slice_size,
            backoff_queues=self.backoffs.queues,
            link=self._link(),
        )

    def _build_dispatch(self) -> None:
        """Build the part that hands claimed rows to the parts that run them."""
        self.dispatch = Dispatch(
            resolver=Resolver(self._settings, batch_size_of=self.options.batch_size_of),
            local_queue=self.local_queue,
            runner=self.runner,
            backoffs=self.backoffs,
            quota=self.quota,
            statements=self.statements,
            outage=self.outage,
            on_freed=lambda: self.fetcher.on_freed(),
        )
        self.intake = Intake(
            local_queue=self.local_queue,
            runner=self.runner,
            prefetch=self.prefetch,
            quota=self.quota,
            dispatch=self.dispatch,
            backoffs=self.backoffs,
            threads=self._worker.threads,
            handlers_of=self.options.handlers_of,
        )

    def _build_claiming(self) -> None:
        """Build the parts that decide which messages to claim."""
        self.ordered_queues = OrderedQueues(
            self._id,
            self.options.ordered(self._worker.queues),
            on_owned=lambda: self.fetcher.on_freed(),
            busy=lambda queue: self.intake.stuck(self.options.of(queue).kind),
            silent=max(LEASE_SECONDS, 1.5 * beat_interval(self.options.shortest_lease())),
        )
        self.claims = ClaimRouter(
            worker=self._id,
            owned=self.ordered_queues.owned,
            has_any=self.local_queue.unsettled.has_any,
            probing=self.backoffs.probe_started,
            line_limits=self.intake.slow_lines.limits,
            ordered_limit=self.intake.slow_lines.ordered_limit,
            stopped_queues=self.local_queue.stopped_queues,
        )
        self.fetcher = Fetcher(
            patterns=self._worker.queues,
            options=self.options.of,
            intake=self.intake,
            claims=self.claims,
            ordered_queues=self.ordered_queues,
            last_starts=self.local_queue.last_starts,
            poll_interval=self._settings.poll_interval,
        )

    def _build_threads(self) -> None:
        """Build the threads that work from time to time."""
        # A drain cancels the statement. Cutting the link would leave it running in the server.
        self.maintenance = Maintenance(self._alias, self._settings, link=self._link(drains=False))
        self.scheduler = Scheduler(
            self._alias,
            self._settings,
            declares=self._worker.declares,
            on_declared=self._worker.on_declared,
            on_fired=self._on_freed,
            on_turn=self.wakeup.poke,
            link=self._link(),
        )
        self.operation_runner = OperationRunner(
            self._alias,
            poll_interval=self._settings.poll_interval,
            on_freed=self._on_freed,
            on_turn=self.wakeup.poke,
            link=self._link(),
        )
        self.recovery = Recovery(
            self._alias,
            outage=self.outage,
            policy_of=self._policy_of,
            limit_of=time_limits(self._settings),
            on_freed=self._on_freed,
            on_charged=lambda: self.lease_keeper.request_figures(),
            link=self._link(),
        )

    def _build_lease_keeper(self) -> None:
        """Build the lease keeper, and the part that carries out the commands that it reads."""
        self.commands = CommandRunner(
            self._alias,
            worker=self._id,
            scoreboard=self.scoreboard,
            runner=self.runner,
            end_process=self._worker.end_process,
            on_order=self._on_order,
            link=self._link(),
        )
        self.renewal_link = self._link()
        self.lease_keeper = LeaseKeeper(
            alias=self._alias,
            worker=self._id,
            local_queue=self.local_queue,
            lease_of=self.options.lease_of,
            shortest_lease=self.options.shortest_lease(),
            heartbeat=self._heartbeat,
            on_heartbeat=self.maintenance.on_heartbeat,
            on_commands=self.commands.take,
            probes=self.backoffs.probes,
            link=self.renewal_link,
        )

    def _build_listener(self) -> None:
        """Build the listener, and follow the parts that must move."""
        self.listener: Listener | None = None
        if (listens_on := self._settings.listen_alias(self._alias)) is not None:
            self.listener = listener = Listener(
                listens_on,
                self.wakeup,
                link=(hearing := self._link()),
                on_command=self.lease_keeper.request_heartbeat,
            )
            self.liveness.follow(
                MonitoredPart.LISTENER, PING_INTERVAL, lambda: (listener.steps, hearing.progress())
            )
        link, keeper, poll = self.statements.link, self.lease_keeper, self._settings.poll_interval
        self.liveness.follow(MonitoredPart.LOOP, poll, lambda: (self.rounds, link.progress()))
        self.liveness.follow(
            MonitoredPart.RENEWAL,
            keeper.renew_interval,
            lambda: (keeper.steps, self.renewal_link.progress()),
        )
        self.liveness.follow(MonitoredPart.HEARTBEAT, keeper.beat_interval, lambda: keeper.beats)
        self.liveness.follow_answers(lambda: self.answered_rounds)

    def _link(self, *, drains: bool = True) -> Link:
        """Return a link that the watchdog watches; a drain shortens its waits if it `drains`."""
        return self.watchdog.add(Link(), drains=drains)

    def _on_settled(self, ended: Sequence[Ended]) -> None:
        """Take note of deliveries whose end is committed; from any thread."""
        limited = self.claims.facts.limited
        next_in_line = False
        for each in ended:
            row = each.delivery._row
            if row.key is not None or row.ordered:
                next_in_line = True
                if each.settled not in DONE and (line := line_of(row)):
                    self.local_queue.halt_line(line)
            elif row.queue in limited:
                next_in_line = True
        if self.backoffs.active and self.backoffs.record(ended):
            self.wakeup.poke()
        self.local_queue.unsettled.remove([fence_of(each.delivery._row) for each in ended])
        if any_row_kept(ended):
            self._on_freed()
        elif next_in_line:
            self.fetcher.on_next_in_line()
            self.wakeup.poke()

    def _on_freed(self) -> None:
        self.fetcher.on_freed()
        self.wakeup.poke()

    def _heartbeat(self) -> dict[str, Any]:
        return heartbeat(
            self._worker,
            local_queue=self.local_queue,
            scoreboard=self.scoreboard,
            listener=self.listener,
        )
