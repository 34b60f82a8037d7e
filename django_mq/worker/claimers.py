"""The names of a worker's claims."""

from __future__ import annotations

from itertools import count


class Claimers:
    """Names each claim of worker process `worker`; the claim's rows carry the name."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._numbers = count(1)
        #: The names of the claims in this round of the loop, which clears the list.
        self.of_round: list[str] = []

    def make(self) -> str:
        """Return the name of the next claim."""
        self.of_round.append(f"{self._worker}:{next(self._numbers)}")
        return self.of_round[-1]
