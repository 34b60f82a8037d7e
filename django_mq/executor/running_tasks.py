"""How many slices and coroutines run, and whether the one that runs is a suspect."""

from __future__ import annotations

from time import monotonic


class RunningTasks:
    """Counts the slices and coroutines that run. Not thread-safe: LocalQueue holds its lock.

    While a suspect runs, it is `alone`: nothing else starts. The last slice or suspect was taken at
    `taken_at`. `taken` counts the calls, and the messages of slices, that ever started.

    >>> running = RunningTasks()
    >>> running.take(alone=True)
    >>> running.alone, running.end(), running.alone
    (True, True, False)
    """

    def __init__(self) -> None:
        self.count = 0
        self.alone = False
        self.taken_at = monotonic()
        self.taken = 0

    def take(self, *, calls: int = 1, alone: bool = False) -> None:
        """Note that a slice of `calls` calls or messages, or a suspect, starts."""
        self.count += 1
        self.taken += calls
        self.alone = alone
        self.taken_at = monotonic()

    def start_coroutines(self, count: int) -> None:
        """Note that `count` coroutines start."""
        self.count += count
        self.taken += count

    def end(self, count: int = 1) -> bool:
        """Note that `count` slices or coroutines have ended; return whether a suspect did."""
        self.count -= count
        was_alone = self.alone and not self.count
        self.alone = self.alone and not was_alone
        return was_alone
