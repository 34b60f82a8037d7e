"""Wait for descriptors of any number: select.select() takes none beyond 1023.

A supervisor of 600 processes has higher ones, and each child inherits those that the project
opened.
"""

from __future__ import annotations

import select
from collections.abc import Iterable


def wait_ready(
    readers: Iterable[int], writers: Iterable[int] = (), *, seconds: float | None = None
) -> tuple[set[int], set[int]]:
    """Return the descriptors that can be read and those that can be written; none on a timeout.

    A descriptor whose other end is closed can be read.
    """
    wanted = dict.fromkeys(readers, select.POLLIN)
    for each in writers:
        wanted[each] = wanted.get(each, 0) | select.POLLOUT
    poll = select.poll()
    for descriptor, events in wanted.items():
        poll.register(descriptor, events)
    found = poll.poll(None if seconds is None else seconds * 1000)
    readable = {
        each for each, now in found if wanted[each] & select.POLLIN and now & ~select.POLLOUT
    }
    writable = {
        each for each, now in found if wanted[each] & select.POLLOUT and now & ~select.POLLIN
    }
    return readable, writable
