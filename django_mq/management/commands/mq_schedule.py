"""`mq_schedule [list|run|enable|disable|next] [NAME]`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mq import queues
from django_mq.conf.local_time import local_text
from django_mq.exceptions import InvalidOption
from django_mq.management.arguments import wrong_arguments
from django_mq.management.base import OperatorCommand
from django_mq.management.output import as_json, table
from django_mq.models import Schedule
from django_mq.policy.names import check_name
from django_mq.queues.scheduling import no_schedule, state_of, timing_of

#: The number of times shown per schedule.
TIMES = 3
#: Columns of a schedule in JSON; the payload and the metadata may be private.
COLUMNS = (
    "name",
    "type",
    "queue",
    "cron",
    "every",
    "tz",
    "catch_up",
    "overlap",
    "expires",
    "source",
    "enabled",
    "last_at",
    "last_message",
    "last_error",
    "next_at",
)


class Command(OperatorCommand):
    actions = ("list", "run", "enable", "disable", "next")
    help = "List schedules, run one now, enable or disable one, or show the next times."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("name", nargs="?", metavar="NAME", help="name of the schedule")

    def operate(self, *, database: str | None, **options: Any) -> None:
        action, name, json = options["action"], options["name"], options["json"]
        if action in ("list", "next"):
            self._show(action, _chosen(name, database), json=json, database=database)
            return
        if name is None:
            raise wrong_arguments(f"name the schedule: mq_schedule {action} NAME")
        _chosen(name, database)
        if action == "run":
            self._run(name, json=json, database=database)
        else:
            self._switch(name, enable=action == "enable", json=json, database=database)

    def _show(
        self, action: str, found: Sequence[Schedule], *, json: bool, database: str | None
    ) -> None:
        if json:
            self.stdout.write(as_json([_data(each, database) for each in found]))
        elif not found:
            self.stdout.write("No schedules: a worker stores those of periodic() when it starts.")
        elif action == "next":
            self.stdout.write(
                table(
                    ("schedule", *(f"time {number}" for number in range(1, TIMES + 1))),
                    [(each.name, *_cells(each, database)) for each in found],
                )
            )
        else:
            headers = ("schedule", "type", "when", "state", "last", "message", "next", "error")
            self.stdout.write(table(headers, map(_row, found)))

    def _run(self, name: str, *, json: bool, database: str | None) -> None:
        receipt = queues.run_schedule(name, using=database)
        if json:
            self.stdout.write(as_json({"name": name, "ids": receipt.ids}))
        elif receipt:
            ids = ", ".join(map(str, receipt.ids))
            self.stdout.write(f"Schedule {name} is broadcast: message {ids}.")
        else:
            self.stdout.write(f"Nothing was broadcast: a message of {name} still waits or runs.")

    def _switch(self, name: str, *, enable: bool, json: bool, database: str | None) -> None:
        switch = queues.enable_schedule if enable else queues.disable_schedule
        changed = switch(name, using=database)
        [found] = _chosen(name, database)
        is_now = f"Schedule {name} {'is' if changed else 'was already'}"
        if json:
            answer = {"name": name, "enabled": found.enabled, "next_at": found.next_at}
            self.stdout.write(as_json({**answer, "changed": changed}))
        elif enable:
            next_at = (
                f"its next time is {local_text(found.next_at)}"
                if found.next_at
                else "it has no next time"
            )
            self.stdout.write(f"{is_now} enabled: {next_at}.")
        else:
            self.stdout.write(f"{is_now} disabled.")


def _chosen(name: str | None, database: str | None) -> list[Schedule]:
    """Return the schedule of that name, or all; raise CommandError if there is none."""
    found = queues.schedules(using=database)
    if name is None:
        return found
    check_name(name, "schedule name")
    chosen = [each for each in found if each.name == name]
    if not chosen:
        raise CommandError(no_schedule(name, [each.name for each in found]))
    return chosen


def _next_times(schedule: Schedule, database: str | None) -> tuple[list[datetime], str]:
    """Return the next times, or none and the reason."""
    if not schedule.enabled:
        return [], "disabled"
    try:
        return queues.next_times(schedule, TIMES, using=database), ""
    except InvalidOption as error:
        return [], str(error)


def _data(schedule: Schedule, database: str | None) -> dict[str, Any]:
    """Return a schedule in JSON; `problem` says why it has no next times."""
    times, problem = _next_times(schedule, database)
    return {
        **{name: getattr(schedule, name) for name in COLUMNS},
        "when": timing_of(schedule),
        "state": state_of(schedule),
        "next": times,
        "problem": problem,
    }


def _cells(schedule: Schedule, database: str | None) -> list[str]:
    found, problem = _next_times(schedule, database)
    cells = [local_text(at) for at in found] or [problem]
    return cells + ["-"] * (TIMES - len(cells))


def _row(schedule: Schedule) -> tuple[object, ...]:
    return (
        schedule.name,
        schedule.type,
        f"{timing_of(schedule)} ({schedule.cron})" if schedule.cron else timing_of(schedule),
        state_of(schedule),
        local_text(schedule.last_at) if schedule.last_at else "-",
        schedule.last_message or "-",
        local_text(schedule.next_at) if schedule.next_at else "-",
        schedule.last_error or "-",
    )
