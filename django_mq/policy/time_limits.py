"""How long a handler may run, in words."""

from __future__ import annotations

from typing import NamedTuple

from django_mq.policy.durations import precise_span

#: A process may end this many seconds after its handler's timeout; a longer run was extended.
LATE = 10.0


class TimeLimit(NamedTuple):
    """The `seconds` that a handler may run, by its own option or by the setting TIMEOUT."""

    seconds: float
    is_option: bool
    can_move: bool

    def words(self, ran: float) -> str:
        """Name the limit of a handler that ran past it, after `ran` seconds (0: unknown).

        >>> TimeLimit(2.0, is_option=True, can_move=True).words(2.1)
        'the option timeout, 2 s'
        >>> TimeLimit(300.0, is_option=False, can_move=True).words(900.0)
        'the setting TIMEOUT, 5 min, or a later extend()'
        """
        name = "the option timeout" if self.is_option else "the setting TIMEOUT"
        is_near = not ran or self.seconds <= ran < self.seconds + LATE
        moved = "" if is_near or not self.can_move else ", or a later extend()"
        return f"{name}, {precise_span(self.seconds)}{moved}"
