"""tests/promises.md lists the promises that tests cite by number, and each of them is tested."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = (TESTS / "promises.md").read_text()
#: Ids and promises, in the order of the page.
ROWS = re.findall(r"^\| (\d+|S\d\d) \| (.+) \|$", PAGE, re.MULTILINE)
UNTESTED = {id for id, promise in ROWS if "(no test: " in promise}


def cited(text: str) -> set[str]:
    """Return the ids that a text names: "S04", "guarantee 4", "Guarantees 4, 16"."""
    lists: list[str] = re.findall(r"\b[Gg]uarantees? (\d+(?:,\s+\d+)*)", text)
    return {*re.findall(r"\bS\d\d\b", text), *re.findall(r"\d+", " ".join(lists))}


def cited_in_tests() -> set[str]:
    files = [path for path in TESTS.rglob("*.py") if path != Path(__file__)]
    return cited("\n".join(path.read_text() for path in files))


def test_lists_and_single_ids_are_read() -> None:
    text = "Guarantees 1,\n    16; NSQ-35, S04: 3 rows. PMQ-6, guarantee 12: S3, 64"
    assert cited(text) == {"1", "16", "12", "S04"}


def test_the_page_lists_every_id_once_and_in_order() -> None:
    ids = [id for id, _ in ROWS]
    numbers = [id for id in ids if id.isdigit()]
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    assert ids[len(numbers) :] == [f"S{number:02}" for number in range(1, 36)]


def test_every_cited_id_is_on_the_page() -> None:
    assert cited_in_tests() - {id for id, _ in ROWS} == set()


def test_every_promise_is_cited_by_a_test_or_says_why_not() -> None:
    assert {id for id, _ in ROWS} - cited_in_tests() == UNTESTED
