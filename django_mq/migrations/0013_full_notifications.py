"""mq_broadcast() does not ring when the server's queue of notifications is nearly full.

Otherwise the caller's transaction would fail at its COMMIT.
"""

from django.db import migrations

REPLACE_BROADCAST = """
create or replace function mq_broadcast(
    queue text, type text, payload jsonb default '{}', metadata jsonb default '{}',
    processable_after timestamptz default null
) returns bigint
language plpgsql volatile
as $$
declare
    new_id bigint;
begin
    insert into django_mq_queuedmessage (queue, type, payload, metadata, processable_after)
    values (
        mq_broadcast.queue, mq_broadcast.type,
        coalesce(mq_broadcast.payload, '{}'), coalesce(mq_broadcast.metadata, '{}'),
        coalesce(mq_broadcast.processable_after, statement_timestamp())
    )
    returning id into new_id;
    if pg_notification_queue_usage() < 0.9 then
        perform pg_notify('django_mq', '');
    end if;
    return new_id;
end
$$
"""
# Replacing a function resets its settings.
PIN_SEARCH_PATH = """
do $$
begin
    execute format(
        'alter function mq_broadcast(text, text, jsonb, jsonb, timestamptz)'
        ' set search_path to %I, pg_temp', current_schema());
end
$$
"""


class Migration(migrations.Migration):
    dependencies = [
        ("django_mq", "0012_capacity"),
    ]

    operations = [
        migrations.RunSQL(REPLACE_BROADCAST, migrations.RunSQL.noop),
        migrations.RunSQL(PIN_SEARCH_PATH, migrations.RunSQL.noop),
    ]
