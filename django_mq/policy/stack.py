"""The stack of a thread or a coroutine as data: its calls, outermost first, without values."""

from __future__ import annotations

import linecache
import os.path
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from traceback import walk_stack, walk_tb
from types import FrameType

#: One call: file, line number (0: unknown), function.
Frame = tuple[str, int, str]

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)\b")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
#: The code in which threads begin and that calls handlers: it does not show where a handler is.
_AROUND = re.compile(
    r"(^|/)(threading|selectors|asyncio/\w+|concurrent/futures/\w+|contextlib"
    r"|asgiref/\w+|django_mq/(executor|worker)/\w+)\.py$"
)
#: The prefixes of the attributes of awaitable objects, and the attributes that hold the object
#: awaited.
_AWAITS = (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await"))
#: The thread on which coroutines run blocking calls.
_SHARED = re.compile(r"(^|/)django_mq/executor/shared_thread\.py$")


def parse_dump(dump: str) -> dict[int, list[Frame]]:
    """Return the calls of each thread in a dump of `faulthandler`, by its identifier.

    >>> parse_dump('''Thread 0x00ff (most recent call first):
    ...   File "/shop/mail.py", line 7 in send
    ...   File "/shop/handlers.py", line 3 in on_order
    ... ''')
    {255: [('/shop/handlers.py', 3, 'on_order'), ('/shop/mail.py', 7, 'send')]}
    """
    found: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in dump.splitlines():
        if thread := _THREAD.match(line):
            frames = found[int(thread[1], 16)] = []
        elif frame := _FRAME.fullmatch(line):
            number = int(frame[2]) if frame[2].isdigit() else 0
            frames.insert(0, (frame[1], number, frame[3]))
    return found


def of_handler(frames: Sequence[Frame]) -> list[Frame]:
    """Return `frames` without the outer calls that lead to a handler.

    >>> of_handler([("/lib/threading.py", 9, "run"), ("/shop/mail.py", 7, "send")])
    [('/shop/mail.py', 7, 'send')]
    """
    for index, (file, _, _) in enumerate(frames):
        if not _AROUND.search(file):
            return list(frames[index:])
    return []


def raised_from(error: BaseException) -> list[Frame]:
    """Return the calls of the handler from which `error` came; it may have been cancelled there."""
    return of_handler(frames_of(walk_tb(error.__traceback__)))


def frames_of(walk: Iterable[tuple[FrameType, int]]) -> list[Frame]:
    """Return the calls of a walk through frames or a traceback, in its order (outermost first)."""
    return [(frame.f_code.co_filename, line or 0, frame.f_code.co_name) for frame, line in walk]


def all_stacks() -> dict[int, list[Frame]]:
    """Return the calls of each thread of this process, by its identifier."""
    return {
        thread: frames_of(reversed(list(walk_stack(frame))))
        for thread, frame in sys._current_frames().items()
    }


def awaited_by(coroutine: object) -> list[Frame]:
    """Return the calls of a suspended coroutine down to what it awaits; none while it runs."""
    walk: list[tuple[FrameType, int]] = []
    while any(hasattr(coroutine, inner) for _, inner in _AWAITS):
        kind, inner = next(each for each in _AWAITS if hasattr(coroutine, each[1]))
        frame: FrameType | None = getattr(coroutine, f"{kind}_frame")
        if frame is None or getattr(coroutine, f"{kind}_running"):
            return []
        walk.append((frame, frame.f_lineno))
        coroutine = getattr(coroutine, inner)
    return of_handler(frames_of(walk))


def running_in(stacks: Mapping[int, Sequence[Frame]], thread: int) -> list[Frame]:
    """Return the stack of the handler in `thread`; if that is an idle loop, of its blocking call.

    >>> loop, pool = ("/lib/asyncio/base_events.py", 1, "_run"), ("/shop/mail.py", 7, "send")
    >>> running_in({1: [loop], 2: [("django_mq/executor/shared_thread.py", 5, "run"), pool]}, 1)
    [('/shop/mail.py', 7, 'send')]
    """
    found = of_handler(stacks.get(thread, ()))
    shared = (each for each in stacks.values() if any(_SHARED.search(file) for file, _, _ in each))
    return found or of_handler(next(shared, ()))


def readable(value: object) -> list[Frame]:
    """Return the frames in JSON data from another process, without malformed ones.

    >>> readable([["/shop/mail.py", 7, "send"], ["/shop/mail.py"], None])
    [('/shop/mail.py', 7, 'send')]
    """
    if not isinstance(value, Iterable):
        return []
    return [
        (each[0], each[1], each[2])
        for each in value
        if isinstance(each, list) and list(map(type, each)) == [str, int, str]
    ]


def shown(frame: Frame) -> str:
    """Return one call as a traceback shows it, with its source line if that can be read."""
    filename, number, function = frame
    # Only regular files are read: a code object may claim to come from a pipe or /dev/zero.
    source = linecache.getline(filename, number).strip() if os.path.isfile(filename) else ""
    header = f'  File "{filename}", line {number}, in {function}\n'
    return f"{header}    {source[:500]}\n" if source else header
