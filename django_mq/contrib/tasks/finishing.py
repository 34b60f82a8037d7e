"""Announce that a task has finished: once, after the commit that settled it."""

from __future__ import annotations

import json
from time import time

from django_mq import handlers
from django_mq.conf.error_logs import log_failure
from django_mq.contrib.tasks import errors, results
from django_mq.contrib.tasks.compat import task_finished
from django_mq.contrib.tasks.registration import task_of
from django_mq.contrib.tasks.results import TaskAttempts
from django_mq.executor.ended import DONE, Ended, Settled
from django_mq.executor.replies import EncodedResults
from django_mq.messages import worker_of
from django_mq.policy.outcomes import DeadLettered


def announce_finished(ended: Ended) -> None:
    """Send `task_finished` if the task will not run again; never raises."""
    if not ended.is_over:
        return
    try:
        _send(ended)
    except Exception as error:
        id = ended.delivery.id
        text = "could not announce that task %s has finished"
        log_failure("receiver_failed", error, text, id, message_id=id)


def _send(ended: Ended) -> None:
    task = task_of(handlers.get(ended.delivery.handler))
    if task is None:
        return
    succeeded = ended.settled in DONE
    value = None
    if succeeded and isinstance(ended.result, EncodedResults):
        value = json.loads(ended.result[ended.delivery.id])
    found = results.ended(task, ended.delivery, _attempts(ended), succeeded=succeeded, value=value)
    if found is None:
        return
    sender = results.sender_of(found, task)
    if ended.error is None:
        task_finished.send_robust(sender, task_result=found)
        return
    traceback = ended.error.__traceback__
    try:
        raise ended.error  # the receiver that logs this reads sys.exc_info()
    except BaseException:
        ended.error.__traceback__ = traceback
        task_finished.send_robust(sender, task_result=found)


def _attempts(ended: Ended) -> TaskAttempts:
    """Return the attempts of a task; queries them only for a task that was retried."""
    delivery, outcome = ended.delivery, ended.outcome
    if ended.settled is Settled.DEAD_UNSTARTED:
        attempts = results.failed_attempts(delivery, None)
        attempts.errors.append(errors.unanswered(ended.reason))
        return attempts
    if isinstance(outcome, DeadLettered):
        if delivery.attempt > 1:
            return results.failed_attempts(delivery, delivery.attempt)
        attempts, failure = TaskAttempts(), outcome.failure
        attempts.errors.append(
            errors.failed(failure.error_class, failure.traceback or failure.text)
        )
    else:
        attempts = results.failed_attempts(delivery, delivery.attempt - 1)
    attempts.add(worker_of(delivery._row.claimed_by), time() - ended.seconds)
    return attempts
