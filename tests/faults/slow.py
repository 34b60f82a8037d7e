"""A plain run plays few points of each kind of fault; CI plays the others, too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tests.slow import slow


def few_of_each_kind(pairs: Sequence[tuple[str, str]]) -> list[Any]:
    """Return pairs of scenario and kind, of which all but a third of each kind are `slow`.

    The kinds keep different thirds, so that a plain run has most scenarios.
    """
    of_kind = defaultdict(list)
    for pair in pairs:
        of_kind[pair[1]].append(pair)
    plain = {
        pair for n, its in enumerate(of_kind.values()) for pair in its[n % min(3, len(its)) :: 3]
    }
    return [pair if pair in plain else slow(pair)[0] for pair in pairs]
