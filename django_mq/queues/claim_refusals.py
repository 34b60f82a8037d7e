"""Whether the database refuses to let a worker claim a message: found out by trying."""

from __future__ import annotations

from django.db import DatabaseError, OperationalError

from django_mq.policy.error_text import Failure, describe
from django_mq.queues.transactions import writing
from django_mq.store.refused_rows import try_claim


def claim_refusal(id: int, alias: str) -> Failure | None:
    """Return the error with which a trigger, a policy or a constraint refuses the claim of `id`.

    None if the claim would succeed, or if this login may not change messages. The claim is undone.
    """
    error = _error_of([id], alias)
    if error is None or isinstance(error, OperationalError) or _error_of([], alias) is not None:
        return None
    return describe(error.__cause__ or error)


def _error_of(ids: list[int], alias: str) -> DatabaseError | None:
    try:
        with writing(alias, dry_run=True) as cursor:
            try_claim(cursor, ids, records=False)
    except DatabaseError as error:
        return error
    return None
