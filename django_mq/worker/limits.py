"""What the server enforces on the transaction of a slice."""

from __future__ import annotations

from collections.abc import Sequence

#: The server ends a transaction that is idle for the handler's timeout and this, in seconds.
IDLE_MARGIN = 30.0
#: Seconds between two looks of the server at whether we are still there.
CHECK_INTERVAL = 0.5
#: The most milliseconds that a setting of the server can have.
LONGEST = 2**31 - 1


def limits(timeouts: Sequence[float], *, slice_seconds: float) -> dict[str, str]:
    """Return settings for handlers with these `timeouts` in seconds, in milliseconds.

    A slice of several messages holds locks for its earlier ones, so a later one must not wait
    long for a lock: it would keep others waiting, or deadlock, which takes a second to be found
    out. It gives up instead, and runs again alone, where it waits as long as the session allows.

    >>> limits([60.0], slice_seconds=0.5)
    {'idle_in_transaction_session_timeout': '90000', 'client_connection_check_interval': '500'}
    >>> limits([60.0, 5.0], slice_seconds=0.5)["lock_timeout"]
    '250'
    >>> limits([1e9], slice_seconds=0.5)["idle_in_transaction_session_timeout"]
    '2147483647'
    """
    seconds = {
        "idle_in_transaction_session_timeout": IDLE_MARGIN + max(timeouts),
        "client_connection_check_interval": CHECK_INTERVAL,
    }
    if len(timeouts) > 1:
        seconds["lock_timeout"] = slice_seconds / 2
    return {name: str(min(max(1, round(value * 1000)), LONGEST)) for name, value in seconds.items()}
