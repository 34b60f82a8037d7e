"""Wait for what no signal announces."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Seen = TypeVar("Seen")

#: Seconds for anything that takes a moment on a quiet machine.
SOON = 60.0
#: The first and the longest pause between two looks, in seconds: a look may query the database, so
#: a long wait with short pauses keeps a core busy.
FIRST, LONGEST = 0.005, 0.05


def until(look: Callable[[], Seen], what: str = "it", seconds: float = SOON) -> Seen:
    """Return the result of `look` once it is true; AssertionError if it never is."""
    deadline, pause = time.monotonic() + seconds, FIRST
    while not (seen := look()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST)
    return seen
