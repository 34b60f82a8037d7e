"""Each module has tests of its name, or `modules.md` says where they are; SQL is in the store."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "django_mq"
ROWS = re.findall(r"^\| `([^`]+)` \| [^|]+ \| (.+) \|$", (TESTS / "modules.md").read_text(), re.M)


@cache
def names_of_tests(package: str) -> set[str]:
    """Return the names of the test files and directories of a package, and of those beside all."""
    files = [*(TESTS / package).rglob("test_*.py"), *TESTS.glob("test_*.py")]
    return {file.stem.removeprefix("test_") for file in files} | {
        file.parent.name for file in files
    }


def packages_without_a_test_for_a_module() -> set[str]:
    """Return the packages with a module whose name none of their tests has."""
    modules = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    return {
        str(module.parent)
        for module in modules
        if module.stem not in names_of_tests(module.parts[0]) | {"__init__"}
        and module.parent.name != "migrations"
    }


def test_each_package_says_where_its_other_modules_are_tested() -> None:
    assert {package for package, _ in ROWS} == packages_without_a_test_for_a_module()


def test_what_it_says_is_there() -> None:
    named = {name for _, read in ROWS for name in re.findall(r"`([^`]+)`", read)}
    assert named
    assert {name for name in named if not (TESTS / name).exists()} == set()


def test_only_the_store_has_sql_of_our_tables() -> None:
    """Elsewhere, nobody who changes a table would look for it."""
    allowed = ("store", "migrations")
    found = [
        f"{path.relative_to(PACKAGE)}: {statement}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in allowed
        for statement in re.findall(
            r"(?i)\b(?:from|into|join|update)\s+django_mq_\w+", path.read_text()
        )
    ]
    assert not found, "move these statements to store/"
