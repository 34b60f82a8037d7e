"""What else the end of a delivery changes, in the transaction that settles it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from django_mq.outcomes import DeadLettered
from django_mq.store import keys
from django_mq.store.keys import Line
from django_mq.worker import answers, ending, freed  # `ending` imports this one, so no names of it

if TYPE_CHECKING:
    from django_mq.messages import ClaimedRow
    from django_mq.store import Cursor
    from django_mq.worker.ending import Ended

_more = attrgetter("key", "unique_id", "wants_result", "ordered")
_NOTHING = (None, None, False, False)


def having_any(ended: Sequence[Ended]) -> list[Ended]:
    """Return those whose end changes more than their own rows: of most messages none."""
    return [each for each in ended if _more(each.delivery._row) != _NOTHING]


def follow(cursor: Cursor, ended: Sequence[Ended]) -> None:
    """Do what follows from deliveries that were settled just now, in the same transaction.

    They were still ours.
    """
    if more := having_any(ended):
        answers.follow(cursor, more)
        free_lines(cursor, [each.delivery._row for each in more if _is_over(each)])
        freed.follow(cursor, more)


def free_lines(cursor: Cursor, rows: Sequence[ClaimedRow]) -> None:
    """These messages are done, or dead: let what waits behind them in their keys go on."""
    keys.free_next(
        cursor, [Line(row.queue, row.handler, row.key) for row in rows if row.key is not None]
    )


def _is_over(ended: Ended) -> bool:
    buried = ended.settled is ending.Settled.BURIED or isinstance(ended.outcome, DeadLettered)
    return buried or ended.settled in ending.DONE
