"""python -m tests.faults sweep | bite | nightly: see README.md."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter

#: Points between two progress reports.
EVERY = 100


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sweep = commands.add_parser("sweep", help="break the worker at every request it sends")
    sweep.add_argument("--scenario", action="append", default=[], help="again for more")
    sweep.add_argument("--kind", action="append", default=[], help="again for more")
    sweep.add_argument("--points", type=int, help="of each scenario and kind (default: all)")
    sweep.add_argument("--at", type=int, help="one request alone")
    sweep.add_argument("--times", type=int, default=1, help="play all that so often")
    sweep.add_argument("--patch", default="", help="break the package on purpose")
    sweep.add_argument("--settings", help="module with your settings")
    bite = commands.add_parser("bite", help="break the package, and see what notices")
    bite.add_argument("--patch", action="append", default=[], help="again for more")
    bite.add_argument("--enough", type=int, help="stop after so many points that noticed")
    nightly = commands.add_parser("nightly", help="all that is too slow for each change")
    for command in (sweep, bite, nightly):
        command.add_argument("--seed", type=int, default=None)
        command.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.randrange(1000)
    if options.command == "nightly":
        return _nightly(options)
    if getattr(options, "settings", None):
        os.environ["FAULTS_SETTINGS"] = options.settings
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.faults.settings"
    import django

    django.setup()
    _check_names(parser, options)
    return _sweep(options) if options.command == "sweep" else _bite(options)


def _check_names(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    from tests.faults.kinds import KINDS
    from tests.faults.patches import PATCHES
    from tests.faults.scenarios import SCENARIOS

    for name, known in (("scenario", SCENARIOS), ("kind", KINDS), ("patch", PATCHES)):
        given = getattr(options, name, None) or []
        for each in [given] if isinstance(given, str) else given:
            if each not in known:
                parser.error(f"there is no {name} {each!r}: choose from {', '.join(known)}")


def _sweep(options: argparse.Namespace) -> int:
    from tests.faults.points import Played
    from tests.faults.sweep import plan, play_all, runners

    began = time.monotonic()
    played: Counter[str] = Counter()
    broken: Counter[str] = Counter()

    def tell(each: Played) -> None:
        played[each.point.kind] += 1
        if played.total() % EVERY == 0:
            _say(f"{played.total()} points so far")
        if each.broken:
            broken[each.point.kind] += 1
            _say(str(each))
        elif options.at is not None:
            _say(f"fine: {each.point}, {len(each.requests)} requests in {each.seconds:.2f} s")

    with runners(options.jobs) as started:
        points = plan(
            started[0],
            options.scenario,
            options.kind,
            count=options.points,
            seed=options.seed,
            at=options.at,
            patch=options.patch,
        )
        _say(f"{len(points) * options.times} points, seed {options.seed}")
        play_all(started, points * options.times, tell)
    for kind, count in sorted(played.items()):
        _say(f"{kind:13} {count:6} points {broken[kind]:6} broken")
    seconds = time.monotonic() - began
    _say(f"{played.total()} points in {seconds:.0f} s, {broken.total()} broken")
    return 1 if broken else 0


def _bite(options: argparse.Namespace) -> int:
    from tests.faults.bite import bite
    from tests.faults.sweep import runners

    with runners(options.jobs) as started:
        bites = bite(
            started,
            options.patch,
            seed=options.seed,
            enough=options.enough,
            tell=lambda b: _say(str(b)),
        )
    return 0 if all(each.caught for each in bites) else 1


def _nightly(options: argparse.Namespace) -> int:
    from tests.faults.nightly import run, steps

    _say(f"seed {options.seed}")
    return 1 if run(steps(jobs=options.jobs, seed=options.seed), _say) else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
