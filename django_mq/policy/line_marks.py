"""Marks of an ordered queue: where its line begins, and the earliest end of a lease in flight.

A claim that begins there skips the messages handled before. While a session holds an old snapshot,
dead versions of all rows that were handled since the snapshot remain in the index.
"""

from __future__ import annotations

from typing import NamedTuple

#: Seconds from the claim of a candidate for the mark of the line to the snapshot `seen`: an INSERT
#: takes its id from the sequence just before its transaction is assigned an id of its own.
INSERT_SECONDS = 1.0


class Snapshot(NamedTuple):
    """The transactions whose changes a statement saw; it ran `at`, in seconds since 1970.

    `xmin` is the oldest transaction id in progress, `own` that of the statement's transaction: all
    ids assigned before are lower. (The xmax of a snapshot is not: it follows the last one to end.)
    """

    at: float
    xmin: int
    own: int


class LineMarks(NamedTuple):
    """The marks of the line of one queue.

    `lease`: no message of the queue in flight has a lease that ends before this time, in seconds
    since 1970, because every lease ends after its claim. `first`: no message with a lower id waits
    in the line, and no transaction can add one any more. `head` is the first message at an earlier
    claim, made `since`, and a candidate for `first`; `seen` is a snapshot from INSERT_SECONDS after
    that claim or later.

    A message that an operator requeues, or that a later turn adopts, can have a lower id: some
    claims have to begin at the front.
    """

    lease: float = float("-inf")
    first: int = 0
    head: int = 0
    since: float = 0.0
    seen: Snapshot | None = None

    def claimed(self, head: int, before: Snapshot) -> LineMarks:
        """Return the marks after a claim that began at `first` or before, and took `head` first.

        `before` is a snapshot from just before the claim. Nothing was in flight: else the claim
        would have taken nothing.

        A transaction that was in progress when `head` was claimed may still commit a lower id. Once
        all of these have ended, a claim sees what they have committed, and what lies before its
        `head` is final.

        >>> marks = LineMarks().claimed(7, Snapshot(at=100.0, xmin=50, own=52))
        >>> marks = marks.claimed(8, Snapshot(at=101.0, xmin=53, own=55))
        >>> marks.claimed(9, Snapshot(at=101.1, xmin=54, own=60)).first
        0
        >>> marks.claimed(9, Snapshot(at=101.1, xmin=56, own=60)).first
        7
        >>> marks.claimed(5, Snapshot(at=101.1, xmin=56, own=60)).first
        5
        """
        if head < self.first:  # others may have come back with it
            return LineMarks(head=head, since=before.at)
        lease = max(self.lease, before.at)
        if not self.head:
            return LineMarks(lease, self.first, head, before.at)
        if self.seen is None:
            seen = before if before.at - self.since >= INSERT_SECONDS else None
            return self._replace(lease=lease, seen=seen)
        if before.xmin < self.seen.own:
            return self._replace(lease=lease)
        return LineMarks(lease, min(self.head, head), head, before.at)


#: Marks that leave nothing out.
FRONT = LineMarks()
