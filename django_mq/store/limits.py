"""The limits of the worker's own statements: how long each runs, and how long it waits for locks.

They hold whatever the role or the database sets. Handlers run under the limits of their role.
`limit_waits()` limits the transactions of operators and producers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from psycopg import Connection

    from django_mq.store import Cursor

#: Seconds that one statement may take.
STATEMENT_SECONDS = 30.0
#: Seconds that one statement waits for a lock, such as a migration takes on a whole table.
LOCK_SECONDS = 10.0
#: The isolation level of transactions in which no handler runs: after a lock, the next statement
#: must see a newer snapshot.
ISOLATION = "read committed"


class Limits(NamedTuple):
    """Seconds that a statement may take, and that it waits for a lock."""

    statement: float = STATEMENT_SECONDS
    lock: float = LOCK_SECONDS


def set_for_session(limits: Limits, *, server_version: int) -> str:
    """Return the statements that set `limits` for a session in which no handler runs.

    They also undo settings of the role that would end the session while it waits, or change what
    its statements see. The server ends a transaction that was left idle for as long as a statement
    may take. `server_version` is as libpq has it.

    >>> print(set_for_session(Limits(30, 0.2), server_version=150000))
    set statement_timeout = 30000; set lock_timeout = 200;
    set idle_in_transaction_session_timeout = 30000; set idle_session_timeout = 0;
    set default_transaction_isolation = 'read committed'
    """
    statement, lock = map(_milliseconds, limits)
    return (
        f"set statement_timeout = {statement}; set lock_timeout = {lock};\n"
        f"set idle_in_transaction_session_timeout = {statement}; set idle_session_timeout = 0;\n"
        f"set default_transaction_isolation = '{ISOLATION}'"
        + ("; set transaction_timeout = 0" if server_version >= 170000 else "")
    )


def allow_session(statement: float) -> str:
    """Return the statement that changes how long the session's statements may take."""
    return f"set statement_timeout = {_milliseconds(statement)}"


#: Keeps a limit of the role from ending a session of handlers between two messages. Returns a row
#: if there is such a limit.
STAY_WHILE_IDLE = """
select set_config('idle_session_timeout', '0', false)
 where current_setting('idle_session_timeout') <> '0'
"""

#: Begins a transaction of the worker alone.
BEGIN = f"begin isolation level {ISOLATION}"


def begin(limits: Limits) -> str:
    """Return the statements that begin a transaction with `limits`.

    >>> begin(Limits(30, 1)).startswith("begin isolation level read committed; set local ")
    True
    """
    return f"{BEGIN}; {set_local(limits)}"


def set_local(limits: Limits) -> str:
    """Return the statements that set `limits` until the end of the transaction.

    >>> set_local(Limits(30, 0.2))
    'set local statement_timeout = 30000; set local lock_timeout = 200'
    """
    statement, lock = map(_milliseconds, limits)
    return f"set local statement_timeout = {statement}; set local lock_timeout = {lock}"


def set_each(settings: Mapping[str, str]) -> str:
    """Return the statements that set integer settings until the end of the transaction.

    >>> set_each({"lock_timeout": "50", "client_connection_check_interval": "500"})
    'set local lock_timeout = 50; set local client_connection_check_interval = 500; '
    """
    return "".join([f"set local {name} = {int(value)}; " for name, value in settings.items()])


# A single query, for where several statements cannot be sent at once. The planner overestimates the
# cost of a message's state: JIT would spend a second compiling what runs in 10 ms.
SET_LOCAL = """
select set_config('jit', 'off', true),
       set_config('statement_timeout', %(statement)s, true),
       set_config('lock_timeout', %(lock)s, true)
"""


def apply(cursor: Cursor | Connection[Any], limits: Limits) -> None:
    """Set `limits` until the end of the open transaction, without JIT."""
    cursor.execute(
        SET_LOCAL, {name: str(_milliseconds(value)) for name, value in limits._asdict().items()}
    )


#: The isolation level can be set only before the first statement of a transaction.
READ_COMMITTED = "set transaction isolation level read committed"

# Operators' changes skip locked rows; for them the limit is for locks on a whole table.
LIMIT_WAITS = """
select s.setting,
       set_config('lock_timeout', least(%(most_ms)s, nullif(s.setting::int, 0))::text, true)
  from pg_settings s
 where s.name = 'lock_timeout'
"""


def limit_waits(cursor: Cursor, *, most_ms: int = 1000) -> str:
    """Let this transaction wait up to `most_ms` for a lock; return the previous limit, in ms."""
    cursor.execute(LIMIT_WAITS, {"most_ms": most_ms})
    before: str = cursor.fetchone()[0]
    return before


RESTORE_WAITS = "select set_config('lock_timeout', %(before)s, true)"


def restore_waits(cursor: Cursor, before: str) -> None:
    """Restore the limit that `limit_waits` returned."""
    cursor.execute(RESTORE_WAITS, {"before": before})


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
