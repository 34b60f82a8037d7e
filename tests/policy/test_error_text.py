"""The stored text of an exception, for any kind of exception (S14, S29; guarantee 11)."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_mq.policy import error_str
from django_mq.policy import error_text as failures
from django_mq.policy.error_text import MAX_EXCEPTIONS, MAX_FAILURE, Failure, describe


def raised(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("it did not raise")


def fail(error: BaseException, cause: BaseException | None = None) -> None:
    raise error from cause


def size(failure: Failure) -> int:
    """Bytes of UTF-8; raises for a lone surrogate."""
    return sum(
        len(each.encode()) for each in (failure.error_class, failure.text, failure.traceback)
    )


def test_class_text_and_traceback_of_an_ordinary_error() -> None:
    failure = describe(raised(lambda: fail(ValueError("no such order"))))
    assert failure.error_class == "ValueError"
    assert failure.text == "no such order"
    lines = failure.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-3].endswith(", in fail")
    assert lines[-2:] == ["    raise error from cause", "ValueError: no such order"]
    assert failure.summary == "ValueError: no such order"


def test_class_outside_builtins_has_its_module() -> None:
    class OutOfStock(Exception):
        pass

    failure = describe(OutOfStock())
    assert failure.error_class.startswith(f"{__name__}.")
    assert failure.error_class.endswith(".OutOfStock")
    assert failure.text == ""
    assert failure.summary == failure.error_class


def test_variables_are_not_in_the_traceback() -> None:
    """S14: source lines may appear, values never."""

    def handler() -> None:
        secret = "canary".upper()
        raise ValueError(len(secret))

    failure = describe(raised(handler))
    assert "secret = " not in failure.traceback
    assert "CANARY" not in failure.traceback


def test_cause_and_context_come_before_and_notes_after() -> None:
    error = raised(lambda: fail(ValueError("outer"), KeyError("cause")))
    error.add_note("order 7")
    told = describe(error).traceback
    assert told.index("KeyError: 'cause'") < told.index("direct cause") < told.index("outer")
    assert told.endswith("ValueError: outer\norder 7\n")

    def handling() -> None:
        try:
            fail(KeyError("first"))
        except KeyError:
            fail(ValueError("second"))

    assert "KeyError" not in describe(raised(handling)).traceback  # `from None` hides it

    def falling() -> None:
        try:
            fail(KeyError("first"))
        except KeyError:
            raise ValueError("second")  # noqa: B904  (its context is what is tested)

    told = describe(raised(falling)).traceback
    assert (
        told.index("KeyError: 'first'") < told.index("This one was raised") < told.index("second")
    )


def test_parts_of_a_group_are_described() -> None:
    group = ExceptionGroup("two", [ValueError("one"), ExceptionGroup("in", [KeyError("two")])])
    told = describe(group).traceback
    assert "Part 1 of 2" in told
    assert "ValueError: one" in told
    assert "KeyError: 'two'" in told


class RaisesInStr(Exception):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __str__(self) -> str:
        raise self.error


class Recurses(Exception):
    def __str__(self) -> str:
        return str(self)


class NotText(Exception):
    def __str__(self) -> str:
        return 5


class EvilText(str):
    def __str__(self) -> str:
        raise RuntimeError

    __format__ = __add__ = __len__ = __getitem__ = encode = __eq__ = __hash__ = __str__


class ReturnsEvilText(Exception):
    def __str__(self) -> str:
        return EvilText("evil")


class EvilArgument:
    def __repr__(self) -> str:
        raise SystemExit


class Huge(Exception):
    def __str__(self) -> str:
        return "ü" * 10_000_000


class Lies(Exception):
    """Lies about all its attributes."""

    @property
    def __class__(self) -> type:
        raise RuntimeError

    __cause__ = __context__ = __traceback__ = __suppress_context__ = property(lambda self: 1 / 0)
    args = __notes__ = property(lambda self: 1 / 0)

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(name)


class EvilMeta(type):
    def __getattribute__(cls, name: str) -> object:
        raise RuntimeError(name)


class OfEvilMeta(Exception, metaclass=EvilMeta):
    pass


class EvilModule(Exception):
    __module__ = EvilText("evil.module")


class ReprInStr(Exception):
    __str__ = object.__str__

    def __repr__(self) -> str:
        raise KeyboardInterrupt


class EvilMethod:
    def __call__(self) -> str:
        return "said"

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = None


class OfEvilMethod(Exception):
    __str__ = EvilMethod()


def nested(depth: int) -> object:
    value: object = []
    for _ in range(depth):
        value = [value]
    return value


def filename_that_lies() -> BaseException:
    return raised(lambda: exec(compile("1/0", "/dev/zero\0\ud800", "exec")))  # noqa: S102


HOSTILE: dict[str, Callable[[], BaseException]] = {
    "raises": lambda: RaisesInStr(ValueError("no")),
    "raises SystemExit": lambda: RaisesInStr(SystemExit(1)),
    "raises KeyboardInterrupt": lambda: RaisesInStr(KeyboardInterrupt()),
    "raises itself": lambda: raised(lambda: fail(RaisesInStr(RaisesInStr(ValueError())))),
    "recurses": Recurses,
    "not text": NotText,
    "evil text": ReturnsEvilText,
    "evil argument": lambda: ValueError(EvilArgument()),
    "evil arguments": lambda: ValueError(EvilText("x"), EvilArgument()),
    "evil file name": lambda: OSError(1, "text", EvilArgument()),
    "deep argument": lambda: ValueError(nested(100_000)),
    "huge": Huge,
    "huge argument": lambda: ValueError("x" * 10_000_000),
    "lies": Lies,
    "lies when raised": lambda: raised(lambda: fail(Lies())),
    "evil metaclass": lambda: raised(lambda: fail(OfEvilMeta("x"))),
    "evil module": EvilModule,
    "repr in str": ReprInStr,
    "evil method": OfEvilMethod,
    "NUL and surrogates": lambda: ValueError("a\0b\ud800c"),
    "file name": filename_that_lies,
    "interrupt": KeyboardInterrupt,
    "group of hostile": lambda: ExceptionGroup("g", [Recurses(), NotText(), Lies()]),
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_exception_can_be_described_and_stored(
    make: Callable[[], BaseException],
) -> None:
    """S29; guarantee 11: never raises, and its text fits any column and log."""
    failure = describe(make())
    assert size(failure) <= MAX_FAILURE
    for text in (failure.error_class, failure.text, failure.traceback, failure.summary):
        assert type(text) is str
        assert "\0" not in text
    assert failure.error_class
    assert "\n" not in failure.error_class + failure.summary


def test_hostile_exceptions_are_described() -> None:
    assert describe(RaisesInStr(SystemExit(1))).text == "(no text: str() raised SystemExit)"
    assert describe(Recurses()).text == "(no text: str() raised RecursionError)"
    assert describe(ReturnsEvilText()).text == "evil"
    assert describe(OfEvilMethod()).text == "said"
    assert (
        describe(ValueError("a\0b\ud800c\x1b[2J\x9b\u202e")).text
        == "a\ufffdb\ufffdc\ufffd[2J\ufffd\ufffd"
    )
    assert describe(ValueError("two\nlines\tkept")).text == "two\nlines\tkept"
    assert describe(OfEvilMeta("x")).error_class.endswith("OfEvilMeta")
    assert describe(EvilModule()).error_class == "evil.module.EvilModule"
    assert "in fail" in describe(raised(lambda: fail(Lies()))).traceback


def test_source_is_read_from_plain_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S29: opening a pipe that has no writer would wait for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    error = raised(lambda: exec(compile("1/0", str(pipe), "exec")))  # noqa: S102
    monkeypatch.setattr("linecache.getline", lambda name, line: f"read {name}")
    told = describe(error).traceback
    assert f'File "{pipe}", line 1' in told
    assert f"read {__file__}" in told
    assert f"read {pipe}" not in told


@pytest.fixture
def never() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()  # releases the threads that still wait for it


def test_text_that_never_comes_is_not_waited_for(
    never: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S29: and after the first one hangs, no other exception of the chain is asked."""
    asked = []

    class Hangs(Exception):
        def __str__(self) -> str:
            asked.append(self)
            never.wait()
            return "late"

    monkeypatch.setattr(error_str, "STR_SECONDS", 0.01)
    error = raised(lambda: fail(Hangs(), Hangs()))
    failure = describe(error)
    assert failure.text == "(its text took too long)"
    assert "(text not requested)" in failure.traceback
    assert asked == [error]


