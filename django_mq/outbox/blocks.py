"""Whether the caller has a transaction open: its `atomic()` block, or one that it commits by hand.

In Django's terms, `get_autocommit()` is also false inside `atomic()`.
"""

from __future__ import annotations

from django.db.backends.base.base import BaseDatabaseWrapper


def in_own_atomic(connection: BaseDatabaseWrapper) -> bool:
    """Return whether an `atomic()` block other than those of a TestCase is open."""
    blocks = connection.atomic_blocks
    return bool(blocks) and not blocks[-1]._from_testcase  # type: ignore[attr-defined]


def commits_by_hand(connection: BaseDatabaseWrapper) -> bool:
    """Return whether autocommit is off outside any block: Django runs no hooks at its commits."""
    return not connection.in_atomic_block and not connection.get_autocommit()


def in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Return whether writes wait for the caller's commit; a TestCase's block does not count."""
    return in_own_atomic(connection) or commits_by_hand(connection)
