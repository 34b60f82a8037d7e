"""Each module has tests of its name, or `modules.md` says where they are; SQL is in the store."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "django_mq"
PAGE = (TESTS / "modules.md").read_text()
ROWS = re.findall(r"^\| `([^`]+)` \| [^|]+ \| (.+) \|$", PAGE, re.M)
#: Modules of the executor, and the tests to read, in the table with two columns.
EXECUTOR_ROWS = re.findall(r"^\| (`[^|]+`) \| (`[^|]+`) \|$", PAGE, re.M)


@cache
def names_of_tests(package: str) -> set[str]:
    """Return the names of the test files and directories of a package, and of those beside all."""
    files = [*(TESTS / package).rglob("test_*.py"), *TESTS.glob("test_*.py")]
    return {file.stem.removeprefix("test_") for file in files} | {
        file.parent.name for file in files
    }


def modules_without_a_test() -> list[Path]:
    """Return the modules whose name none of the tests of their package has."""
    modules = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    return [
        module
        for module in modules
        if module.stem not in names_of_tests(module.parts[0]) | {"__init__"}
        and module.parent.name != "migrations"
    ]


def test_every_package_lists_tests_of_its_other_modules() -> None:
    assert {package for package, _ in ROWS} == {
        str(each.parent) for each in modules_without_a_test()
    }


def test_each_of_these_modules_of_the_executor_is_in_one_row() -> None:
    listed = [name for names, _ in EXECUTOR_ROWS for name in re.findall(r"`(\w+)`", names)]
    found = [each.stem for each in modules_without_a_test() if each.parts[0] == "executor"]
    assert sorted(listed) == sorted(found)


def test_named_test_files_exist() -> None:
    rows = [*ROWS, *EXECUTOR_ROWS]
    named = {name for _, read in rows for name in re.findall(r"`([^`]+)`", read)}
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
