"""A third of what a test could look at: three runs in a row, each with the next seed, see it all.

`FAULTS_SEED` is the seed; CI takes another one for each commit.
"""

import os
from collections.abc import Sequence
from typing import TypeVar

Each = TypeVar("Each")

SEED = int(os.environ.get("FAULTS_SEED", "1"))


def third(each: Sequence[Each]) -> Sequence[Each]:
    """Return every third, from a place that the seed says; at least one, if there is any."""
    return each[SEED % min(3, len(each) or 1) :: 3]
