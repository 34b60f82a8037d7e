"""The options with which messages of a queue are claimed, and the arguments of a claim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypedDict


class ClaimArguments(TypedDict):
    """The arguments that every claim statement has."""

    claimer: str
    lease: float
    limit: int
    max_bytes: int
    admitted: bool
    excluded: Sequence[int]


class ClaimOptions(NamedTuple):
    """The options with which messages of a queue are claimed.

    `kind` is the kind of executor that the messages need, since room is counted per kind.
    `max_in_flight` is the maximum number of messages in flight over the fleet, unless an operator
    has set another maximum. `list_size` is the maximum number of messages per call of a handler
    outside a transaction. `ahead`: coroutines may be claimed before they have slots; those of lists
    would start in shorter lists.
    """

    kind: str
    lease: float
    batch_size: int
    batch_bytes: int
    ordered: bool = False
    skip_dead: bool = False
    max_in_flight: int | None = None
    list_size: int = 1
    ahead: bool = True
