"""The early start: a message that is alone runs while the server still locks it.

That is half a millisecond which somebody may be waiting for. The handler's first use of its
connection waits for the lock; where somebody else has the row it cannot use it, and nothing of it
is kept: what is kept was locked throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import psycopg

from django_mq.messages import fence_of
from django_mq.worker.locking import Asked, Locker
from django_mq.worker.progress import NotLocked, Progress
from django_mq.worker.session import DATABASE_ERRORS, Session

if TYPE_CHECKING:
    from django_mq.worker.board import Places
    from django_mq.worker.tasks import Task


#: Seconds since its claim was asked for, in which no renewal or operator met a message.
YOUNG = 0.1


class EarlyStart:
    """Runs messages on `session` before their lock is known; `places` has when they began.

    For `ours_for` seconds after its claim was asked for, nobody else can have taken a message.
    """

    def __init__(
        self, session: Session, locker: Locker, places: Places, *, ours_for: float
    ) -> None:
        self._session = session
        self._locker = locker
        self._places = places
        self._possible = not session.is_within()
        self._young_for = min(YOUNG, ours_for)

    def ask(self, task: Task, settings: dict[str, str]) -> Asked | None:
        """Ask for the lock of a message if that may start before the answer is there.

        Only what was claimed this very moment.

        Not what expires, is in a line or is suspected of killing workers: there the answer, or
        its order among others, says whether it may start at all.
        """
        row = task.delivery._row
        if (
            not self._possible
            or monotonic() - task.delivery._asked_at > self._young_for
            or row.expires
            or row.suspect
            or task.line is not None
            or task.handler.batch
            or not self._session.savepoint.knows(self._session.connect())
        ):
            return None
        return self._locker.ask(fence_of(row), settings)

    def run(
        self,
        task: Task,
        asked: Asked,
        settings: dict[str, str],
        progress: Progress,
        run: Callable[[], None],
    ) -> bool:
        """Call `run`, which runs `task`. Say whether its row was locked; if not, nothing counts."""
        before = partial(self._wait, task, asked, monotonic() + task.timeout)
        savepoint = self._session.savepoint
        savepoint.begin(settings, own_session=True, before=before)
        try:
            run()
            savepoint.leave()
            locked = asked.answer()
            progress.xid = locked.xid
        except psycopg.errors.InvalidSqlStatementName as error:
            self._possible = False  # something here deallocates: wait for the answers from now on
            progress.not_begun()
            progress.again = [task]
            raise NotLocked from error
        except DATABASE_ERRORS:
            progress.not_begun()
            raise
        if locked.missing:
            progress.not_begun()
        return not locked.missing

    def _wait(self, task: Task, asked: Asked, until: float) -> None:
        """Let a handler go on once its row is locked; until then its time does not run."""
        if not asked.answered:
            began = monotonic()
            fence = fence_of(task.delivery._row)
            self._places.end(1)
            try:
                asked.answer()
            finally:
                self._places.start_one(fence, until + monotonic() - began, True)
        if asked.answer().missing:
            raise NotLocked("somebody else has the row of this message: it runs again later")
