"""Workers are killed: all of one, or the process that runs handlers. A sample of the sweep."""

from collections.abc import Callable

import pytest

from tests.faults.points import third
from tests.faults.slow import few_of_each_kind
from tests.samples import SEED

KINDS = (
    "tree-before",
    "tree-after",
    "tree-commit",
    "child-before",
    "child-after",
    "child-inside",
    "child-begins",
)


@pytest.mark.parametrize(("scenario", "kind"), few_of_each_kind(third(KINDS, seed=SEED)))
def test_a_kill_breaks_no_promise(
    play: Callable[[str, str], None], scenario: str, kind: str
) -> None:
    play(scenario, kind)
