"""When the transaction of a slice failed as a whole: nothing charged twice, nothing lost.

What had run runs again alone, or is settled by its fence where it turns out to be committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from django.db import transaction

from django_mq.worker import reporting
from django_mq.worker.calling import is_conflict
from django_mq.worker.database import LOST, Outage
from django_mq.worker.elsewhere import Elsewhere, was_committed
from django_mq.worker.ending import Ended, Settled, ends_or_lost, settle_all
from django_mq.worker.locking import Locker
from django_mq.worker.progress import MOST_CONFLICTS, Conflicts
from django_mq.worker.session import DATABASE_ERRORS, Session, run_hooks

if TYPE_CHECKING:
    from django_mq.worker.progress import Progress
    from django_mq.worker.tasks import Task


class Mender:
    """Mends the progress of slices on one session.

    `finish` is called for a slice that was committed after all; `end` decides about a failure.
    """

    def __init__(
        self,
        session: Session,
        locker: Locker,
        *,
        outage: Outage,
        conflicts: Conflicts,
        settled: Callable[[Sequence[Ended]], None],
        finish: Callable[[Progress], None],
        end: Callable[[Task, BaseException, float], Ended],
    ) -> None:
        self._session = session
        self._outage = outage
        self._conflicts = conflicts
        self._settled = settled
        self._finish = finish
        self._end = end
        self._elsewhere = Elsewhere(session, locker, outage=outage, settled=settled, finish=finish)

    def leases_lost(self, tasks: Sequence[Task], progress: Progress) -> None:
        """Nothing of the slice holds: each message that ran behind a lock runs again alone."""
        if progress.aloof:
            self._settle_elsewhere(progress)
            return
        ran = progress.ran
        if len(tasks) == 1 and ran:
            reporting.lease_lost(ran[0].delivery)
            self._settled([Ended(ran[0].delivery, Settled.LOST)])
        else:
            progress.again.extend(ran)
        progress.ended, progress.ran = [], []

    def transaction_gone(self, tasks: Sequence[Task], progress: Progress) -> None:
        """A handler ended the transaction, or the connection went away under it."""
        self._session.reset()
        culprit = progress.culprit
        begun = {task.delivery.id for task in (*progress.ran, *progress.again)}
        if culprit is not None:
            begun.add(culprit.delivery.id)
        progress.left = [task for task in tasks if task.delivery.id not in begun]
        progress.locked = []
        if progress.aloof:
            self._settle_elsewhere(progress)
            return
        if progress.ended and was_committed(self._session, self._outage, progress.xid):
            with self._session.taken_back():
                run_hooks(progress.hooks)
        else:
            progress.left[:0] = progress.ran
            progress.ended = []
        if culprit is not None:
            progress.ended.append(culprit)
        self._settle_afterwards(progress)

    def statement_failed(self, tasks: Sequence[Task], progress: Progress, error: Exception) -> None:
        """The server refused one of our own statements or the COMMIT, or did not answer."""
        answered = progress.driver is not None and not progress.driver.closed
        if progress.committing and not answered:
            self._session.reset()
            if was_committed(self._session, self._outage, progress.xid):
                self._finish(progress)
            elif progress.aloof:
                self._settle_elsewhere(progress)
            else:
                self._run_again_or_fail(progress, None)
            return
        settling = progress.xid is not None
        if progress.aloof and (not (answered and settling) or is_conflict(error)):
            if not answered:
                self._session.reset()
            self._settle_elsewhere(progress, skip_locked=settling and is_conflict(error))
        elif not answered or (isinstance(error, LOST) and not is_conflict(error)):
            self._session.reset()
            self._outage.wait(error)
            self._connection_lost(tasks, progress, error)
        elif progress.ended or progress.again:
            self._run_again_or_fail(progress, error)
        else:
            if not is_conflict(error):
                self._session.reset()
                self._outage.wait(error)
            progress.left, progress.locked = list(tasks), []

    def _connection_lost(self, tasks: Sequence[Task], progress: Progress, error: Exception) -> None:
        """What had run runs again alone; who did so too often has failed."""
        ran, ended = progress.ran, progress.ended
        progress.ran, progress.ended, progress.locked = [], [], []
        for task, each in zip(ran, ended, strict=True):
            if self._conflicts.count_loss(task):
                progress.ended.append(self._end(task, error, each.seconds))
            else:
                progress.again.append(task)
        begun = {task.delivery.id for task in (*ran, *progress.again)}
        progress.left = [task for task in tasks if task.delivery.id not in begun]
        self._settle_afterwards(progress)

    def _settle_elsewhere(self, progress: Progress, *, skip_locked: bool = False) -> None:
        """Of a slice that was aloof, only who used the connection runs again, or failed."""
        if progress.culprit is None and progress.late is not None:
            progress.forget(progress.late.task)
            progress.again.append(progress.late.task)
        self._elsewhere.settle(progress, skip_locked=skip_locked)
        if progress.culprit is not None:
            progress.ended = [progress.culprit]
            self._settle_afterwards(progress)

    def _run_again_or_fail(self, progress: Progress, error: Exception | None) -> None:
        ran, ended = progress.ran, progress.ended
        progress.ran, progress.ended = [], []
        alone = len(ran) == 1 and not progress.again
        if error is not None and alone and not self._conflicts.may_repeat(ran, error):
            progress.ended = [self._end(ran[0], error, ended[0].seconds)]
            self._settle_afterwards(progress)
        else:
            progress.again.extend(ran)

    def _settle_afterwards(self, progress: Progress) -> None:
        """Settle by fence, in a transaction of its own, what ended in one that is no more."""
        if not progress.ended:
            return
        answers = 0
        while True:
            driver = None
            try:
                driver = self._session.connect()
                with transaction.atomic(using=self._session.alias, durable=True):
                    lost = settle_all(self._session.cursor(), progress.ended)
                break
            except DATABASE_ERRORS as error:
                answers += driver is not None and not driver.closed
                self._session.reset()
                if not isinstance(error, LOST) or answers > MOST_CONFLICTS:
                    reporting.refused(progress.ended, error)
                    self._settled([Ended(ended.delivery, Settled.LOST) for ended in progress.ended])
                    return
                self._outage.wait(error)
                if self._outage.stopped():
                    return  # the lease lapses, and the attempt counts
        self._outage.over()
        self._conflicts.forget(progress.ended)
        with self._session.taken_back():
            for ended in progress.ended:
                if ended.delivery.id in lost:
                    reporting.lease_lost(ended.delivery)
                else:
                    reporting.one_ended(ended)
        self._settled(ends_or_lost(progress.ended, lost))
