"""Whether the caller has a transaction open: its `atomic()` block, or one that it commits by hand.

In Django's terms, `get_autocommit()` is also false inside `atomic()`.
"""

from __future__ import annotations

from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper


def in_own_atomic(connection: BaseDatabaseWrapper) -> bool:
    """Return whether an `atomic()` block other than those of a TestCase is open."""
    blocks: list[Any] = connection.atomic_blocks
    return bool(blocks) and not blocks[-1]._from_testcase


def own_block(connection: BaseDatabaseWrapper) -> Any:
    """Return the outermost open `atomic()` block that is not a TestCase's, or None."""
    blocks: list[Any] = connection.atomic_blocks
    return next((block for block in blocks if not block._from_testcase), None)


def testcase_block(connection: BaseDatabaseWrapper) -> Any:
    """Return the innermost open block of a TestCase, or None: each test has another one."""
    blocks: list[Any] = connection.atomic_blocks
    return next((block for block in reversed(blocks) if block._from_testcase), None)


def commits_by_hand(connection: BaseDatabaseWrapper) -> bool:
    """Return whether autocommit is off outside any block: Django runs no hooks at its commits."""
    return not connection.in_atomic_block and not connection.get_autocommit()


def in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Return whether writes wait for the caller's commit; a TestCase's block does not count."""
    return in_own_atomic(connection) or commits_by_hand(connection)
