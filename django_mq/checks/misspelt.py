"""Names that no handler has, but that resemble the name of a handler in this project.

Other projects may share the tables, so a name that is merely unknown here is not a mistake.
"""

from __future__ import annotations

from django.core import checks

from django_mq.checks.registering import TAG, CheckMessages, check
from django_mq.conf import Settings
from django_mq.handlers import all_handlers, all_schedules, allowed_queues
from django_mq.handlers.nearest import probable_types
from django_mq.policy.similar_names import similar

SILENCE_HINT = "If another project uses the name as it is, silence this check."


@check(TAG)
def check_queue_names(settings: Settings) -> CheckMessages:
    """W008: QUEUES has options for a queue whose name is probably misspelt."""
    if any(each.any_queue for each in all_handlers()):
        return  # any name may be that of a queue that only tasks use
    used = {queue for each in all_handlers() for queue in allowed_queues(each, settings)}
    scheduled = {each.queue for each in all_schedules()}
    for name in sorted(settings.queues.keys() - used - scheduled - {settings.default_queue}):
        # These options were not meant for a queue that has options of its own.
        if found := similar(name, used - settings.queues.keys()):
            yield checks.Warning(
                f"QUEUES has options for {name!r}, a queue that no handler here uses.",
                hint=f"Did you mean {' or '.join(map(repr, found))}? {SILENCE_HINT}",
                id="django_mq.W008",
            )


@check(TAG)
def check_scheduled_types(settings: Settings) -> CheckMessages:
    """W009: a declared schedule broadcasts a type that is probably misspelt."""
    for each in all_schedules():
        if found := probable_types(each.type):
            yield checks.Warning(
                f"The schedule {each.name!r} broadcasts {each.type}, a type that no handler here"
                " takes.",
                hint=f"Did you mean {' or '.join(found)}? {SILENCE_HINT}",
                id="django_mq.W009",
            )
