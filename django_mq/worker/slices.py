"""A slice: several deliveries in one transaction, settled with what their handlers wrote.

lock -> run each handler behind its lazy savepoint -> settle -> commit; those that are expected not
to use their connection (`aloof.py`) run before there is a transaction. Whatever goes wrong with
the transaction as a whole, nothing is charged twice and nothing is lost: what had run runs again
alone, or is settled by its fence if it turns out to be committed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from django_mq.exceptions import HandlerBrokeTransaction
from django_mq.messages import fence_of
from django_mq.queue_backoff import Step, step_of
from django_mq.signals import message_started, wanted
from django_mq.store import settle
from django_mq.worker import reporting
from django_mq.worker.aloof import Aloof
from django_mq.worker.calling import argument_of, call, tidy_up
from django_mq.worker.database import Outage
from django_mq.worker.early import EarlyStart
from django_mq.worker.ending import ACKED, Ended, Settled, end, settle_all
from django_mq.worker.limits import limits
from django_mq.worker.locking import Asked, Locker
from django_mq.worker.mending import Mender
from django_mq.worker.progress import Conflicts, Gone, Lost, NotLocked, Progress, Remainder
from django_mq.worker.savepoint import LazySavepoint, TransactionGone
from django_mq.worker.session import DATABASE_ERRORS, Session, run_hooks

if TYPE_CHECKING:
    import psycopg
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_mq.backoff import RetryPolicy
    from django_mq.messages import ClaimedRow
    from django_mq.worker.board import Places
    from django_mq.worker.shut import Shut
    from django_mq.worker.tasks import Task

logger = logging.getLogger("django_mq")

#: More open subtransactions than these spill over in every other backend's snapshot (PostgreSQL
#: keeps 64 in shared memory).
MOST_SAVEPOINTS = 50


class Slices:
    """Runs slices on one connection, in the thread that owns it.

    `policy` gives the retry policy of a row, `settled` is told which ids are no
    longer in hand, and whether some of them are back in their queue. Of the queues in `easing`
    nothing starts any more when one message failed, nor anything that is `shut`. For `ours_for`
    seconds after its claim was asked for, nobody else can have taken a message.
    """

    def __init__(
        self,
        wrapper: BaseDatabaseWrapper,
        *,
        places: Places,
        outage: Outage,
        policy: Callable[[ClaimedRow], RetryPolicy],
        settled: Callable[[Sequence[Ended]], None],
        slice_seconds: float,
        shut: Shut | None = None,
        easing: Collection[str] = (),
        ours_for: float = 0.0,
    ) -> None:
        self._session = Session(wrapper)
        self._locker = Locker(self._session)
        self._places = places
        self._outage = outage
        self._policy = policy
        self._settled = settled
        self._slice_seconds = slice_seconds
        self._shut = shut
        self._easing = easing
        self._conflicts = Conflicts()
        self._nested = self._session.is_within()
        self._early = EarlyStart(self._session, self._locker, places, ours_for=ours_for)
        self._aloof = Aloof(self._session, self._locker, places, ours_for=ours_for)
        self._mender = Mender(
            self._session,
            self._locker,
            outage=outage,
            conflicts=self._conflicts,
            settled=settled,
            finish=self._finish,
            end=self._end,
        )

    def close(self) -> None:
        """Give the connection back as it was."""
        self._session.close()

    def get_ready(self) -> None:
        """Do now what the next slice would begin with: somebody may wait for that."""
        if not self._nested:
            self._session.get_ready()

    def stand_down(self) -> None:
        """Leave the connection to others: no slice is next."""
        self._session.stand_down()

    def run(self, tasks: Sequence[Task]) -> Remainder:
        """Run `tasks` in one transaction, as many as there is time for."""
        progress = Progress(started=monotonic(), announcing=wanted(message_started))
        if not self._nested:
            self._session.make_clean()
        try:
            progress.driver = self._session.connect()
            with self._session.block():
                self._run_as_may_be(tasks, progress)
                if lost := settle_all(self._session.cursor(), progress.ended):
                    raise Lost(lost)
                progress.committing = True
        except NotLocked:
            progress.began = False
        except (Gone, Lost, *DATABASE_ERRORS) as error:
            if self._nested:
                raise  # a test's transaction cannot be mended
            if progress.gone:
                self._mender.transaction_gone(tasks, progress)
            elif isinstance(error, Lost):
                self._mender.leases_lost(tasks, progress)
            else:
                self._mender.statement_failed(tasks, progress, error)
        else:
            self._outage.over()
            self._finish(progress)
        if progress.locked and not progress.began:
            self._outage.wait_quietly()  # nothing else to do here, and others may have it long
        self._aloof.note(progress)
        for task in (*progress.again, *progress.locked):
            task.delivery._asked_at = 0.0  # they are locked for first from now on
        return Remainder(progress.left, progress.again, progress.locked)

    # ---- inside the transaction

    def _run_as_may_be(self, tasks: Sequence[Task], progress: Progress) -> None:
        """Run them with no lock, while one is asked for, or behind one."""
        timeouts = [task.timeout for task in tasks]
        if not progress.announcing and self._aloof.may_run(tasks):
            self._run_aloof(tasks, limits([max(timeouts)], slice_seconds=0.0), progress)
            return
        settings = limits(timeouts, slice_seconds=self._slice_seconds)
        early = len(tasks) == 1 and not progress.announcing
        if asked := self._early.ask(tasks[0], settings) if early else None:
            self._run_early(tasks[0], asked, settings, progress)
        else:
            self._run_locked(tasks, settings, progress)
        progress.hooks = [] if self._nested else self._session.take_hooks()

    def _run_aloof(
        self, tasks: Sequence[Task], settings: dict[str, str], progress: Progress
    ) -> None:
        self._aloof.begin(settings, progress)
        self._run_all(list(tasks), progress)
        self._session.savepoint.leave()
        progress.hooks = self._session.take_hooks()
        if taken := self._aloof.begin_settling(progress):
            self._sort_skipped(self._session.cursor(), [taken], progress)

    def _run_locked(
        self, tasks: Sequence[Task], settings: dict[str, str], progress: Progress
    ) -> None:
        locked = self._locker.lock([fence_of(task.delivery._row) for task in tasks], settings)
        cursor = self._session.cursor()
        if len(locked.missing) < len(tasks):
            progress.xid = locked.xid
        mine = list(tasks)
        if locked.missing or locked.expired:
            mine = self._sort_out(cursor, tasks, locked, progress)
        if mine:
            self._session.savepoint.begin(settings, own_session=not self._nested)
            self._run_all(mine, progress)
            self._session.savepoint.leave()

    def _run_early(
        self, task: Task, asked: Asked, settings: dict[str, str], progress: Progress
    ) -> None:
        run = partial(self._run_all, [task], progress)
        if not self._early.run(task, asked, settings, progress, run):
            self._sort_skipped(self._session.cursor(), [task], progress)
            raise NotLocked

    def _sort_out(
        self,
        cursor: psycopg.Cursor[Any],
        tasks: Sequence[Task],
        locked: settle.Locked,
        progress: Progress,
    ) -> list[Task]:
        """Return the tasks that may run; the others halt their lines."""
        mine: list[Task] = []
        skipped: list[Task] = []
        for task in tasks:
            if task.delivery.id in locked.missing:
                skipped.append(task)
            elif task.delivery.id in locked.expired:
                progress.ran.append(task)
                progress.ended.append(Ended(task.delivery, Settled.BURIED, reason="expired"))
            else:
                mine.append(task)
                continue
            progress.halted.add(task.line)
        if skipped:
            self._sort_skipped(cursor, skipped, progress)
        return mine

    def _sort_skipped(
        self, cursor: psycopg.Cursor[Any], skipped: list[Task], progress: Progress
    ) -> None:
        ours = settle.still_ours(cursor, [task.delivery.fence for task in skipped])
        for task in skipped:
            if task.delivery.id in ours:
                progress.locked.append(task)  # a renewal has it for a moment: a later slice
            else:
                reporting.lease_lost(task.delivery)
                self._settled([Ended(task.delivery, Settled.LOST)])

    def _run_all(self, tasks: list[Task], progress: Progress) -> None:
        if tasks[0].handler.batch:
            self._attempt_batch(tasks, progress)
            return
        until = progress.started + self._slice_seconds
        for place, task in enumerate(tasks):
            if place and (
                progress.stopped or progress.savepoints >= MOST_SAVEPOINTS or monotonic() >= until
            ):
                progress.left += tasks[place:]
                return
            if task.line is not None and task.line in progress.halted:
                progress.left.append(task)
                continue
            if (progress.eased or self._shut) and self._is_shut(task, progress):
                progress.left.append(task)
                continue
            last = place + 1 == len(tasks) or progress.savepoints + 1 >= MOST_SAVEPOINTS
            self._attempt([task], progress, until=0.0 if last else until)
            progress.stopped = progress.stopped or task.delivery._row.wants_result

    def _attempt_batch(self, tasks: list[Task], progress: Progress) -> None:
        """Run a batch without those of shut queues, or with something before them in their line."""
        free: list[Task] = []
        for task in tasks:
            halted = task.line is not None and task.line in progress.halted
            waits = halted or (bool(self._shut) and self._is_shut(task, progress))
            (progress.left if waits else free).append(task)
        if free:
            self._attempt(free, progress)

    def _is_shut(self, task: Task, progress: Progress) -> bool:
        """Say whether its queue is to back off, by what ran in this slice or elsewhere."""
        delivery = task.delivery
        return delivery.queue in progress.eased or bool(self._shut and self._shut.has(delivery))

    def _attempt(self, tasks: list[Task], progress: Progress, *, until: float = 0.0) -> None:
        """Run one message, or a batch, behind a savepoint; before `until` another one follows."""
        first, savepoint, wrapper = tasks[0], self._session.savepoint, self._session.wrapper
        hooks = len(wrapper.run_on_commit)
        wrappers = len(wrapper.execute_wrappers)
        error: BaseException | None = None
        seconds = 0.0
        progress.began = True
        progress.running, progress.deadline = first, monotonic() + first.timeout
        if first.handler.batch:
            fences = [task.delivery.fence for task in tasks]
            self._places.start(fences, progress.deadline, True)
        else:
            self._places.start_one(fence_of(first.delivery._row), progress.deadline, True)
        try:
            if progress.announcing:
                self._announce(tasks, progress)
            began = perf_counter()
            savepoint.arm()
            result, error = call(first.handler.function, argument_of(tasks), first.delivery)
            seconds = perf_counter() - began
            if error is None:
                error = _keep(savepoint, more=monotonic() < until)
            if savepoint.opened:
                progress.savepoints += 1
                progress.users.add(first.handler)
            if error is not None:
                savepoint.undo()
                del wrapper.run_on_commit[hooks:]
        except TransactionGone as gone:
            broke = error or HandlerBrokeTransaction(f"the handler ended its transaction: {gone}")
            self._blame(tasks, broke, seconds, hooks, progress)
            raise Gone from gone
        except DATABASE_ERRORS as lost:
            self._blame(tasks, error or lost, seconds, hooks, progress)
            raise Gone from lost
        finally:
            self._places.end(len(tasks))
            del wrapper.execute_wrappers[wrappers:]
        if error is None:
            progress.owners += [first.delivery.id] * (len(wrapper.run_on_commit) - hooks)
            progress.ran += tasks
            for task in tasks:
                progress.ended.append(Ended(task.delivery, ACKED, result, seconds))
        else:
            self._failed(tasks, error, seconds, progress)

    def _announce(self, tasks: list[Task], progress: Progress) -> None:
        """Say that they start; a receiver that breaks the transaction does so to itself."""
        savepoint = self._session.savepoint
        savepoint.arm()
        for task in tasks:
            reporting.started(task.delivery)
        if _keep(savepoint) is not None:
            savepoint.undo()
        progress.savepoints += savepoint.opened

    def _failed(
        self, tasks: list[Task], error: BaseException, seconds: float, progress: Progress
    ) -> None:
        progress.halted.update(task.line for task in tasks)
        if self._conflicts.may_repeat(tasks, error):
            progress.again.extend(tasks)
            progress.stopped = True
        elif len(tasks) > 1:
            progress.again.extend(tasks)  # a batch that failed: its messages run one by one
        else:
            ended = self._end(tasks[0], error, seconds)
            progress.ran.append(tasks[0])
            progress.ended.append(ended)
            queue = ended.delivery.queue
            if queue in self._easing and step_of(ended.outcome, error) is Step.UP:
                progress.eased.add(queue)

    def _blame(
        self,
        tasks: list[Task],
        error: BaseException,
        seconds: float,
        hooks: int,
        progress: Progress,
    ) -> None:
        progress.gone = True
        if not progress.aloof:
            progress.hooks = self._session.wrapper.run_on_commit[:hooks]
        if len(tasks) > 1:
            progress.again.extend(tasks)
        else:
            progress.culprit = self._end(tasks[0], error, seconds)

    def _end(self, task: Task, error: BaseException, seconds: float) -> Ended:
        return end(task.delivery, self._policy(task.delivery._row), error, seconds=seconds)

    # ---- after it

    def _finish(self, progress: Progress) -> None:
        with self._session.taken_back():
            run_hooks(progress.hooks)
            self._settled(progress.ended)
            reporting.all_ended(progress.ended)
        self._conflicts.forget(progress.ended)
        tidy_up()


def _keep(savepoint: LazySavepoint, *, more: bool = False) -> BaseException | None:
    """Keep what a handler wrote; return what it broke without ending its transaction."""
    try:
        savepoint.keep(more=more)
    except TransactionGone:
        raise
    except Exception as error:
        return error
    return None
