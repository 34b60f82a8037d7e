"""The dashboard and the alert rules name metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from django_mq.contrib.prometheus import QueueCollector
from django_mq.policy.handler_stats import HandlerTotals
from django_mq.supervisor.worker_figures import exposed
from tests.test_docs import ROOT

PLACE = ROOT / "docs/monitoring"


def known() -> set[str]:
    """Return the names of all metrics, including those of histogram parts."""
    page = exposed({("q", "h"): HandlerTotals()}, processes=1)
    names = set(re.findall(r"^(\w+)", page, re.MULTILINE))
    return names | {family.name for family in QueueCollector().describe()}


def named(text: str) -> set[str]:
    return set(re.findall(r"\bdjango_mq_\w+", text))


def expressions(value: Any) -> Iterator[str]:
    """Yield every query in a dashboard."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("expr", "query") and isinstance(inner, str):
                yield inner
            yield from expressions(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from expressions(inner)


def test_the_dashboard() -> None:
    dashboard = json.loads((PLACE / "grafana-dashboard.json").read_text())
    asked = {name for text in expressions(dashboard) for name in named(text)}
    assert asked <= known()
    unshown = {family.name for family in QueueCollector().describe()} - asked
    assert unshown == {"django_mq_messages_estimated"}  # it qualifies another one
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_alerts() -> None:
    text = (PLACE / "alerts.yml").read_text()
    asked = named(
        re.sub(r"^ *(#|- name:).*$|No worker of django_mq|figures of django_mq", "", text)
    )
    assert len(asked) >= 4
    assert asked <= known()
    alerts = re.findall(r"- alert: (\w+)\n +expr: ", text)
    assert len(alerts) == len(set(alerts)) == 9


@pytest.mark.parametrize(
    "arguments",
    [("check", "rules", PLACE / "alerts.yml"), ("test", "rules", ROOT / "tests/alerts_test.yml")],
    ids=["check", "test"],
)
def test_promtool_takes_the_alerts(arguments: tuple[object, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    subprocess.run([promtool, *map(str, arguments)], check=True)


def test_the_page_lists_all_metrics() -> None:
    listed = set(re.findall(r"^\| `(django_mq_\w+)", (ROOT / "docs/watching.md").read_text(), re.M))
    parts = re.compile(r"_(bucket|sum|count)$")
    assert listed == {parts.sub("", name) for name in known()}
