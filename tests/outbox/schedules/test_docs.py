"""The snippets of docs/schedules.md run, in order."""

from __future__ import annotations

from typing import Any

import pytest

from django_mq.checks import check_schedules
from django_mq.handlers import all_schedules
from tests.docs.pages import passes
from tests.test_docs import ROOT, snippets

pytestmark = pytest.mark.django_db


@pytest.mark.thorough
def test_the_snippets_of_the_page(capsys: Any) -> None:
    names: dict[str, Any] = {"__name__": "schedules"}
    for code in snippets(ROOT / "docs/schedules.md", "python"):
        exec(compile(code, "schedules.md", "exec"), names)  # noqa: S102
    assert [each.name for each in all_schedules()] == [
        "daily-report",
        "stock",
        "schedules.expire_carts",
    ]
    assert not check_schedules(None)
    assert passes(names["ReportTest"]) == 1
    # Three, or one if a weekend is among the days.
    assert capsys.readouterr().out.count("daily-report 2") in (1, 2, 3, 4)
