"""Each module has tests of its name, or its room's `modules.md` says where they are."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "django_mq"
ROWS = re.findall(r"^\| `([^`]+)` \| [^|]+ \| (.+) \|$", (TESTS / "modules.md").read_text(), re.M)


def rooms_without_a_test_for_a_module() -> set[str]:
    """Return the rooms with a module whose name no test file or test directory has."""
    names = {path.stem.removeprefix("test_") for path in TESTS.rglob("test_*.py")}
    names |= {path.parent.name for path in TESTS.rglob("test_*.py")}
    return {
        str(path.parent.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.stem not in names | {"__init__"} and path.parent.name != "migrations"
    }


def test_each_room_says_where_its_other_modules_are_tested() -> None:
    assert {room for room, _ in ROWS} == rooms_without_a_test_for_a_module()


def test_what_it_says_is_there() -> None:
    named = {name for _, read in ROWS for name in re.findall(r"`([^`]+)`", read)}
    assert named
    assert {name for name in named if not (TESTS / name).exists()} == set()
