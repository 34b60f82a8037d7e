"""When the lease keeper takes its steps, whatever fails."""

from __future__ import annotations

import pytest

from django_mq.worker.step_times import KeeperStep, StepTimes

EVERY = {KeeperStep.RENEWAL: 10.0, KeeperStep.HEARTBEAT: 10.0, KeeperStep.FIGURES: 60.0}


@pytest.fixture
def times() -> StepTimes:
    """All steps were taken at 100."""
    times = StepTimes(EVERY, max_retry_wait=1.0)
    for step in KeeperStep:
        assert times.is_due(step, 100.0)
        times.succeeded(step, 100.0)
    assert times.seconds_left(100.0) == 10.0
    return times


def due(times: StepTimes, now: float) -> set[KeeperStep]:
    return {step for step in KeeperStep if times.is_due(step, now)}


def test_each_step_has_its_interval(times: StepTimes) -> None:
    assert due(times, 109.9) == set()
    assert due(times, 110.0) == {KeeperStep.RENEWAL, KeeperStep.HEARTBEAT}
    assert due(times, 160.0) == set(KeeperStep)


@pytest.mark.parametrize("step", [KeeperStep.RENEWAL, KeeperStep.HEARTBEAT])
def test_a_failed_step_is_tried_again_soon_after_a_renewal(
    times: StepTimes, step: KeeperStep
) -> None:
    times.failed(step, 101.0, commits_hang=False)
    assert due(times, 101.0) == set()
    assert due(times, 102.0) == {step, KeeperStep.RENEWAL}


def test_failed_figures_wait_for_their_interval(times: StepTimes) -> None:
    times.failed(KeeperStep.FIGURES, 105.0, commits_hang=False)
    assert due(times, 109.9) == set()
    assert KeeperStep.FIGURES not in due(times, 164.9)


@pytest.mark.parametrize("step", KeeperStep)
def test_while_commits_hang_a_heartbeat_is_due_soon(times: StepTimes, step: KeeperStep) -> None:
    times.failed(step, 101.0, commits_hang=True)
    assert KeeperStep.HEARTBEAT in due(times, 102.0)


def test_the_wait_doubles_up_to_its_limit_until_all_succeed(times: StepTimes) -> None:
    waits = []
    for _ in range(5):
        times.failed(KeeperStep.RENEWAL, 101.0, commits_hang=False)
        waits.append(times.seconds_left(101.0))
    assert waits[1] == pytest.approx(2 * waits[0])
    assert waits[-1] == pytest.approx(1.0)
    times.all_succeeded()
    times.failed(KeeperStep.RENEWAL, 101.0, commits_hang=False)
    assert times.seconds_left(101.0) == pytest.approx(waits[0])


def test_a_step_is_never_put_off_by_a_request(times: StepTimes) -> None:
    times.pull_forward(KeeperStep.HEARTBEAT, 105.0)
    times.pull_forward(KeeperStep.HEARTBEAT, 107.0)
    assert due(times, 105.0) == {KeeperStep.HEARTBEAT}
