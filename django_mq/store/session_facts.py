"""Facts of one session: clock, process, limits of its login, and whether a NOTIFY reaches it.

The functions take a connection of the bare driver in autocommit mode.
"""

from __future__ import annotations

import secrets
from time import monotonic, time
from typing import Any, NamedTuple

import psycopg

NOW = "select extract(epoch from clock_timestamp())::float8"


class Clocks(NamedTuple):
    """The seconds by which the server's clock is ahead, give or take `margin`."""

    ahead: float
    margin: float


def compare_clocks(driver: psycopg.Connection[Any]) -> Clocks:
    """Compare the server's clock with this machine's; the margin is half a round trip."""
    asked_at, began = time(), monotonic()
    row = driver.execute(NOW).fetchone()
    margin = (monotonic() - began) / 2
    return Clocks((row[0] if row else asked_at) - asked_at - margin, margin)


SERVER_PROCESS = "select pg_backend_pid()"


def is_pooled(driver: psycopg.Connection[Any]) -> bool:
    """Return whether there is a pooler: it reports a process id that is not the server's own."""
    row = driver.execute(SERVER_PROCESS).fetchone()
    return row is not None and row[0] != driver.info.backend_pid


class LoginLimits(NamedTuple):
    """The limits of this login: milliseconds per statement, and connections (None: no limit)."""

    statement: int
    connections: int | None


LOGIN_LIMITS = """
select (select s.setting::bigint from pg_settings s where s.name = 'statement_timeout'),
       least(nullif(r.rolconnlimit, -1),
             (select s.setting::bigint from pg_settings s where s.name = 'max_connections'))
  from pg_roles r
 where r.rolname = session_user
"""


def login_limits(driver: psycopg.Connection[Any]) -> LoginLimits:
    """Return the limits of the login, as a new session of it has them."""
    row = driver.execute(LOGIN_LIMITS).fetchone()
    return LoginLimits(*row) if row else LoginLimits(0, None)


LENT_LIMITS = """
select s.name, current_setting(s.name)
  from pg_settings s
 where s.name in ('statement_timeout', 'lock_timeout', 'idle_in_transaction_session_timeout',
                  'transaction_timeout')
   and s.source = 'session' and s.setting <> s.reset_val
 order by s.name
"""


def lent_limits(driver: psycopg.Connection[Any]) -> dict[str, str]:
    """Return the limits that another program left in this session of a pooler, by name.

    `driver` must be new: what its own program has SET since would be among them.
    """
    return dict(driver.execute(LENT_LIMITS).fetchall()) if is_pooled(driver) else {}


# The view lists neither the role (of which "none" is the login itself) nor settings with a dot.
SETTINGS = """
select s.name, s.setting
  from pg_settings s
 where s.source = 'session' and s.context in ('user', 'superuser')
 union all
select 'role', current_setting('role')
 where current_setting('role') <> 'none'
"""


def settings_of(driver: psycopg.Connection[Any]) -> dict[str, str]:
    """Return what was SET in the session, by name, without settings of extensions (`a.b`)."""
    return dict(driver.execute(SETTINGS).fetchall())


#: For the probes below alone: every listener hears all probes, and picks its own.
PROBE_CHANNEL = "django_mq_probe"


def notify_arrives(
    listening: psycopg.Connection[Any], notifying: psycopg.Connection[Any], *, seconds: float
) -> bool | None:
    """Return whether a NOTIFY of one session reaches the LISTEN of the other within `seconds`.

    None if the server did not answer the NOTIFY by then: a pooler may have no session for it.
    """
    listening.execute(f"listen {PROBE_CHANNEL}")
    token = secrets.token_hex(8)
    notifying.pgconn.send_query(f"notify {PROBE_CHANNEL}, '{token}'".encode())
    arrives = any(each.payload == token for each in listening.notifies(timeout=seconds))
    listening.execute(f"unlisten {PROBE_CHANNEL}")
    notifying.pgconn.consume_input()
    return None if notifying.pgconn.is_busy() and not arrives else arrives
