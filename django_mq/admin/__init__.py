"""The admin: what waits, runs, failed and died, and what to do about it.

Everything is read only but for guarded actions. The classes are for subclassing, with
`DJANGO_MQ["ADMIN"] = False`, for instance to show each user some of the queues only:

    class Scoped:
        def get_queues(self, request):
            return None if request.user.is_superuser else {"mail"}

    @admin.register(QueuedMessage)
    class MessageAdmin(Scoped, QueuedMessageAdmin): ...
"""

from django.contrib import admin
from django.core.exceptions import ImproperlyConfigured

from django_mq.admin.attempts import FailedAttemptAdmin
from django_mq.admin.base import QueueScopeMixin, ReadOnlyAdmin
from django_mq.admin.messages import QueuedMessageAdmin
from django_mq.admin.queues import QueueStateAdmin
from django_mq.admin.results import ResultAdmin
from django_mq.admin.unique import UniqueKeyAdmin
from django_mq.admin.workers import WorkerHeartbeatAdmin
from django_mq.conf import get_settings
from django_mq.models import (
    FailedAttempt,
    QueuedMessage,
    QueueState,
    Result,
    UniqueKey,
    WorkerHeartbeat,
)

__all__ = [
    "FailedAttemptAdmin",
    "QueueScopeMixin",
    "QueueStateAdmin",
    "QueuedMessageAdmin",
    "ReadOnlyAdmin",
    "ResultAdmin",
    "UniqueKeyAdmin",
    "WorkerHeartbeatAdmin",
]


def _is_wanted() -> bool:
    try:
        return get_settings().admin
    except ImproperlyConfigured:  # the system checks say what is wrong, all of it
        return False


if _is_wanted():
    admin.site.register(QueuedMessage, QueuedMessageAdmin)
    admin.site.register(FailedAttempt, FailedAttemptAdmin)
    admin.site.register(QueueState, QueueStateAdmin)
    admin.site.register(Result, ResultAdmin)
    admin.site.register(UniqueKey, UniqueKeyAdmin)
    admin.site.register(WorkerHeartbeat, WorkerHeartbeatAdmin)
