"""How many messages to claim of each line whose handler is slow.

Only the process that has claimed messages of a line runs them, one after another. If it claimed as
many as of quick ones, its own threads and other processes would have no line to work on: with six
keys and handlers of 0.2 s, one process of six threads took 15 s instead of 8.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

#: A claim takes as many messages of a line as run in this many seconds. Nothing is claimed for
#: their thread meanwhile, and the next claim takes about 2 ms.
LINE_SECONDS = 0.05
#: More messages than a claim takes.
UNLIMITED = 1 << 31


class SlowLine(NamedTuple):
    """A line whose messages take `seconds` each; `takes_thread`: they are not coroutines."""

    seconds: float
    takes_thread: bool = True


def line_limits(lines: Sequence[SlowLine | None], *, unused: int, threads: int) -> list[int]:
    """Return the most messages to claim of each of these lines; None is a line that is not slow.

    Each of the `unused` threads gets one slow line, or several that are done in LINE_SECONDS. Of
    the others as many as this process has `threads` are left, for the unused threads of other
    processes; only lines beyond those are claimed ahead.

    >>> line_limits([SlowLine(0.2)] * 3, unused=1, threads=3)
    [1, 0, 0]
    >>> line_limits([SlowLine(0.02)] * 4, unused=1, threads=4)
    [3, 3, 3, 0]
    >>> line_limits([SlowLine(0.2)] * 4, unused=0, threads=3)
    [1, 0, 0, 0]
    >>> line_limits([SlowLine(0.2, takes_thread=False), None], unused=0, threads=3)
    [1, 2147483648]
    """
    ahead = len(lines) - threads
    free = float(unused)
    limits = []
    for index, line in enumerate(lines):
        if line is None:
            limits.append(UNLIMITED)
        elif not line.takes_thread:
            limits.append(limit_of(line))
        else:
            limits.append(limit_of(line) if free > 0 or index < ahead else 0)
            free -= min(1.0, line.seconds / LINE_SECONDS)
    return limits


def limit_of(line: SlowLine) -> int:
    """Return how many messages of `line` run in LINE_SECONDS; at least one."""
    return ceil(LINE_SECONDS / line.seconds)
