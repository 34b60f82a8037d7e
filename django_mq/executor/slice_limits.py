"""The limits that the server enforces for the transaction of a slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from django_mq.store.limits import Limits, set_local

#: Seconds beyond the handler's timeout after which the server ends an idle transaction.
IDLE_MARGIN = 30.0
#: Seconds between the server's checks that the client is still connected.
CHECK_INTERVAL = 0.5
#: The largest value of a server setting, in milliseconds.
MAX_SETTING_MS = 2**31 - 1


def limits(timeouts: Sequence[float], *, slice_seconds: float) -> dict[str, str]:
    """Return the settings for handlers with these `timeouts` in seconds; times are in milliseconds.

    A slice of several messages holds the locks of its earlier messages, so a later one must not
    wait long for a lock: it would keep other sessions waiting, or deadlock, which the server takes
    a second to detect. It gives up instead and runs again alone, with the session's own lock
    timeout.

    >>> limits([60.0], slice_seconds=0.5)
    {'idle_in_transaction_session_timeout': '90000', 'client_connection_check_interval': '500'}
    >>> both = limits([5.0, 60.0], slice_seconds=0.5)
    >>> both["idle_in_transaction_session_timeout"], both["lock_timeout"]
    ('90000', '250')
    >>> limits([1e9], slice_seconds=0.5)["idle_in_transaction_session_timeout"]
    '2147483647'
    """
    seconds = {
        "idle_in_transaction_session_timeout": IDLE_MARGIN + max(timeouts),
        "client_connection_check_interval": CHECK_INTERVAL,
    }
    if len(timeouts) > 1:
        seconds["lock_timeout"] = slice_seconds / 2
    return {
        name: str(min(max(1, round(value * 1000)), MAX_SETTING_MS))
        for name, value in seconds.items()
    }


def of_server(version: int) -> dict[str, str]:
    """Return further settings of a slice, for a server of this version (as libpq reports it).

    A role's limit on the length of transactions would end a slice because of one of its messages.

    >>> of_server(180000), of_server(160000)
    ({'transaction_timeout': '0'}, {})
    """
    return {"transaction_timeout": "0"} if version >= 170000 else {}


def worker_limits(settings: Mapping[str, str]) -> str:
    """Return the statements that set the limits of the worker's own statements in a slice.

    `settings` are those of the slice's transaction. A lock timeout among them stays.

    >>> worker_limits({})
    'set local statement_timeout = 30000; set local lock_timeout = 10000'
    >>> worker_limits({"lock_timeout": "50"})
    'set local statement_timeout = 30000; set local lock_timeout = 50'
    """
    own = Limits()
    if lock := settings.get("lock_timeout"):
        own = own._replace(lock=int(lock) / 1000)
    return set_local(own)


def handler_limits(settings: Mapping[str, str]) -> str:
    """Return the statements that restore the limits of handlers: those of the role.

    >>> handler_limits({})
    'set local statement_timeout to default; set local lock_timeout to default'
    """
    lock = settings.get("lock_timeout", "default")
    return f"set local statement_timeout to default; set local lock_timeout to {lock}"
