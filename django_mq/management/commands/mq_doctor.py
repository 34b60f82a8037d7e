"""`mq_doctor`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mq.management.base import OperatorCommand
from django_mq.management.output import as_json
from django_mq.policy.plain_text import one_line
from django_mq.queues.doctor import examine
from django_mq.queues.doctor.findings import IDS

#: The exit code of the worst level found.
CODES = {"warning": 1, "error": 2}
NOTHING_FOUND = (
    "No problem of the installation found. mq_errors and mq_status show what the handlers do."
)


class Command(OperatorCommand):
    help = (
        "Check the installation for problems. Exit code 0: none, 1: warnings, 2: errors. Run it"
        " with the login of the workers."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--ignore",
            action="append",
            default=[],
            metavar="ID",
            help="leave out a finding, such as D012; repeat it for more",
        )

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Run the command; failed system checks count as errors, too."""
        try:
            return super().execute(*args, **options)
        except CommandError as error:
            error.returncode = CODES["error"]
            raise

    def operate(self, *, database: str | None, **options: Any) -> None:
        json, ignored = options["json"], {id.upper() for id in options["ignore"]}
        if unknown := sorted(ignored - IDS):
            raise CommandError(
                f"no finding has the id {one_line(', '.join(unknown))}: the ids are {min(IDS)} to"
                f" {max(IDS)}"
            )
        found = [each for each in examine(using=database) if each.id not in ignored]
        if json:
            self.stdout.write(as_json({"findings": found}))
        elif not found:
            self.stdout.write(NOTHING_FOUND)
        for each in () if json else found:
            style = self.style.ERROR if each.level == "error" else self.style.WARNING
            self.stdout.write(f"{style(f'{each.id} {each.level}')}  {one_line(each.text, 1000)}")
            self.stdout.write(f"    {one_line(each.hint, 1000)}")
        if found:
            raise SystemExit(max(CODES[each.level] for each in found))
