"""Helpers: the findings of one check, and the command."""

from __future__ import annotations

import inspect
import sys
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection

from django_mq.queues import doctor
from django_mq.queues.doctor import examine


def found(id: str) -> list[str]:
    """Return the findings with this id, of the checks in its module alone: all take 0.15 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "EXAMINATIONS", checks_for(id))
        return [f"{each.text} {each.hint}" for each in examine() if each.id == id]


def checks_for(id: str) -> tuple[Any, ...]:
    """Return the checks of the module that has the finding; all of them for a check that fails."""
    checks = doctor.EXAMINATIONS
    if id != "D001":
        sources = (inspect.getsource(sys.modules[check.__module__]) for _, check in checks)
        checks = tuple(
            each for each, source in zip(checks, sources, strict=True) if f'"{id}"' in source
        )
    assert checks, id
    return checks


def run(sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


def run_doctor(*options: str) -> tuple[int, str]:
    """Return the exit code and the output."""
    out = StringIO()
    try:
        call_command("mq_doctor", *options, stdout=out, no_color=True)
    except SystemExit as end:
        return int(end.code or 0), out.getvalue()
    return 0, out.getvalue()
