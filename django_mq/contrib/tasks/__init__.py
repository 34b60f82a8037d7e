"""A backend for Django's tasks: `task.enqueue()` stores a message in your transaction.

For example::

    TASKS = {"default": {"BACKEND": "django_mq.contrib.tasks.MessageQueueBackend", "QUEUES": []}}
"""

from django_mq.contrib.tasks.backend import MessageQueueBackend
from django_mq.contrib.tasks.errors import TaskCancelled, TaskDiscarded, TaskExpired
from django_mq.contrib.tasks.message_task import MessageTask, task

__all__ = [
    "MessageQueueBackend",
    "MessageTask",
    "TaskCancelled",
    "TaskDiscarded",
    "TaskExpired",
    "task",
]
