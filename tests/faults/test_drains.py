"""Workers are told to stop, in every phase of their work. A sample of the sweep."""

from collections.abc import Callable

import pytest

from tests.faults.points import third
from tests.faults.slow import few_of_each_kind
from tests.samples import SEED


@pytest.mark.parametrize(
    ("scenario", "kind"), few_of_each_kind(third(("term", "term-late"), seed=SEED))
)
def test_a_drain_breaks_no_promise(
    play: Callable[[str, str], None], scenario: str, kind: str
) -> None:
    play(scenario, kind)
