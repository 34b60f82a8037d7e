"""docs/benchmarks.md, its charts and the figures of docs/scaling.md, from the measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.growth import SOURCES, Missing, costs_from
from benchmarks.markdown import plain
from benchmarks.pages import charts, file_name, filled, page
from benchmarks.predicting import TABLES
from benchmarks.report import Row
from benchmarks.results import Run, read, rows_of, shown, write

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EVIL = "a|b <script> [x](y) `z`"
RAN = {"PostgreSQL": "15.18"}


def row(workload: str, figure: float = 1.0, unit: str = "msg/s", **more: Any) -> Row:
    return Row(workload=workload, figure=figure, unit=unit, **more)


def measured(path: Path, *rows: Row, **circumstances: object) -> Path:
    path.write_text(json.dumps({**circumstances, "rows": [asdict(each) for each in rows]}))
    return path


#: All inputs of the model, near their real values.
FIGURES = {
    "alone": 30_000.0, "worker": 15.0, "server": 20.0, "claim": 12.0, "passing": 0.3,
    "look": 0.1, "ring": 20.0, "flush": 200.0, "wal": 850.0, "stored": 550.0, "vacuum": 15.0,
}  # fmt: skip
COSTS = [row(SOURCES[name][0], figure) for name, figure in FIGURES.items()]


# ---- the measurements


def test_of_the_same_workload_the_last_one_stays(tmp_path: Path) -> None:
    old = measured(tmp_path / "old", row("drain", 1), row("bulk", 2), rounds=1)
    new = measured(tmp_path / "new", row("drain", 3), rounds=2)
    runs = read([old, new])
    assert [(run.circumstances, [each.figure for each in run.rows]) for run in runs] == [
        ({"rounds": 1}, [2]),
        ({"rounds": 2}, [3]),
    ]


def test_stored_runs_read_back_unchanged(tmp_path: Path) -> None:
    runs = [
        Run(RAN, [row("drain", series={"held": [1.0, 2.0]}, ok=True, target="ratio >= 1")]),
        Run({"rounds": 2}, [row("bulk", ratio=0.5, against=2.0)]),
    ]
    write(tmp_path / "kept.json", runs)
    assert read([tmp_path / "kept.json"]) == runs


# ---- the page


def test_each_target_has_a_line_whether_or_not_it_is_met() -> None:
    rows = [
        row("drain", 32_230, ratio=0.7, target="ratio >= 0.6", ok=True),
        row("bulk", 5, ratio=0.3, target="ratio >= 0.6", ok=False, note="too slow"),
        row("lost", float("nan"), "", ok=False, note="WRONG: 3 were not handled"),
        row("lines"),
    ]
    text = page([Run(RAN, rows)])
    targets, measured = text.split("## Targets")[1].split("## Measured with")
    assert "- PostgreSQL 15.18: drain, bulk, lost, lines." in measured
    assert "1 of 2 are met." in targets
    assert "| drain | 32,230 msg/s | 0.70 | ratio >= 0.6 | met |  |" in targets
    assert "| bulk | 5 msg/s | 0.30 | ratio >= 0.6 | **missed** | too slow |" in targets
    assert "- lost: WRONG: 3 were not handled" in targets
    assert "| lines |" not in targets


def test_real_work_comes_before_others_and_their_no_ops() -> None:
    rows = [
        row("drain", target="ratio >= 0.6", ok=True),
        row("drain, bare loop on a plain table"),
        row("drain, history", 7, worker_us=8.25, server_us=12),
        row("fan-out, one subscriber", 150, "us"),
        row("peers: drain, 1 process, django_mq", 50),
        row("peers: enqueue, django_mq", 60, worker_us=300),
        row("real: ORM handler, django_mq", 900),
        row("real: ORM handler, PgQueuer", 1_020),
        row("real: Absent", 0, "", note="not measured: no node"),
    ]
    text = page([Run(RAN, rows)])
    order = ["### ORM handler", "### Broadcasts and", "### Keys", "## Beside others"]
    order += ["### Enqueue", "### Drain, 1 process", "## Targets"]
    places = [text.index(each) for each in order]
    assert places == sorted(places)
    work = text[text.index("## Real work") : text.index("## Beside others")]
    assert "| **django_mq** | 900 msg/s | 1.00 |" in work
    assert "| drain, history | 7 msg/s | 8.25 | 12 |" in work
    assert "bare loop" not in work
    assert "| **django_mq** | 60 msg/s | 1.00 | 300 |" in text
    assert "Absent: not measured: no node." in text
    assert "orm-handler.svg" in charts(rows)


def test_of_a_busy_machine_only_the_cpu_is_shown() -> None:
    rows = [
        row("peers: drain, django_mq", 50),
        row("peers: CPU of a drain, django_mq", 3, "ms"),
        row("lost", float("nan"), "", ok=False, note="WRONG: 3 were not handled"),
    ]
    noted = row("peers: bulk, django_mq", 9, note="busy machine")
    runs = [Run({"busy": True}, rows), Run(RAN, [noted])]
    assert [each.workload for each in shown(runs)] == ["peers: CPU of a drain, django_mq", "lost"]
    text = page(runs)
    assert "### CPU of a drain" in text
    assert "### Drain" not in text
    assert "### Bulk" not in text


def test_names_and_notes_are_text_whatever_they_are() -> None:
    rows = [
        row(EVIL, target=EVIL, ok=False, note=EVIL),
        row(f"{EVIL} too", float("nan"), note=EVIL),
        row(f"peers: {EVIL}, {EVIL}"),
        row(f"peers: {EVIL}, django_mq", 2),
        row(f"course {EVIL}", series={EVIL: [1.0, 2.0]}),
    ]
    text = page([Run({EVIL: EVIL}, rows)])
    assert "<script>" not in text
    assert "`z`" not in text
    assert "](y)" not in text
    table = text.split("## Targets")[1].split("## Beside")[0].splitlines()
    assert len({line.count("|") for line in table if line.startswith("|")}) == 1
    for name in charts(rows):
        assert f"](benchmarks/{name})" in text
        assert name == file_name(name.removesuffix(".svg"))


def test_peers_of_the_same_workload_are_compared() -> None:
    rows = [
        row("peers: drain, 1 process, slow", 10, ratio=0.1),
        row("peers: drain, 1 process, bare", 100),
        row("peers: drain, 1 process, django_mq", 50, ratio=0.5),
        row("peers: drain, 1 process, django_mq against the best peer", 50, ratio=5.0),
        row("peers: drain, 1 process, broken", float("nan"), "", note="WRONG: lost one"),
        row("peers: start, django_mq", 1.0, "ms"),
        row("peers: start, slow", 9.0, "ms"),
        row("peers: beside, slow", 900, ratio=0.1),
        row("peers: beside, django_mq", 10, ratio=0.9),
        row("peers: Absent", 0, "", note="not measured: no node"),
    ]
    text = page([Run(RAN, rows)]).split("## Beside others")[1]
    tables = [
        [line.split(" | ")[0].strip("| ") for line in part.splitlines() if line.startswith("| ")]
        for part in text.split("### ")
    ]
    assert [each[2:] for each in tables[1:]] == [
        ["**django_mq**", "slow"],
        ["**django_mq**", "slow"],
        ["bare", "**django_mq**", "slow"],
    ]
    assert "| bare | 100 msg/s | 2.00 |" in text
    assert "Absent: not measured: no node." in text
    drawn = charts(rows)
    assert drawn.keys() == {"drain-1-process.svg", "start.svg", "beside.svg"}
    assert "less is better" in drawn["start.svg"]
    assert "of its own rate without" in drawn["beside.svg"]


def test_the_command_writes_everything(tmp_path: Path) -> None:
    rows = [row("peers: drain, django_mq", 2), row("peers: drain, bare", 3), row("growth: a, b")]
    results = measured(tmp_path / "results.json", *rows, rounds=3)
    docs = tmp_path / "docs"
    (docs / "benchmarks").mkdir(parents=True)
    (docs / "benchmarks/old.svg").write_text("")
    (docs / "scaling.md").write_text("x\n<!-- rows: growth: a -->\nold\n<!-- end -->\ny\n")
    for arguments in ([str(results)], []):  # again from the stored data
        command = [sys.executable, "-m", "benchmarks.pages", "--docs", str(docs), *arguments]
        subprocess.run(command, cwd=ROOT, check=True)
        assert {each.name for each in (docs / "benchmarks").iterdir()} == {
            "results.json",
            "drain.svg",
        }
        assert (docs / "benchmarks.md").read_text() == page(read([results]))
        assert (docs / "scaling.md").read_text() == (
            "x\n<!-- rows: growth: a -->\n\n|  | figure |\n| --- | --- |\n| b | 1 msg/s |\n\n"
            "<!-- end -->\ny\n"
        )


# ---- the model


def test_a_figure_that_is_missing_is_named() -> None:
    with pytest.raises(Missing, match="footprint, WAL"):
        costs_from([each for each in COSTS if each.workload != "footprint, WAL"])
    text = filled("<!-- model: rates -->\n<!-- end -->", [])
    assert "Not computed yet" in text


def test_figures_are_taken_in_their_units() -> None:
    costs = costs_from(COSTS)
    assert costs.alone == pytest.approx(1 / 30_000)
    assert costs.worker == pytest.approx(15e-6)
    assert costs.look == pytest.approx(1e-4)
    assert costs.vacuum == pytest.approx(1.5e-6)


@pytest.mark.parametrize("name", TABLES)
def test_every_table_of_the_model_is_in_the_page(name: str) -> None:
    text = filled(f"<!-- model: {name} -->\n<!-- end -->", COSTS)
    assert text.count("\n| ") > 3
    assert f"<!-- model: {name} -->" in (DOCS / "scaling.md").read_text()


# ---- committed files


def test_the_committed_pages_are_those_of_the_committed_results() -> None:
    runs = read([DOCS / "benchmarks/results.json"])
    rows = rows_of(runs)
    text = (DOCS / "benchmarks.md").read_text()
    for each in shown(runs):
        assert not each.target or f"\n| {plain(each.workload)} |" in text
    assert text == page(runs), "run python -m benchmarks.pages"
    scaling = (DOCS / "scaling.md").read_text()
    assert scaling == filled(scaling, rows), "run python -m benchmarks.pages"
    drawn = {each.name: each.read_text() for each in (DOCS / "benchmarks").glob("*.svg")}
    assert drawn == charts(shown(runs)), "run python -m benchmarks.pages"
