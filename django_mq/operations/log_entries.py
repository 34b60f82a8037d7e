"""The entry in the admin's log for an operation that has ended."""

from __future__ import annotations

from django.apps import apps
from django.contrib.auth import get_user_model
from django.db import connections, router, transaction

from django_mq.conf.error_logs import log_failure
from django_mq.operations.changes import REMOVING_ACTIONS
from django_mq.operations.filter_words import public_words


def log_end(id: int, action: str, user_id: str, text: str, alias: str) -> None:
    """Write the entry of the user who requested it, unless that user is unknown or gone.

    A project without the admin has no log. The operation continues even if the database refuses the
    entry or cannot be reached.
    """
    if not user_id or not apps.is_installed("django.contrib.admin"):
        return
    from django.contrib.admin.models import CHANGE, DELETION, LogEntry
    from django.contrib.contenttypes.models import ContentType

    # Imported here, since a worker is imported before the models are.
    from django_mq.models import Operation

    log_alias = router.db_for_write(LogEntry)
    try:
        with transaction.atomic(using=log_alias):
            users = get_user_model()._base_manager.using(log_alias)
            user = users.filter(pk=user_id).first()
            if user is None:
                return
            asked = Operation.objects.using(alias).filter(pk=id).values_list("filter", flat=True)
            conditions = asked.first()
            words = public_words(conditions if isinstance(conditions, dict) else {})
            LogEntry.objects.using(log_alias).create(
                user_id=user.pk,
                content_type=ContentType.objects.db_manager(log_alias).get_for_model(Operation),
                object_id=str(id),
                object_repr=f"operation {id}",
                action_flag=DELETION if action in REMOVING_ACTIONS else CHANGE,
                change_message=f"{text} ({words})",
            )
    except Exception as error:
        text = "operation %d has no entry in the admin's log"
        log_failure("no_log_entry", error, text, id, operation=id)
    finally:
        if log_alias != alias and not connections[log_alias].in_atomic_block:
            connections[log_alias].close()
