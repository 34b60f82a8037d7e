"""Does it bite? Breaks the package in every way of patches.py and lists the points that notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.faults.patches import PATCHES
from tests.faults.points import NOT_STARTED, Played, Point
from tests.faults.sweep import Runner, plan, play_all


@dataclass(frozen=True, slots=True)
class Bite:
    """The points that noticed `patch`; `first` is one of them, or None."""

    patch: str
    played: int
    broken: int
    first: Played | None

    @property
    def caught(self) -> bool:
        return self.first is not None

    def __str__(self) -> str:
        head = f"{self.patch:18} {'caught' if self.caught else 'NOT CAUGHT':10}"
        if self.first is None:
            return f"{head} {self.played} points: {PATCHES[self.patch].says}"
        point = self.first.point
        found = self.first.broken[0].partition("\n")[0]
        where = f"{point.scenario}, {point.kind} at {point.at}"
        return f"{head} {self.broken} of {self.played} points; {where}: {found}"


def points_of(runner: Runner, patch: str, *, seed: int) -> list[Point]:
    """Return the points that should notice `patch`; a single one is repeated a few times."""
    given = PATCHES[patch]
    points = plan(runner, given.scenarios, given.kinds, count=given.points, seed=seed, patch=patch)
    return points * max(1, given.points // max(1, len(points)))


def bite(
    runners: Sequence[Runner],
    patches: Sequence[str] = (),
    *,
    seed: int,
    enough: int | None = None,
    tell: Callable[[Bite], object] = lambda bite: None,
) -> list[Bite]:
    """Break the package in each way; stop a patch after `enough` points that noticed it.

    Raises RuntimeError if a patch cannot be applied.
    """
    bites = []
    for patch in patches or PATCHES:
        seen: list[Played] = []
        points = points_of(runners[0], patch, seed=seed)
        step = len(runners) if enough else len(points)
        for start in range(0, len(points), step):
            play_all(runners, points[start : start + step], seen.append)
            if enough and sum(bool(each.broken) for each in seen) >= enough:
                break
        for each in seen:
            if any(line.startswith(NOT_STARTED) for line in each.broken):
                raise RuntimeError(str(each))
        noticed = [each for each in seen if each.broken]
        bites.append(Bite(patch, len(seen), len(noticed), noticed[0] if noticed else None))
        tell(bites[-1])
    return bites
