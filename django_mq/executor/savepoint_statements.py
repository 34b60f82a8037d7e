"""The statements around the savepoint of a handler.

Outside the savepoints of handlers the worker's limits hold, inside them the role's.
"""

from __future__ import annotations

from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import ClientCursor, sql

from django_mq.executor import slice_limits
from django_mq.executor.connections import reset_statements
from django_mq.store import open_transaction
from django_mq.store.driver import may_prepare

#: The name of the savepoint.
SAVEPOINT = "django_mq_delivery"
#: Follows a release: the savepoint of the next handler.
NEXT_SAVEPOINT = f"; savepoint {SAVEPOINT}".encode()
#: Releases a savepoint that nothing has used.
RELEASE_UNUSED = f"release savepoint {SAVEPOINT}".encode()


class SavepointStatements:
    """The statements for the savepoints on one driver connection, composed once for many slices."""

    def __init__(self, wrapper: BaseDatabaseWrapper) -> None:
        self._wrapper = wrapper
        self._composed_for: tuple[dict[str, str], bool, str | None] | None = None
        self._initially_immediate: list[Any] | None = None
        #: Open a savepoint; undo what is behind it; set the worker's limits after its end.
        self.open = self.rollback = self.worker_limits = b""
        #: Keep what is behind a savepoint; empty until `compose_release()`.
        self.release = b""

    def forget(self) -> None:
        """Forget everything: there is a new driver connection."""
        self._initially_immediate = self._composed_for = None

    def forget_constraints(self) -> None:
        """Read the constraints again before the next release: one was dropped."""
        self._initially_immediate = None
        self.release = b""

    def compose(self, settings: dict[str, str], *, own_session: bool) -> None:
        """Compose the statements for a slice; in a test's session, no limits change."""
        wanted = settings, own_session, self._wrapper.timezone_name
        if wanted == self._composed_for:  # composing them again would take 24 us per slice
            return
        self._composed_for = wanted
        opened = f"; {slice_limits.handler_limits(settings)}" if own_session else ""
        ended = f"; {slice_limits.worker_limits(settings)}" if own_session else ""
        self.worker_limits = ended.encode()
        self.open = f"savepoint {SAVEPOINT}{opened}".encode()
        self.rollback = (
            f"rollback to savepoint {SAVEPOINT}; release savepoint {SAVEPOINT}{ended}".encode()
        )
        self.release = b""

    def compose_release(self, cursor: ClientCursor[Any]) -> bytes:
        """Return the statements that end a handler's savepoint, and remember them as `release`.

        Constraints are checked here, because a deferred one would otherwise fail at COMMIT, and the
        whole slice with it. Resetting what the handler SET for its session also resets our
        settings, so they are set again.
        """
        if self._initially_immediate is None:
            with self._wrapper.wrap_database_errors:
                self._initially_immediate = open_transaction.initially_immediate(cursor)
        assert self._composed_for is not None  # noqa: S101  (`compose()` came before)
        settings, own_session, _ = self._composed_for
        steps = [
            sql.SQL("set constraints all immediate"),
            sql.SQL("set constraints all deferred"),
            *(
                sql.SQL("set constraints {} immediate").format(sql.Identifier(*name))
                for name in self._initially_immediate or ()
            ),
            sql.SQL("release savepoint {}").format(sql.Identifier(SAVEPOINT)),
        ]
        if own_session:
            if may_prepare(self._wrapper):  # the next handler may make some of the same names
                steps.append(sql.SQL("close all; discard temp"))
            steps.append(reset_statements(self._wrapper))
            steps.extend(
                sql.SQL("set local {} = {}").format(sql.Identifier(name), sql.Literal(value))
                for name, value in settings.items()
            )
        self.release = sql.SQL("; ").join(steps).as_bytes(cursor.connection)
        return self.release
