"""`mq_workers [list|quiet|resume|stop] [ID ...] [--host NAME | --all]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mq import queues
from django_mq.management.arguments import login, wrong_arguments
from django_mq.management.base import Declined, OperatorCommand
from django_mq.management.output import as_json, running_table, workers_table
from django_mq.policy.plain_text import one_line
from django_mq.queues import RunningMessage, WorkerProcess

#: The maximum number of running messages shown; --json has all.
MAX_RUNNING = 100

#: The function of each order, and what the question before it says; resuming asks nothing.
ORDERS = {
    "quiet": (
        queues.quiet_workers,
        "Running messages are finished; nothing more is claimed until mq_workers resume.",
    ),
    "resume": (queues.resume_workers, ""),
    "stop": (
        queues.stop_workers,
        "Running messages are finished, then the process ends and is not replaced.",
    ),
}


class Command(OperatorCommand):
    actions = ("list", *ORDERS)
    help = (
        "List the worker processes and what they run, or tell some to claim nothing, to resume, or"
        " to stop."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "ids",
            nargs="*",
            default=[],
            metavar="ID",
            help="worker ids, or their beginnings as in the list",
        )
        parser.add_argument("--host", metavar="NAME", help="all worker processes of this host")
        parser.add_argument("--all", action="store_true", help="all worker processes")
        parser.add_argument("--by", metavar="NAME", help="who tells them (default: the login)")
        parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")

    def operate(self, *, database: str | None, **options: Any) -> None:
        action, known = options["action"], queues.workers(using=database)
        if action == "list":
            self._list(known, queues.running(using=database), options)
            return
        chosen = _chosen([each for each in known if each.alive], options)
        if not options["json"]:
            self.stdout.write(workers_table(chosen))
        give, effect = ORDERS[action]
        question = f"{action.capitalize()} {_count(chosen)}? {effect}"
        if effect and not self.confirm(question, **options):
            raise Declined
        by = login() if options["by"] is None else options["by"]
        told = give([each.id for each in chosen], by=by, using=database)
        if options["json"]:
            self.stdout.write(as_json({"action": action, "workers": told}))
        else:
            order = "be quiet" if action == "quiet" else action
            text = f"Told {_count(told)} to {order}."
            self.stdout.write(f"{text} mq_workers shows their states.")

    def _list(
        self,
        known: Sequence[WorkerProcess],
        runs: Sequence[RunningMessage],
        options: dict[str, Any],
    ) -> None:
        if options["ids"] or options["host"] is not None or options["all"]:
            raise wrong_arguments(
                "list shows all workers; name workers after quiet, resume or stop"
            )
        if options["json"]:
            self.stdout.write(as_json([_with_messages(each, runs) for each in known]))
        elif known:
            self.stdout.write(workers_table(known))
            if runs:
                self.stdout.write(f"\n{running_table(runs[:MAX_RUNNING])}")
            if len(runs) > MAX_RUNNING:
                more = len(runs) - MAX_RUNNING
                self.stdout.write(f"... and {more:,} more: --json has them all")
        else:
            self.stdout.write("No worker is known: start one with manage.py mq_worker.")


def _with_messages(worker: WorkerProcess, runs: Sequence[RunningMessage]) -> dict[str, Any]:
    """Return the columns of a worker, with what is known about the messages that it runs."""
    names = ("id", "queue", "type", "handler", "attempt", "ran_for")
    messages = [
        {name: getattr(each, name) for name in names} for each in runs if each.worker == worker.id
    ]
    return {**asdict(worker), "messages": messages}


def _chosen(alive: Sequence[WorkerProcess], options: dict[str, Any]) -> list[WorkerProcess]:
    """Return the live workers that the options name; raise CommandError if there are none."""
    ids, host, every = options["ids"], options["host"], options["all"]
    if bool(ids) + (host is not None) + every != 1 or host == "":  # "": an unset shell variable
        raise wrong_arguments("name the workers: by ID, by --host, or --all")
    if ids:
        named = [_one(alive, each) for each in ids]
        return list({each.id: each for each in named}.values())
    found = [each for each in alive if every or each.host == host]
    if not found:
        hosts = ", ".join(sorted({each.host for each in alive})) or "none"
        where = "" if every else f" on the host {one_line(host)}; hosts with workers: {hosts}"
        raise CommandError(f"no worker is alive{where}")
    return found


def _one(alive: Sequence[WorkerProcess], id: str) -> WorkerProcess:
    found = [each for each in alive if id and each.id.startswith(id)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise CommandError(f"no live worker has the id {one_line(id)!r}: see mq_workers")
    raise CommandError(f"the ids of {len(found)} live workers begin with {one_line(id)!r}")


def _count(chosen: Sequence[object]) -> str:
    return f"{len(chosen)} worker process{'' if len(chosen) == 1 else 'es'}"
