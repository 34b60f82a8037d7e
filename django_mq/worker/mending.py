"""When the transaction of a slice failed as a whole: nothing charged twice, nothing lost.

What had run runs again alone, or is settled by its fence where it turns out to be committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from django.db import transaction

from django_mq.store import settle
from django_mq.worker import reporting
from django_mq.worker.calling import is_conflict
from django_mq.worker.database import LOST, Outage
from django_mq.worker.ending import Ended, Settled, ends_or_lost, settle_all
from django_mq.worker.session import DATABASE_ERRORS, Session, run_hooks

if TYPE_CHECKING:
    from django_mq.store import Cursor
    from django_mq.worker.progress import Conflicts, Progress
    from django_mq.worker.tasks import Task


class Mender:
    """Mends the progress of slices on one session.

    `finish` is called for a slice that was committed after all; `end` decides about a failure.
    """

    def __init__(
        self,
        session: Session,
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

    def leases_lost(self, tasks: Sequence[Task], progress: Progress) -> None:
        """Nothing of the slice holds: each message that ran runs again alone."""
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
        if progress.ended and self._was_committed(progress.xid):
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
            if self._was_committed(progress.xid):
                self._finish(progress)
            elif progress.aloof:
                self._settle_elsewhere(progress)
            else:
                self._run_again_or_fail(progress, None)
            return
        unwritten = progress.aloof and (not answered or isinstance(error, LOST))
        if unwritten or (progress.aloof and progress.xid is None):
            self._settle_elsewhere(progress)
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

    def _settle_elsewhere(self, progress: Progress) -> None:
        """Settle on a new connection what ran without one; only who used it runs again, or failed.

        What somebody else has locked runs again later.
        """
        self._session.reset()
        if progress.culprit is not None:
            del progress.hooks[progress.hooked :]
            progress.ended.append(progress.culprit)
        elif progress.late is not None:
            progress.forget(progress.late.task)
            progress.again.append(progress.late.task)
        if self._settle_afterwards(progress):
            with self._session.taken_back():
                run_hooks(progress.hooks)

    def _run_again_or_fail(self, progress: Progress, error: Exception | None) -> None:
        ran, ended = progress.ran, progress.ended
        progress.ran, progress.ended = [], []
        alone = len(ran) == 1 and not progress.again
        if error is not None and alone and not self._conflicts.may_repeat(ran, error):
            progress.ended = [self._end(ran[0], error, ended[0].seconds)]
            self._settle_afterwards(progress)
        else:
            progress.again.extend(ran)

    def _settle_afterwards(self, progress: Progress) -> bool:
        """Settle by fence, in a transaction of its own, what ended in one that is no more.

        Say whether all of that was still ours.
        """
        if not progress.ended:
            return True
        while True:
            try:
                with transaction.atomic(using=self._session.alias, durable=True):
                    cursor = self._session.cursor()
                    if progress.aloof:
                        _leave_locked(cursor, progress)
                    lost = settle_all(cursor, progress.ended)
                break
            except DATABASE_ERRORS as error:
                self._session.reset()
                if not isinstance(error, LOST):
                    reporting.refused(progress.ended, error)
                    self._settled([Ended(ended.delivery, Settled.LOST) for ended in progress.ended])
                    return False
                self._outage.wait(error)
                if self._outage.stopped():
                    return False  # the lease lapses, and the attempt counts
        self._outage.over()
        self._conflicts.forget(progress.ended)
        with self._session.taken_back():
            for ended in progress.ended:
                if ended.delivery.id in lost:
                    reporting.lease_lost(ended.delivery)
                else:
                    reporting.one_ended(ended)
        self._settled(ends_or_lost(progress.ended, lost))
        return not lost

    def _was_committed(self, xid: str | None) -> bool:
        """Ask what became of transaction `xid`, for as long as the server cannot say."""
        while xid is not None and not self._outage.stopped():
            try:
                status = settle.transaction_status(self._session.cursor(), xid)
            except DATABASE_ERRORS as error:
                self._session.reset()
                self._outage.wait(error)
                continue
            if status != "in progress":
                return status == "committed"
            self._outage.wait_quietly()
        return False


def _leave_locked(cursor: Cursor, progress: Progress) -> None:
    """Lock what ran, where nobody else has; what somebody has is not settled now."""
    fences = {task.delivery.id: task.delivery.fence for task in progress.ran}
    missing = settle.lock(cursor, list(fences.values()), {}).missing if fences else set()
    if not missing:
        return
    back = settle.still_ours(cursor, [fences[id] for id in missing])
    if progress.hooks:  # nobody knows whose they are: all run again, and have theirs then
        back, progress.hooks = set(fences), []
    progress.locked += [task for task in progress.ran if task.delivery.id in back]
    progress.ran = [task for task in progress.ran if task.delivery.id not in back]
    progress.ended = [each for each in progress.ended if each.delivery.id not in back]
