"""Why a worker is not live, or not ready, in words for probes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from django_mq.executor.scoreboard import MonitoredPart
from django_mq.supervisor.process_slot import ProcessSlot

#: The names of the parts that a live process has, for probes.
PART_NAMES = {
    MonitoredPart.LOOP: "loop",
    MonitoredPart.RENEWAL: "renewal of leases",
    MonitoredPart.LISTENER: "listener",
}


class Readiness(NamedTuple):
    """Whether the worker of `slots` works; the parts of a draining one need not move."""

    slots: Sequence[ProcessSlot]
    draining: bool = False

    def not_live(self) -> list[str]:
        """Return the parts that are stalled or gone; an empty list if the worker is live."""
        return [each for slot in self.slots for each in _not_live(slot, draining=self.draining)]

    def not_ready(self) -> list[str]:
        """Return why the worker takes no messages; an empty list if it is ready."""
        if self.draining:
            return ["draining"]
        return [
            each
            for slot in self.slots
            for each in (*_not_live(slot, draining=False), *_not_ready(slot))
        ]


def _not_live(slot: ProcessSlot, *, draining: bool) -> list[str]:
    """Return why a slot is not live: a part that must move is stalled, or it has no process.

    The parts of a draining process need not move.
    """
    if not slot.pid:
        # Only the class: anyone may ask.
        ended = slot.failure_class or "ended"
        return [] if slot.finished else [f"a worker process is gone ({ended})"]
    if draining or slot.recycling or slot.leaving:
        return []
    stalled = (each for each in slot.scoreboard.stalled() if each in PART_NAMES)
    return [f"worker process {slot.pid}: the {PART_NAMES[each]} is stalled" for each in stalled]


def _not_ready(slot: ProcessSlot) -> list[str]:
    """Return why a live slot is not ready: its database has not answered, or refuses something.

    A stalled loop, which `_not_live()` names, does not ask the database.
    """
    stalled = slot.scoreboard.stalled()
    if not slot.pid or slot.recycling or slot.leaving or MonitoredPart.LOOP in stalled:
        return []
    if MonitoredPart.DATABASE in stalled:
        why = "the database does not answer, or refuses statements"
    elif MonitoredPart.HEARTBEAT in stalled:
        why = "the database refuses its heartbeats"
    elif not slot.scoreboard.progresses(MonitoredPart.DATABASE):
        why = "it has not used the tables yet"
    else:
        return []
    return [f"worker process {slot.pid}: {why}"]