def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert describe(NotText()).text == "(its text took too long)"


def test_long_chain_is_bounded() -> None:
    error: BaseException = ValueError("0")
    for number in range(1, 50):
        error = raised(lambda e=error, n=number: fail(ValueError(f"<{n}>"), e))
    told = describe(error).traceback
    assert told.count("direct cause") == MAX_EXCEPTIONS - 1
    assert told.rstrip().endswith("ValueError: <49>")
    assert "<39>" not in told


def test_circular_chain_ends() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert describe(first).traceback.count("ValueError: ") == 2


def test_deep_and_wide_groups_are_bounded() -> None:
    group = ExceptionGroup("g", [ValueError(str(n)) for n in range(1000)])
    assert describe(group).traceback.count("\nPart ") == MAX_EXCEPTIONS - 1
    for _ in range(5000):
        group = ExceptionGroup("g", [group])
    assert describe(group).traceback.count("\nPart ") == MAX_EXCEPTIONS - 1


def test_endless_recursion_shows_both_ends() -> None:
    def deeper() -> None:
        deeper()

    told = describe(raised(deeper)).traceback
    assert "frames left out" in told
    assert told.count(", in deeper") == failures.MAX_FRAMES - 1  # the first is the test's own
    assert "RecursionError: maximum recursion depth exceeded" in told


def test_traceback_too_long_keeps_first_cause_and_error() -> None:
    error = raised(lambda: fail(ValueError("last" + "y" * 9000), KeyError("x" * 9000)))
    failure = describe(error)
    assert failure.traceback.startswith("KeyError")
    assert "cut here" in failure.traceback
    assert failure.traceback.endswith("y\n")
    assert MAX_FAILURE - 10 <= size(failure) <= MAX_FAILURE


@given(st.text(alphabet=st.characters(), max_size=200) | st.just("ü" * 9000))
def test_any_text_becomes_storable(text: str) -> None:
    """Guarantee 11, with lone surrogates and control characters among them."""
    failure = describe(ValueError(text))
    assert size(failure) <= MAX_FAILURE
    assert "\0" not in failure.text + failure.traceback
