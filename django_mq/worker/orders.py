"""The orders of operators to this process, as its threads see them."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger("django_mq")

#: To claim nothing more, to claim again, and to drain and end.
QUIET, RESUME, LEAVE = "quiet", "resume", "leave"
_TEXTS = {
    QUIET: "is quiet: it finishes what runs, and claims nothing more",
    RESUME: "claims again",
    LEAVE: "drains and leaves",
}


class Orders:
    """The last order about claims, and whether to leave; any thread may give them.

    The loop carries them out: what it has seen, it reports and passes on to the supervisor, which
    replaces a process that died by one with the same order.
    """

    def __init__(self) -> None:
        self.quiet = self.leaving = False
        self._seen = RESUME
        self._by = ""
        self._pass_on: Callable[[str], None] = lambda order: None

    def supervised(self, pass_on: Callable[[str], None]) -> None:
        """Pass on each order, once it is carried out."""
        self._pass_on = pass_on

    def give(self, order: str, by: str) -> None:
        """Note an order; an unknown one is left alone."""
        self._by = by
        if order == LEAVE:
            self.leaving = True
        elif order in (QUIET, RESUME):
            self.quiet = order == QUIET

    def report(self, worker: str) -> None:
        """Log and pass on the order of now, unless that was done; called by the loop."""
        order = LEAVE if self.leaving else QUIET if self.quiet else RESUME
        if order == self._seen:
            return
        self._seen = order
        logger.info(
            "worker %s %s, by order of %s",
            worker,
            _TEXTS[order],
            self._by or "an operator",
            extra={"event": f"worker_{order}", "worker": worker, "by": self._by},
        )
        self._pass_on(order)
