"""Links are cut, refused or silent, or rows are locked; workers live. A sample of the sweep."""

from collections.abc import Callable

import pytest

from tests.faults.points import third
from tests.samples import SEED

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


@pytest.mark.parametrize(("scenario", "kind"), third(KINDS, seed=SEED))
def test_a_link_breaks_no_promise(
    play: Callable[[str, str], None], scenario: str, kind: str
) -> None:
    play(scenario, kind)
