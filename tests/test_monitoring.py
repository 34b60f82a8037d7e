"""The dashboard and the alert rules name metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from django_mq.contrib.prometheus import QueueCollector
from django_mq.policy.handler_totals import HandlerTotals
from django_mq.supervisor.slot_totals import exposed
from tests.test_docs import ROOT, snippets

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


def promtool(*arguments: object) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed")
    subprocess.run([program, *map(str, arguments)], check=True)


def test_the_dashboard() -> None:
    dashboard = json.loads((PLACE / "grafana-dashboard.json").read_text())
    asked = {name for text in expressions(dashboard) for name in named(text)}
    assert asked <= known()
    unshown = {family.name for family in QueueCollector().describe()} - asked
    assert unshown == {"django_mq_messages_estimated"}  # it qualifies another one
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_promtool_takes_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{n}", "expr": re.sub(r"\$__rate_interval", "1m", text)}
        for n, text in enumerate(panel_queries())
    ]
    path = tmp_path / "dashboard.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", path)


def test_each_query_of_the_dashboard_keeps_the_jobs_apart() -> None:
    """Two databases may have the same queues: each is a job."""
    for text in panel_queries():
        groups = re.findall(r"\b(?:by|on) \((.*?)\)", text)
        assert groups
        assert all("job" in labels.split(", ") for labels in groups), text
        assert 'job=~"$job"' in text, text


def panel_queries() -> list[str]:
    dashboard = json.loads((PLACE / "grafana-dashboard.json").read_text())
    return list(expressions(dashboard["panels"]))


def test_the_alerts() -> None:
    text = (PLACE / "alerts.yml").read_text()
    asked = named(
        re.sub(r"^ *(#|- name:).*$|No worker of django_mq|figures of django_mq", "", text)
    )
    assert len(asked) >= 4
    assert asked <= known()
    alerts = re.findall(r"- alert: (\w+)\n +expr: ", text)
    assert len(alerts) == len(set(alerts)) == 11


@pytest.mark.parametrize(
    "arguments",
    [("check", "rules", PLACE / "alerts.yml"), ("test", "rules", ROOT / "tests/alerts_test.yml")],
    ids=["check", "test"],
)
def test_promtool_takes_the_alerts(arguments: tuple[object, ...]) -> None:
    promtool(*arguments)


@pytest.mark.parametrize("gap", [10, 20, 22, 90])
def test_old_dead_letters_are_no_news_after_a_gap(gap: int, tmp_path: Path) -> None:
    """Prometheus has no data of `gap` minutes, then the same five dead letters; one more later."""
    end = 30 + gap
    dead = 'django_mq_handled_total{job="shop",queue="mail",outcome="dead",instance="a"}'
    fires = {
        "exp_labels": {"severity": "warning", "job": "shop", "queue": "mail"},
        "exp_annotations": {
            "summary": "shop: Messages of queue mail died",
            "description": "See the dead letters in the admin, or mq_peek --dead; requeue or"
            " discard them.",
        },
    }
    expected = dict.fromkeys(range(20, end + 40), False) | {end + 45: True}
    case = {
        "rule_files": [str(PLACE / "alerts.yml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": 'up{job="other"}', "values": f"1x30 _x{gap - 1} 1x60"},
                    {"series": dead, "values": f"5x30 _x{gap - 1} 5x39 6x20"},
                ],
                "alert_rule_test": [
                    {
                        "eval_time": f"{minute}m",
                        "alertname": "DeadLetters",
                        "exp_alerts": [fires] if fired else [],
                    }
                    for minute, fired in expected.items()
                ],
            }
        ],
    }
    path = tmp_path / "gap.yml"
    path.write_text(json.dumps(case))  # which is YAML, too
    promtool("test", "rules", path)


def test_promtool_takes_the_jobs_of_the_page(tmp_path: Path) -> None:
    [config] = snippets(ROOT / "docs/watching.md", "yaml")
    path = tmp_path / "prometheus.yml"
    path.write_text(config)
    promtool("check", "config", path)


def test_the_page_lists_all_metrics() -> None:
    listed = set(re.findall(r"^\| `(django_mq_\w+)", (ROOT / "docs/watching.md").read_text(), re.M))
    parts = re.compile(r"_(bucket|sum|count)$")
    assert listed == {parts.sub("", name) for name in known()}
