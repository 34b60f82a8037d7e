"""When a suspect that waits to run alone keeps everything else from starting."""

from __future__ import annotations

from math import log2

#: Seconds that a suspect waits for a moment when nothing else runs. After that nothing else starts,
#: until the first of the turns that it takes with the others is over.
SUSPECT_WAIT_SECONDS = 10.0
#: Seconds of that turn. Each following one lasts twice as long: a handler may run for hours, but in
#: some turn of the suspect all handlers end.
FIRST_TURN_SECONDS = 20.0


def takes_turns(waits: float) -> bool:
    """Return whether a suspect that has waited for `waits` seconds takes turns with the others."""
    return waits > SUSPECT_WAIT_SECONDS


def stops_others(waits: float) -> bool:
    """Return whether nothing else starts because a suspect has waited for `waits` seconds."""
    return takes_turns(waits) and not lets_others_start(waits)


def lets_others_start(waits: float) -> bool:
    """Return whether it is the turn of the others while a suspect has waited for `waits` seconds.

    Without these turns, all threads would be idle for as long as one long handler runs.

    >>> [lets_others_start(seconds) for seconds in (0, 29, 31, 69, 71, 149, 151)]
    [False, False, True, True, False, False, True]
    """
    late = waits - SUSPECT_WAIT_SECONDS
    return late > 0 and int(log2(late / FIRST_TURN_SECONDS + 1)) % 2 == 1
