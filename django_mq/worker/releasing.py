"""Release the claims of a worker process; a row that the database refuses stops no others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import psycopg

from django_mq.executor.statements import skip_refused_rows
from django_mq.store import Cursor, recover, settle
from django_mq.store.server_errors import LOST


def release_skipping_refused(
    cursor: Cursor,
    *,
    worker: str,
    kept: Sequence[int],
    claimers: Sequence[str] | None = None,
) -> set[int]:
    """Release messages of `worker` like `recover.release_all_except()`; return their ids.

    Also skips rows that the database refuses: their leases lapse.
    """
    chosen: dict[str, Any] = {"worker": worker, "kept": kept, "claimers": claimers}
    try:
        return recover.release_all_except(cursor, **chosen)
    except LOST:
        raise
    except psycopg.Error:
        fences = recover.claimed_except(cursor, **chosen)
        return set(skip_refused_rows(partial(settle.release, cursor), fences))
