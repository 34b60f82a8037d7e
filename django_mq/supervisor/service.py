"""Report the worker's condition to systemd: READY=1, WATCHDOG=1 and STOPPING=1 of `Type=notify`.

Source: sd_notify(3) and sd_watchdog_enabled(3).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping, Sequence
from time import monotonic


class Service:
    """The systemd unit of this process.

    `watchdog` is the number of seconds between two WATCHDOG=1: half of the unit's WatchdogSec.
    """

    def __init__(self, address: str, watchdog: float | None = None) -> None:
        # A name that begins with @ is in the abstract namespace.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog = watchdog
        self._due = float("-inf")
        self._ready = False

    @classmethod
    def of_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Service | None:
        """Return the unit that started this process; None if there is none.

        The variables are removed, since they are not meant for processes that handlers start.
        """
        address = environment.pop("NOTIFY_SOCKET", "")
        microseconds = environment.pop("WATCHDOG_USEC", "")
        pid = environment.pop("WATCHDOG_PID", "") or str(os.getpid())
        if address[:1] not in ("/", "@"):
            return None
        mine = microseconds.isdecimal() and int(microseconds) > 0 and pid == str(os.getpid())
        return cls(address, int(microseconds) / 2e6 if mine else None)

    def report(self, not_live: Sequence[str], not_ready: Sequence[str]) -> None:
        """Report once that the worker is ready; while it is live, feed the watchdog.

        The arguments name the failed parts; both are empty for a worker that is live and ready.
        """
        if not not_ready and not self._ready:
            self._ready = self._notify("READY=1")  # else again at the next report
        if not not_live and self._watchdog is not None and monotonic() >= self._due:
            self._due = monotonic() + self._watchdog
            self._notify("WATCHDOG=1")

    def stopping(self) -> None:
        """Report that the worker drains."""
        self._notify("STOPPING=1")

    def _notify(self, word: str) -> bool:
        """Send one datagram; return whether it was taken.

        A unit that cannot be reached must not end the worker.
        """
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.setblocking(False)
            link.sendto(word.encode(), self._address)
            return True
        return False
