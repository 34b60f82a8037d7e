"""Links are cut, refused or silent, or rows are locked; workers live. A sample of the sweep."""

from collections.abc import Callable

import pytest

from tests.faults.points import Point, third
from tests.faults.slow import few_of_each_kind
from tests.faults.sweep import Runner
from tests.samples import SEED
from tests.slow import slow

KINDS = (
    "none",
    "held",
    "deaf",
    "twins",
    "cut-before",
    "cut-after",
    "commit-lost",
    "refuse",
    "stall",
)


@pytest.mark.parametrize(("scenario", "kind"), few_of_each_kind(third(KINDS, seed=SEED)))
def test_a_link_breaks_no_promise(
    play: Callable[[str, str], None], scenario: str, kind: str
) -> None:
    play(scenario, kind)


#: Requests of the command before it forks: the checks of the tables, and for a pooler.
BEFORE_THE_FORK = range(1, 8)


@pytest.mark.parametrize("at", [BEFORE_THE_FORK[0], *slow(*BEFORE_THE_FORK[1:])])
def test_server_lost_at_the_start_of_a_worker_gives_no_traceback(runner: Runner, at: int) -> None:
    played = runner.play(Point("writes", "refuse", at))
    assert not played.broken, str(played)
    assert "Traceback" not in played.said
