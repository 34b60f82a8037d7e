"""Text that can be stored, logged and printed."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from django_mq.policy.plain_text import one_line


@given(st.text(alphabet=st.characters(), max_size=300), st.integers(3, 200))
def test_one_line_is_one_line_within_its_limit(text: str, limit: int) -> None:
    """S13: one record is one line, whatever an error says."""
    line = one_line(text, limit)
    assert len(line.encode()) <= limit
    assert len(line.splitlines()) <= 1
    assert not any(each < " " or each == "\x7f" for each in line)


def test_one_line_of_text_that_is_much_too_long() -> None:
    assert one_line("  \n" * 1_000_000 + "said") == "said"
    assert one_line("ü" * 1_000_000, 10) == "üüü…"
    assert sys.getsizeof(one_line("x" * 1_000_000)) < 2000
