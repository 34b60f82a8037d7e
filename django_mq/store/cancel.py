"""Cancel waiting messages; never one that a worker holds."""

from __future__ import annotations

from django_mq.store import Cursor
from django_mq.store.operators import Removed

# The planner folds `id = null or null is null` away, so an id is looked up by its index.
# A locked row is being claimed or settled: it is skipped, and counts as in flight.
CANCEL = """
with matching as materialized (
    select m.id, m.leased_until
    from django_mq_queuedmessage m
    where m.dead_at is null
        and (%(id)s::bigint is null or m.id = %(id)s)
        and (%(type)s::text is null or m.type = %(type)s)
        and (%(unique_id)s::text is null or m.unique_id = %(unique_id)s)
), waiting as materialized (
    select m.id
    from django_mq_queuedmessage m
    where m.id = any(array(select id from matching))
        and m.leased_until is null and m.dead_at is null
    for update skip locked
), gone as (
    delete from django_mq_queuedmessage
    where id = any(array(select id from waiting))
    returning id, queue, handler, key, type, unique_id, wants_result
), unanswered as (
    insert into django_mq_result (message_id, handler, error_class, error_text)
    select id, handler, 'Unanswered', 'cancelled' from gone where wants_result
        on conflict (message_id) do nothing
)
select matched.count, gone.id, gone.queue, gone.handler, gone.key, gone.type, gone.unique_id
  from (select count(*) from matching) matched
  left join gone on true
 order by gone.id
"""


def cancel(
    cursor: Cursor, *, id: int | None, type: str | None, unique_id: str | None
) -> tuple[list[Removed], int]:
    """Delete the waiting messages that match every argument that is not None.

    Returns the deleted messages in the order of ids, and the number of others that match but are
    in flight: leased, or locked at this moment. Dead letters are neither deleted nor counted.
    """
    cursor.execute(CANCEL, {"id": id, "type": type, "unique_id": unique_id})
    rows = cursor.fetchall()
    gone = [Removed._make(row[1:]) for row in rows if row[1] is not None]
    return gone, rows[0][0] - len(gone)
