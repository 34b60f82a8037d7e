"""tests/behaviours.md names a test for each behaviour, and that test names the behaviour."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PAGE = TESTS / "behaviours.md"
OTHERS = sorted(path for path in TESTS.rglob("test_*.py") if path != Path(__file__))

#: The number of behaviours of each of the five systems.
COUNTS = {"PMQ": 69, "CAR": 42, "NSQ": 36, "KAF": 19, "RMQ": 22}
EVERY = [f"{system}-{n}" for system, count in COUNTS.items() for n in range(1, count + 1)]
#: Prefixes of table lines that do not have a test.
WITHOUT = ("not wanted: ", "cannot apply: ")


def lines() -> list[tuple[str, str, str]]:
    """Return id, words and last column of each line of the tables."""
    found = re.findall(r"^\| ([A-Z]{3}-\d+) \| (.*) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return [(id, words, shown) for id, words, shown in found]


LINES = {id: (words, shown) for id, words, shown in lines()}


def mentioned(text: str) -> set[str]:
    """Return the ids in a text."""
    return {id for id in re.findall(r"\b[A-Z]{3}-\d+\b", text) if id[:3] in COUNTS}


def shortened(text: str) -> list[str]:
    """Return every list of ids in which only the first is written in full."""
    joint = r"\s*(?:,|/|-|\.\.|and\b|or\b|to\b)\s*"
    return re.findall(rf"\b(?:{'|'.join(COUNTS)})-\d+(?:{joint}\d+\b)+", text)


@cache
def found_in(path: str) -> dict[str, str]:
    """Return the source of each test in a file, including decorators, by test name."""
    source = (TESTS / path).read_text()
    every = source.splitlines()
    found = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}::")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                start = min(each.lineno for each in (node, *node.decorator_list))
                found[prefix + node.name] = "\n".join(every[start - 1 : node.end_lineno])

    visit(ast.parse(source).body, "")
    return found


def named() -> list[tuple[str, str, str]]:
    """Return id, file and test name for every test named on the page."""
    return [
        (id, *test.split("::", 1))
        for id, (_, shown) in LINES.items()
        for test in re.findall(r"`([^`]*)`", "" if shown.startswith(WITHOUT) else shown)
    ]


def test_ids_are_written_in_full() -> None:
    """A search for an id then finds every test of it."""
    assert shortened("PMQ-7, 10: NSQ-12..14 (KAF-1 to 3); RMQ-4, RMQ-5: 64 rows, PMQ-30: 10") == [
        "PMQ-7, 10", "NSQ-12..14", "KAF-1 to 3",
    ]  # fmt: skip
    for path in [PAGE, *OTHERS]:
        assert shortened(path.read_text()) == [], path


def test_every_behaviour_has_one_line() -> None:
    assert Counter(id for id, _, _ in lines()) == Counter(EVERY)
    assert list(LINES) == EVERY


@pytest.mark.parametrize("id", EVERY)
def test_every_line_names_a_test_or_a_reason(id: str) -> None:
    words, shown = LINES[id]
    assert words
    if not shown.startswith(WITHOUT):
        assert re.fullmatch(r"`[\w/]+\.py::[\w:]+`(, `[\w/]+\.py::[\w:]+`)*", shown)


@pytest.mark.parametrize(("id", "path", "test"), named())
def test_a_named_test_is_there_and_names_the_behaviour(id: str, path: str, test: str) -> None:
    assert (TESTS / path).is_file(), path
    assert test in found_in(path)
    assert test.rpartition("::")[2].startswith("test_")
    assert id in mentioned(found_in(path)[test])


def is_plain(path: str, test: str) -> bool:
    """Return whether a plain run has the test, or cases of it."""
    marked = r"pytest\.mark\.(slow|thorough)\b"
    return not (
        re.search(f"@{marked}", found_in(path)[test])
        or re.search(rf"^pytestmark = .*{marked}", (TESTS / path).read_text(), re.MULTILINE)
    )


def test_a_plain_run_shows_every_behaviour() -> None:
    assert {id for id, *_ in named()} == {id for id, *test in named() if is_plain(*test)}


def test_ids_in_tests_are_ids_of_the_page() -> None:
    assert mentioned("\n".join(path.read_text() for path in OTHERS)) <= set(EVERY)
