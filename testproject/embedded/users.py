"""Tracks the users of the server: a lock per process, which the kernel drops when it ends.

No list of pids can go stale. A process that is killed stops nothing; the next one to leave finds
itself the last and does.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class Users:
    """The processes that use the server of `data`, by two locks on files beside it.

    `<data>.users` is held shared by every user. `<data>.lock` is held exclusively by whoever joins,
    leaves, starts or stops: they take turns.
    """

    def __init__(self, data: Path) -> None:
        self.data = data
        self.held: int | None = None  # descriptor of this process's own lock on `<data>.users`

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep every other process from joining, leaving, starting or stopping inside the block."""
        descriptor = self.open("lock", fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Not by closing alone: a child forked meanwhile by another thread shares the lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def join(self) -> None:
        """Count this process among the users until it leaves or ends. To be called `alone()`."""
        self.held = self.open("users", fcntl.LOCK_SH)

    def leave(self) -> bool:
        """Return whether this process was the last user. To be called `alone()`."""
        if self.held is None:
            return False
        os.close(self.held)
        self.held = None
        try:
            os.close(self.open("users", fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def after_fork(self) -> None:
        """Give a forked child, whose parent was a user, a lock of its own.

        The inherited descriptor shares the parent's lock: a child that leaves would make that one
        exclusive and believe itself the last while the parent is still there. Until the child has
        its own, the inherited one keeps the server alive, whatever becomes of the parent.
        """
        if self.held is not None:
            inherited = self.held
            self.join()  # needs no turn: while the inherited lock is held, nobody is the last
            os.close(inherited)

    def open(self, purpose: str, lock: int) -> int:
        """Return a new descriptor of `<data>.<purpose>`, locked.

        Raises BlockingIOError if somebody else's lock is in the way and LOCK_NB was asked for.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.data.with_suffix(f".{purpose}"), flags, 0o600)
        try:
            fcntl.flock(descriptor, lock)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
