"""Slices of handlers that keep away from their connection: no lock, no open transaction.

A lock covers what a handler writes until that is committed. Who wrote nothing needs none: its
message is settled by its fence, which changes nothing that has become somebody else's. So a slice
of messages whose handlers did not use their connection in their last slices runs without: a sixth
less work in a drain, and nothing is open while a handler calls a slow service. One that does use it
waits for the lock of its row at that moment, and is the last of its slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from django_mq.messages import fence_of
from django_mq.store.settle import PATIENCE
from django_mq.worker.locking import Locker
from django_mq.worker.progress import Late, NotLocked, Progress
from django_mq.worker.session import Session

if TYPE_CHECKING:
    from django_mq.handlers import Handler
    from django_mq.worker.board import Places
    from django_mq.worker.tasks import Task

#: A handler that used its connection is aloof when so many slices in a row did without. After one,
#: who uses it for one in 400 messages had every other slice cut short: a tenth slower.
SLICES_WITHOUT = 8


class Aloof:
    """Knows the handlers that are aloof, and runs slices of their messages on `session`.

    For `ours_for` seconds after its claim was asked for, nobody else can have taken a message.
    """

    def __init__(
        self, session: Session, locker: Locker, places: Places, *, ours_for: float
    ) -> None:
        self._session = session
        self._locker = locker
        self._places = places
        self._ours_for = ours_for
        self._possible = not session.is_within()
        self._settings: dict[str, str] = {}
        # How many slices must do without before one is aloof; of who never ran, one.
        self._slices_left: dict[Handler, int] = {}

    def note(self, progress: Progress) -> None:
        """Remember which handlers used their connection in a slice that ran, and which did not."""
        users = progress.users
        for handler in users.union(task.handler for task in progress.ran):
            left = self._slices_left.get(handler, 1) - 1
            self._slices_left[handler] = SLICES_WITHOUT if handler in users else max(0, left)

    def may_run(self, tasks: Sequence[Task]) -> bool:
        """Say whether `tasks` may run before anything is known of their rows.

        Not what expires, is in a line or is suspected of killing workers: there the lock, or its
        order among others, says whether it may start at all.
        """
        return (
            self._possible
            and not self._slices_left.get(tasks[0].handler, 1)
            and self._are_plain(tasks)
            and self._session.savepoint.knows(self._session.connect())
            and self._locker.may_ask_late()
        )

    def _are_plain(self, tasks: Sequence[Task]) -> bool:
        since = monotonic() - self._ours_for
        for delivery, handler, _, line in tasks:
            row = delivery._row
            if (
                self._slices_left.get(handler, 1)
                or handler.batch
                or line is not None
                or row.expires
                or row.suspect
                or delivery._asked_at < since
            ):
                return False
        return True

    def begin(self, settings: dict[str, str], progress: Progress) -> None:
        """Expect that nothing of the slice uses its connection; `settings` are for who does."""
        progress.aloof = True
        self._settings = settings
        # This very list: should somebody close the connection, Django has another one.
        progress.hooks = self._session.wrapper.run_on_commit
        before = partial(self._lock, progress)
        self._session.savepoint.begin(settings, own_session=True, before=before)

    def _lock(self, progress: Progress) -> None:
        """Let the handler that runs go on once its row is locked; meanwhile its time stands still.

        It has begun: should its process end now, it is to blame.
        """
        late = progress.late
        if late is None:
            task: Task = progress.running
            fence = fence_of(task.delivery._row)
            late = progress.late = Late(task, self._locker.ask_late(fence, self._settings))
            progress.users.add(task.handler)
            progress.stopped = True
            began = monotonic()
            self._places.start_one(fence, progress.deadline + 2 * PATIENCE, True)
            try:
                late.asked.answer()
            finally:
                self._places.start_one(fence, progress.deadline + monotonic() - began, True)
        if late.asked.answer().missing:
            raise NotLocked("somebody else has the row of this message: it runs again later")

    def begin_settling(self, progress: Progress) -> Task | None:
        """Begin the transaction that settles the slice, if that is not open yet.

        Returns the task, if any, that was to be locked and whose row somebody else has: nothing
        of that counts.
        """
        taken = None
        if (late := progress.late) and late.asked.answer().missing:
            taken, progress.late = late.task, None
            progress.forget(taken)
        if progress.ended:
            progress.xid = self._locker.begin_patiently(self._settings)
        return taken
