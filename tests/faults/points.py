"""Points: a scenario, a kind of fault and a request at which it happens; all, or a sample."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.faults.kinds import KINDS
from tests.faults.scenarios import SCENARIOS

#: The start of a finding that says nothing about the package.
NOT_STARTED = "a worker cannot be run"


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """One run: `at` is the request at which the fault happens, from 1."""

    scenario: str
    kind: str
    at: int
    patch: str = ""

    def __str__(self) -> str:
        patch = f" --patch {self.patch}" if self.patch else ""
        return f"--scenario {self.scenario} --kind {self.kind} --at {self.at}{patch}"

    @property
    def command(self) -> str:
        """The command that plays this point again."""
        return f"python -m tests.faults sweep {self}"


@dataclass(frozen=True, slots=True)
class Played:
    """The findings of a point, and the worker's requests and output."""

    point: Point
    broken: Sequence[str]
    struck_at: int
    requests: Sequence[tuple[int, str]]
    said: str
    seconds: float

    def __str__(self) -> str:
        lines = [f"{line}\n" for line in self.broken]
        asked = [f"{n:5}: link {link} {text}\n" for n, (link, text) in enumerate(self.requests, 1)]
        shown = "".join(asked[max(0, self.struck_at - 12) : self.struck_at + 12])
        return (
            f"BROKEN {self.point}\n{''.join(lines)}again: {self.point.command}\n"
            f"requests around the fault, which is at {self.struck_at}:\n{shown}{self.said}"
        )


def pairs(scenarios: Iterable[str] = (), kinds: Iterable[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield every scenario and kind that go together; empty selections are all.

    Raises KeyError for one that does not exist.
    """
    for scenario in scenarios or SCENARIOS:
        for kind in kinds or KINDS:
            its_kinds, its_scenarios = SCENARIOS[scenario].kinds, KINDS[kind].only
            if kind in its_kinds if its_kinds else scenario in (its_scenarios or SCENARIOS):
                yield scenario, kind


def third(kinds: Sequence[str], *, seed: int) -> list[tuple[str, str]]:
    """Return a third of the pairs of these kinds, chosen by `seed`.

    Each kind meets a third of its scenarios, and each scenario a third of the kinds; together the
    seeds 0, 1 and 2 cover all pairs.
    """
    places = {name: place for names in (SCENARIOS, kinds) for place, name in enumerate(names)}
    return [
        pair for pair in pairs(kinds=kinds) if sum(places[name] for name in pair) % 3 == seed % 3
    ]


def choose(
    scenario: str,
    kind: str,
    recorded: Mapping[str, Sequence[str]],
    *,
    count: int | None,
    seed: int,
    **more: Any,
) -> list[Point]:
    """Return `count` points of one scenario and kind, spread by `seed`; all for None.

    `recorded` are the requests of each scenario's worker without faults. The list is empty if no
    request is of the kind's.
    """
    total = KINDS[kind].points(recorded[scenario])
    if count is None or count >= total:
        return [Point(scenario, kind, at, **more) for at in range(1, total + 1)]
    shuffled = random.Random(f"{seed}/{scenario}/{kind}")
    # A share of the whole: another run may send a few requests more or fewer.
    shares = [(n + shuffled.random()) / count for n in range(count)]
    return [Point(scenario, kind, 1 + int(share * total), **more) for share in shares]
