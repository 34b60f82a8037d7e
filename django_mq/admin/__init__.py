"""The admin pages: overview, messages and their history, attempts, queues, workers and so on.

Everything is read-only except actions, the forms that broadcast and edit messages, and schedules
created here; all need permissions. To change the pages, set `DJANGO_MQ["ADMIN"] = False` and
register subclasses, for example to show a user only some queues:

    class Scoped:
        def get_queues(self, request):
            return None if request.user.is_superuser else {"mail"}

    @admin.register(QueuedMessage)
    class MessageAdmin(Scoped, QueuedMessageAdmin): ...
"""

from django.contrib import admin
from django.core.exceptions import ImproperlyConfigured

from django_mq.admin.attempts import FailedAttemptAdmin
from django_mq.admin.base import ReadOnlyAdmin
from django_mq.admin.history import HandledMessageAdmin
from django_mq.admin.messages import QueuedMessageAdmin
from django_mq.admin.operations import OperationAdmin
from django_mq.admin.overview import OverviewAdmin
from django_mq.admin.queues import QueueStateAdmin
from django_mq.admin.results import ResultAdmin
from django_mq.admin.schedules import ScheduleAdmin
from django_mq.admin.scope import QueueScopeMixin
from django_mq.admin.unique_ids import UniqueKeyAdmin
from django_mq.admin.workers import WorkerHeartbeatAdmin
from django_mq.conf import get_settings
from django_mq.models import (
    FailedAttempt,
    HandledMessage,
    Operation,
    Overview,
    QueuedMessage,
    QueueState,
    Result,
    Schedule,
    UniqueKey,
    WorkerHeartbeat,
)

__all__ = [
    "FailedAttemptAdmin",
    "HandledMessageAdmin",
    "OperationAdmin",
    "OverviewAdmin",
    "QueueScopeMixin",
    "QueueStateAdmin",
    "QueuedMessageAdmin",
    "ReadOnlyAdmin",
    "ResultAdmin",
    "ScheduleAdmin",
    "UniqueKeyAdmin",
    "WorkerHeartbeatAdmin",
]


def _is_wanted() -> bool:
    try:
        return get_settings().admin
    except ImproperlyConfigured:  # the system checks report every error in the settings
        return False


if _is_wanted():
    admin.site.register(Overview, OverviewAdmin)
    admin.site.register(QueuedMessage, QueuedMessageAdmin)
    admin.site.register(FailedAttempt, FailedAttemptAdmin)
    admin.site.register(HandledMessage, HandledMessageAdmin)
    admin.site.register(Operation, OperationAdmin)
    admin.site.register(QueueState, QueueStateAdmin)
    admin.site.register(Result, ResultAdmin)
    admin.site.register(Schedule, ScheduleAdmin)
    admin.site.register(UniqueKey, UniqueKeyAdmin)
    admin.site.register(WorkerHeartbeat, WorkerHeartbeatAdmin)
