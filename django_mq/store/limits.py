"""The limits of one transaction: how long its statements run, and how long they wait for locks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django_mq.store import Cursor

LIMITS = """
select set_config('statement_timeout', %(statement)s, true),
       set_config('lock_timeout', %(lock)s, true)
"""


def set_limits(cursor: Cursor, *, statement: float, lock: float) -> None:
    """Limit each statement of this transaction to `statement` seconds, each lock wait to `lock`.

    Overrides the settings of role and database. Call it first.
    """
    cursor.execute(LIMITS, {"statement": f"{statement * 1000:.0f}", "lock": f"{lock * 1000:.0f}"})
