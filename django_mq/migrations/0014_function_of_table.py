"""mq_broadcast() is dropped together with the table of messages.

Test tools drop the tables of all models, and then migrate again: 0001 would find the function.
"""

from django.db import migrations

# The server does not look into the function's text. It knows that a function depends on a table
# which the default of an argument names.
#
# In the schema of the function that is replaced: the search path may begin with another one.
# Replacing a function resets its settings.
REPLACE_BROADCAST = """
do $do$
declare
    home text := coalesce(
        (select pronamespace::regnamespace::text
           from pg_proc
          where oid = to_regprocedure('mq_broadcast(text, text, jsonb, jsonb, timestamptz)')),
        quote_ident(current_schema()));
    messages regclass := coalesce(
        to_regclass(home || '.django_mq_queuedmessage'), 'django_mq_queuedmessage'::regclass);
begin
    execute format($create$
create or replace function %1$s.mq_broadcast(
    queue text, type text, payload jsonb default '{}', metadata jsonb default '{}',
    processable_after timestamptz default
        case when %2$L::regclass is null then now() end
) returns bigint
language plpgsql volatile
set search_path to %1$s, pg_temp
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
    $create$, home, messages);
end
$do$
"""


class Migration(migrations.Migration):
    dependencies = [
        ("django_mq", "0013_full_notifications"),
    ]

    operations = [
        migrations.RunSQL(REPLACE_BROADCAST, migrations.RunSQL.noop),
    ]
