"""Carry out commands of operators.

A command is about a message that runs here (stop it, or report where its handler is), or about this
process (be quiet, resume, or leave).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from django_mq.conf.error_logs import log_failure
from django_mq.executor.async_runner import AsyncRunner
from django_mq.executor.call_timeout import CANCEL_SECONDS
from django_mq.executor.scoreboard import Entry, Scoreboard
from django_mq.executor.statements import Statements
from django_mq.executor.watchdog import Link
from django_mq.messages import Fence
from django_mq.policy.error_text import stack_text
from django_mq.policy.stack import Frame, all_stacks, running_in
from django_mq.store import commands as commands_store
from django_mq.store.leases import Command
from django_mq.store.limits import Limits

#: Asks the supervisor to end this process if the message of a fence still runs after some seconds;
#: names the operator who stopped the message.
EndProcess = Callable[[Fence, str, float], None]

HANDLER_ENDED = "Its handler had ended."
STOPPING = "Stopping its handler."
NO_SUPERVISOR = (
    "This worker cannot stop it: Worker.run() has no supervisor that could end its process. Run"
    " mq_worker, or end the process yourself."
)
BETWEEN_CALLS = "Its handler is between two calls: try again."


@dataclass(slots=True)
class CommandRunner:
    """Carries out commands, each batch on a thread and a connection of its own."""

    alias: str
    worker: str
    scoreboard: Scoreboard
    runner: AsyncRunner
    end_process: EndProcess | None
    on_order: Callable[[str, str], None]
    link: Link

    def take(self, commands: Sequence[Command]) -> None:
        """Record the orders among `commands`, and begin to carry out the others; never blocks."""
        about_messages = []
        for each in commands:
            if each.message_id is None:
                self.on_order(each.action, each.by)
            else:
                about_messages.append(each)
        if about_messages:
            threading.Thread(
                target=self._execute, args=(about_messages,), name="mq-commands", daemon=True
            ).start()

    def _execute(self, commands: Sequence[Command]) -> None:
        statements = Statements(self.alias, limits=Limits(lock=1.0), link=self.link)
        try:
            answers = {each.id: self._answer(each) for each in commands}
            commands_store.answer(statements.cursor(), answers)
        except Exception as error:
            text = "could not carry out a command for worker %s"
            log_failure("command_failed", error, text, self.worker, worker=self.worker)
        finally:
            statements.close()

    def _answer(self, command: Command) -> str:
        for entry in self.scoreboard.read(self.worker):
            if entry.fence[:2] == (command.message_id, command.attempt):
                if command.action == "stop":
                    return self._stop(entry, command.by)
                return stack_text(self._where(entry)) or BETWEEN_CALLS
        return HANDLER_ENDED

    def _stop(self, entry: Entry, by: str) -> str:
        cancelled = self.runner.stop(entry.fence.id, by)
        if self.end_process is not None:
            self.end_process(entry.fence, by, CANCEL_SECONDS if cancelled else 0.0)
        elif not cancelled:
            return NO_SUPERVISOR
        return STOPPING

    def _where(self, entry: Entry) -> list[Frame]:
        if awaited := self.runner.where(entry.fence.id):
            return awaited
        return running_in(all_stacks(), entry.thread)
