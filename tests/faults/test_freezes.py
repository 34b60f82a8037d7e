"""Workers freeze for longer than their leases, and wake up. A sample of the sweep."""

from collections.abc import Callable

import pytest

from tests.faults.points import third
from tests.faults.slow import few_of_each_kind
from tests.samples import SEED


@pytest.mark.parametrize(
    ("scenario", "kind"), few_of_each_kind(third(("freeze", "freeze-inside"), seed=SEED))
)
def test_a_freeze_breaks_no_promise(
    play: Callable[[str, str], None], scenario: str, kind: str
) -> None:
    play(scenario, kind)
