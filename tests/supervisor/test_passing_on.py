"""Which child is asked to settle the messages of dead ones."""

from __future__ import annotations

import json
import os
import signal
from math import inf

import pytest

from django_mq.executor.deadline import Deadline
from django_mq.executor.scoreboard import MonitoredPart, Scoreboard
from django_mq.messages import Fence
from django_mq.supervisor.child import OUT_OF_TIME, report_failure
from django_mq.supervisor.link_lines import ORDER, SIGNALLED, STOP, UNFINISHED
from django_mq.supervisor.reporter import Reporter
from django_mq.supervisor.supervisor import Supervisor
from django_mq.worker import Worker
from django_mq.worker.orders import LEAVE
from tests.supervisor.links import dead, fill, linked


def supervisor_of(processes: int) -> Supervisor:
    """Return a supervisor that has started no process."""

    def make_worker(number: int, id: str, scoreboard: Scoreboard) -> Worker:
        raise AssertionError

    return Supervisor(
        make_worker,
        processes=processes,
        entries=1,
        drain_seconds=1,
        until_empty=False,
        max_rss=None,
        reporter=Reporter(health=None, metrics=None, service=None),
    )


def test_a_full_child_is_tried_once_and_its_siblings_are_asked_instead() -> None:
    supervisor = supervisor_of(3)
    healthy, other, newest = supervisor._slots
    with linked(healthy), linked(other), linked(newest):
        fill(newest)
        supervisor._orphaned = {f"w{number}": dead(number, running=1) for number in range(50)}
        supervisor._pass_on()  # a send that waits would wait for ever
        assert not supervisor._orphaned
        assert len(other.recovering) == 50
        assert not healthy.recovering


def test_messages_of_a_child_that_failed_get_the_class_of_its_error_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its text may quote a row, and an attempt's reason is in the log."""
    supervisor = supervisor_of(1)
    [slot] = supervisor._slots
    pid = os.posix_spawnp("false", ["false"], os.environ)
    with linked(slot) as child:
        slot.pid = pid
        report_failure(child, ValueError("row: 4111"))
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        supervisor._reap(slot)
    assert supervisor._orphaned[slot.worker].reason == f"process {pid} failed (ValueError)"
    assert f"process {pid} failed (ValueError: row: 4111) while it ran nothing" in caplog.text


@pytest.mark.parametrize("part", list(MonitoredPart))
def test_a_stalled_child_is_asked_only_if_there_is_no_other(part: MonitoredPart) -> None:
    supervisor = supervisor_of(2)
    healthy, newest = supervisor._slots
    with linked(newest):
        with linked(healthy):
            newest.started_at = healthy.started_at + 1
            newest.scoreboard.record_progress(part, -1.0)
            supervisor._orphaned = {"w1": dead(1)}
            supervisor._pass_on()
            assert list(healthy.recovering) == ["w1"]
        supervisor._orphaned = {"w2": dead(2)}
        supervisor._pass_on()
        assert list(newest.recovering) == ["w2"]


def test_a_process_that_was_to_be_replaced_may_also_run_out_of_time() -> None:
    """It drains with the others, so the exit code is theirs."""
    supervisor = supervisor_of(1)
    [slot] = supervisor._slots
    with linked(slot):
        slot.recycling = True
        slot.pid = os.posix_spawnp("sleep", ["sleep", "600"], os.environ)
        supervisor._deadline = Deadline(0.0)
        supervisor._step()
        assert slot.finished
        assert supervisor._code == OUT_OF_TIME


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ("", "its drain ran out of time"),
        (
            "too large",
            "its process was replaced, since it used more memory than MAX_RSS allows, and its drain"
            " ran out of time",
        ),
        ("leave", "its worker left by order of an operator, and its drain ran out of time"),
        ("signal", "its process was told to stop by a signal, and its drain ran out of time"),
        ("stop", "mq_worker was told to stop, and the drain ran out of time"),
    ],
)
def test_the_reason_of_a_drain_that_ran_out_of_time_is_named(why: str, reason: str) -> None:
    """The failed attempt shows it: MAX_RSS, a deploy and an operator ask for different remedies."""
    supervisor = supervisor_of(1)
    [slot] = supervisor._slots
    pid = os.posix_spawnp("sleep", ["sleep", "600"], os.environ)
    with linked(slot) as child:
        slot.pid = pid
        if why == "too large":
            slot.recycle_large(0)
        elif why == "leave":
            child.sendall(ORDER + LEAVE.encode() + b"\n")
        elif why == "stop":
            supervisor._stop(signal.SIGTERM)
        if why in ("too large", "signal", "stop"):  # the child has got the signal
            child.sendall(SIGNALLED + b"\n")
        child.sendall(UNFINISHED + b"\n")
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        supervisor._reap(slot)
    assert supervisor._orphaned[slot.worker].reason == reason


def dies(*command: str, how: str) -> bool:
    """End a process that runs messages 7 and 8, as `how` says; return whether that was planned."""
    supervisor = supervisor_of(1)
    [slot] = supervisor._slots
    slot.scoreboard = Scoreboard(2)
    pid = os.posix_spawnp(command[0], command, os.environ)
    with linked(slot) as child:
        slot.pid = pid
        late, beside = (Fence(id, 1, f"{slot.worker}:1") for id in (7, 8))
        slot.scoreboard.write(0, late, 0.0 if how == "timed out" else inf, False)
        slot.scoreboard.write(1, beside, inf, False)
        slot.overran = how in ("timed out", "stopped")
        slot.killed_because = f"message 7 was {how}" if slot.overran else ""
        if how == "gave up":
            child.sendall(UNFINISHED + b"\n")
        elif how == "failed":
            report_failure(child, ValueError())
        elif how == "stopped":
            child.sendall(STOP + json.dumps([late, "ana", -1.0]).encode() + b"\n")
            assert slot.read_link()
        if how == "drained":
            supervisor._deadline = Deadline(0.0)
            supervisor._step()
        else:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            supervisor._reap(slot)
    died = supervisor._orphaned[slot.worker]
    assert died.charged == [late, beside]
    assert died.reason.endswith(f" was ended because message 7 was {how}") is slot.overran
    return died.planned


@pytest.mark.parametrize(
    ("command", "how", "planned"),
    [
        ("exit 5", "gave up", True),
        ("sleep 600", "drained", True),
        ("kill -9 $$", "stopped", True),
        ("kill -9 $$", "timed out", False),
        ("kill -9 $$", "killed", False),
        ("kill -11 $$", "crashed", False),
        ("exit 5", "exited", False),
        ("exit 1", "failed", False),
    ],
)
def test_a_process_that_was_ended_on_purpose_makes_no_suspects(
    command: str, how: str, planned: bool
) -> None:
    """By its own drain, or because an operator stopped a message: nothing that ran is the cause."""
    assert dies("sh", "-c", command, how=how) == planned
