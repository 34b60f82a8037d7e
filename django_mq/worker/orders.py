"""Orders of operators to this process, shared by its threads."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger("django_mq")

#: Claim nothing more; claim again; drain and exit.
QUIET, RESUME, LEAVE = "quiet", "resume", "leave"
_EVENTS = {QUIET: "worker_quiet", RESUME: "worker_resume", LEAVE: "worker_leave"}
_TEXTS = {
    QUIET: "is quiet: it finishes what runs, and claims nothing more",
    RESUME: "claims again",
    LEAVE: "drains and leaves",
}


class Orders:
    """The last order about claims, and whether to leave; any thread may give an order.

    The loop carries orders out, then logs them and passes them on to the supervisor. If the process
    dies, the supervisor starts its successor with the same order.
    """

    def __init__(self) -> None:
        self.quiet = self.leaving = False
        self._seen = RESUME
        self._by = ""
        self._pass_on: Callable[[str], None] = lambda order: None

    def supervised(self, pass_on: Callable[[str], None]) -> None:
        """Set the function that receives each order once the loop has carried it out."""
        self._pass_on = pass_on

    def record(self, order: str, by: str = "") -> None:
        """Record an order; ignore an unknown one."""
        self._by = by
        if order == LEAVE:
            self.leaving = True
        elif order in (QUIET, RESUME):
            self.quiet = order == QUIET

    def report(self, worker: str) -> None:
        """Log and pass on the current order, unless already reported; the loop calls this."""
        order = LEAVE if self.leaving else QUIET if self.quiet else RESUME
        if order == self._seen:
            return
        self._seen = order
        logger.info(
            "worker %s %s, by order of %s",
            worker,
            _TEXTS[order],
            self._by or "an operator",
            extra={"event": _EVENTS[order], "worker": worker, "by": self._by},
        )
        self._pass_on(order)
