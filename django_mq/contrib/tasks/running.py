"""Run a task: call its function with the stored arguments, and announce that it started."""

from __future__ import annotations

from typing import Any

from asgiref.sync import sync_to_async

from django_mq.contrib.tasks import results
from django_mq.contrib.tasks.compat import Task, TaskContext, normalize_json, task_started
from django_mq.contrib.tasks.errors import TaskInterrupted
from django_mq.exceptions import Reject
from django_mq.messages import Delivery


class TaskRunner:
    """The handler function of one task: `run` of a plain function, `arun` of a coroutine."""

    def __init__(self, task: Task[..., Any]) -> None:
        self.task = task

    def run(self, delivery: Delivery) -> Any:
        """Run one attempt; return its value, which is JSON."""
        args, kwargs = self._start(delivery)
        try:
            return normalize_json(self.task.func(*args, **kwargs))
        except KeyboardInterrupt as interrupt:
            raise TaskInterrupted from interrupt

    async def arun(self, delivery: Delivery) -> Any:
        """Run one attempt of a coroutine; return its value, which is JSON."""
        args, kwargs = await sync_to_async(self._start)(delivery)
        try:
            return normalize_json(await self.task.func(*args, **kwargs))
        except KeyboardInterrupt as interrupt:
            raise TaskInterrupted from interrupt

    def _start(self, delivery: Delivery) -> tuple[list[Any], dict[str, Any]]:
        """Announce that the attempt starts; return the arguments of the function."""
        found = results.running(self.task, delivery)
        if found is None:
            raise Reject("the payload has no args and kwargs, so no enqueue() wrote it")
        task_started.send_robust(results.sender_of(found), task_result=found)
        args = list(found.args)
        if self.task.takes_context:
            args.insert(0, TaskContext(task_result=found))
        return args, found.kwargs
