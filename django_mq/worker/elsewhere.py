"""Settle in another transaction what ran without one, when the one that was to settle it failed.

Nothing of it was lost with that, so nobody runs twice for it, but where somebody has had a row for
long, or the server refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from django.db import transaction

from django_mq.messages import fence_of
from django_mq.store import settle
from django_mq.worker import reporting
from django_mq.worker.calling import is_conflict
from django_mq.worker.database import Outage
from django_mq.worker.ending import Ended, Settled, settle_all
from django_mq.worker.limits import limits
from django_mq.worker.locking import Locker
from django_mq.worker.session import DATABASE_ERRORS, Session

if TYPE_CHECKING:
    from django_mq.worker.progress import Progress


class Elsewhere:
    """Settles the aloof of a slice; `finish` is called for what is committed."""

    def __init__(
        self,
        session: Session,
        locker: Locker,
        *,
        outage: Outage,
        settled: Callable[[Sequence[Ended]], None],
        finish: Callable[[Progress], None],
    ) -> None:
        self._session = session
        self._locker = locker
        self._outage = outage
        self._settled = settled
        self._finish = finish

    def settle(self, progress: Progress, *, skip_locked: bool) -> None:
        """Settle what ran, with its hooks; a lost database is waited out.

        What somebody has locked is waited for, or, with `skip_locked`, is among the locked
        afterwards. What the server refuses runs again, each alone.
        """
        lost: set[int] = set()
        while progress.ran:
            driver = xid = None
            try:
                driver = self._session.connect()
                with transaction.atomic(using=self._session.alias, durable=True):
                    xid = self._skip_locked(progress) if skip_locked else self._begin()
                    lost = settle_all(self._session.cursor(), progress.ended)
                break
            except DATABASE_ERRORS as error:
                if driver is None or driver.closed:
                    self._session.reset()
                    if was_committed(self._session, self._outage, xid):
                        break
                    self._outage.wait(error)
                    if self._outage.stopped():
                        return  # the leases lapse, and the attempts count
                elif is_conflict(error) and not skip_locked:
                    skip_locked = True
                else:
                    progress.again += progress.ran
                    progress.ran, progress.ended = [], []
        self._outage.over()
        self._conclude(progress, lost)

    def _begin(self) -> str:
        return self._locker.begin_patiently(limits([0.0], slice_seconds=0.0))

    def _skip_locked(self, progress: Progress) -> str | None:
        """Lock what nobody else has; what somebody has is not settled now."""
        cursor = self._session.cursor()
        fences = {task.delivery.id: fence_of(task.delivery._row) for task in progress.ran}
        found = settle.lock(cursor, list(fences.values()), limits([0.0], slice_seconds=0.0))
        if found.missing:
            missing = [task.delivery.fence for task in progress.ran if task.delivery.id in found[0]]
            ours = settle.still_ours(cursor, missing)
            progress.locked += [task for task in progress.ran if task.delivery.id in ours]
            progress.ran = [task for task in progress.ran if task.delivery.id not in ours]
            progress.ended = [each for each in progress.ended if each.delivery.id not in ours]
        return found.xid

    def _conclude(self, progress: Progress, lost: set[int]) -> None:
        """Say what is settled, and what turned out to be somebody else's."""
        for each in progress.ended:
            if each.delivery.id in lost:
                reporting.lease_lost(each.delivery)
                self._settled([Ended(each.delivery, Settled.LOST)])
        progress.ended = [each for each in progress.ended if each.delivery.id not in lost]
        done = {each.delivery.id for each in progress.ended}
        hooks = zip(progress.hooks, progress.owners, strict=False)
        progress.hooks = [hook for hook, owner in hooks if owner in done]
        self._finish(progress)


def was_committed(session: Session, outage: Outage, xid: str | None) -> bool:
    """Ask what became of transaction `xid`, for as long as the server cannot say."""
    while xid is not None and not outage.stopped():
        try:
            status = settle.transaction_status(session.cursor(), xid)
        except DATABASE_ERRORS as error:
            session.reset()
            outage.wait(error)
            continue
        if status != "in progress":
            return status == "committed"
        outage.wait_quietly()
    return False
