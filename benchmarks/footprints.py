"""The CPU time of PostgreSQL's backends, read from /proc where the server is on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.database import Database

BACKENDS = """
select pid from pg_stat_activity
 where datname = current_database() and backend_type = 'client backend'
   and pid <> pg_backend_pid()
"""


def backend_seconds(database: Database) -> float | None:
    """Return the CPU seconds of all backends of this database; None where they are elsewhere."""
    pids = [pid for (pid,) in database.execute(BACKENDS)]
    try:
        return sum(map(_seconds, pids))
    except OSError:
        return None


def _seconds(pid: int) -> float:
    """Return the CPU seconds of one process, user's and system's.

    Raises OSError if there is none, or it is not PostgreSQL's: pids of another machine.
    """
    name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    if "postgres" not in name:
        raise ProcessLookupError(pid)
    user, system = rest.split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
