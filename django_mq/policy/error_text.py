"""Turn an exception into plain text, to be stored with the failed attempt.

Exceptions come from users' code and its input, so they are not trusted: describing one never
raises, hangs or recurses endlessly, and the text can always be stored and shown. Tracebacks contain
source lines, but never the values of variables.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from traceback import walk_tb

from django_mq.policy.error_place import error_place
from django_mq.policy.error_str import ErrorTexts, class_name
from django_mq.policy.plain_text import clean, cut, cut_middle, one_line
from django_mq.policy.stack import Frame, frames_of, shown

#: The largest failure, and the largest text and place in it, in bytes of UTF-8.
MAX_FAILURE = 16 * 1024
MAX_TEXT = 4 * 1024
MAX_PLACE = 256
#: The number of exceptions of a chain or group that are shown, and of frames per exception.
MAX_EXCEPTIONS = 10
MAX_FRAMES = 40

# A class may override these names; the descriptors of the base class read the real values.
_get_cause = BaseException.__dict__["__cause__"].__get__
_get_context = BaseException.__dict__["__context__"].__get__
_get_suppressed = BaseException.__dict__["__suppress_context__"].__get__
_get_traceback = BaseException.__dict__["__traceback__"].__get__
_get_attributes = BaseException.__dict__["__dict__"].__get__
_get_parts = BaseExceptionGroup.__dict__["exceptions"].__get__


@dataclass(frozen=True, slots=True)
class Failure:
    """The text of a failed attempt: the error class with its module, its text, the traceback.

    `place` is the module and function that failed, empty if no traceback shows it.
    """

    error_class: str
    text: str
    traceback: str = ""
    place: str = ""

    @property
    def summary(self) -> str:
        """The class and the text in one line of at most 500 bytes, for lists and logs."""
        return one_line(f"{self.error_class}: {self.text}" if self.text else self.error_class)


def describe(error: BaseException, *, stack: Iterable[Frame] = ()) -> Failure:
    """Return the text of `error`, at most 16 KiB of UTF-8 in total; never raises.

    The exceptions' own `__str__()` methods get one second in total. `stack` has the calls that led
    to an error that was never raised.

    >>> describe(ValueError("no\\x00such order")).text
    'no\ufffdsuch order'
    """
    name = text = traceback = "(not available)"
    place = ""
    texts = ErrorTexts()
    # The attempt counts in any case: keep as much of the exception as can be read.
    with contextlib.suppress(Exception):
        name = class_name(error)
        place = one_line(error_place(error), MAX_PLACE)
        text = cut(texts.of(error), MAX_TEXT)
        room = MAX_FAILURE - len(name.encode()) - len(text.encode())
        traceback = cut_middle(clean("".join(_lines(error, texts, stack))), room)
    return Failure(name, text, traceback, place)


def source_line(error: BaseException) -> str:
    """Return the file, line and function that raised `error`, without its text or any value.

    >>> try:
    ...     one_line(None)
    ... except TypeError as error:
    ...     source_line(error).rpartition("/")[2].split(":")[0]
    'plain_text.py'
    >>> source_line(ValueError("never raised"))
    ''
    """
    found = _get_traceback(error)
    while found is not None and found.tb_next is not None:
        found = found.tb_next
    if found is None:
        return ""
    code = found.tb_frame.f_code
    return one_line(f"{code.co_filename}:{found.tb_lineno} in {code.co_name}")


def _lines(error: BaseException, texts: ErrorTexts, stack: Iterable[Frame]) -> Iterator[str]:
    """Yield the traceback as Python prints it: causes come first, parts of a group come last."""
    for heading, each in _related(error):
        yield heading
        found = _get_traceback(each)
        calls = stack if found is None and each is error else frames_of(walk_tb(found))
        frames = list(_frames(calls))
        if frames:
            yield "Traceback (most recent call last):\n"
            yield from frames
        text = texts.of(each)
        yield f"{class_name(each)}: {text}\n" if text else f"{class_name(each)}\n"
        notes = _get_attributes(each).get("__notes__")
        for note in notes[:MAX_EXCEPTIONS] if type(notes) is list else ():
            if type(note) is str:
                yield f"{note[:MAX_TEXT]}\n"


def _related(error: BaseException) -> Iterator[tuple[str, BaseException]]:
    """Yield (heading, exception): the chain that led to `error`, `error` itself, its parts."""
    chain: deque[tuple[str, BaseException]] = deque([("", error)])
    seen = {id(error)}
    while len(chain) < MAX_EXCEPTIONS:
        _, oldest = chain[0]
        cause, context = _get_cause(oldest), _get_context(oldest)
        if cause is not None:
            before, heading = cause, "\nThe above exception was the direct cause of this one:\n\n"
        elif context is not None and not _get_suppressed(oldest):
            before, heading = context, "\nThis one was raised while the above was handled:\n\n"
        else:
            break
        if id(before) in seen:
            break
        seen.add(id(before))
        chain[0] = (heading, oldest)
        chain.appendleft(("", before))
    yield from chain

    parts = deque([error])
    shown = len(chain)
    while parts and shown < MAX_EXCEPTIONS:
        group = parts.popleft()
        if not issubclass(type(group), BaseExceptionGroup):
            continue
        inside = _get_parts(group)
        for number, part in enumerate(inside[: MAX_EXCEPTIONS - shown], start=1):
            yield f"\nPart {number} of {len(inside)} of {class_name(group)}:\n\n", part
            parts.append(part)
            shown += 1


def stack_text(calls: Iterable[Frame]) -> str:
    """Return calls as a traceback shows them, at most 16 KiB of UTF-8; empty for none.

    >>> print(stack_text([("/shop/mail.py", 7, "send")]).rstrip())
      File "/shop/mail.py", line 7, in send
    """
    return cut_middle(clean("".join(_frames(calls))), MAX_FAILURE)


def _frames(calls: Iterable[Frame]) -> Iterator[str]:
    """Yield the first and last of `calls`, each with its source line."""
    walk = iter(calls)
    head = list(islice(walk, MAX_FRAMES // 2))
    tail: deque[Frame] = deque(maxlen=MAX_FRAMES // 2)
    left_out = -(MAX_FRAMES // 2)
    for frame in walk:
        tail.append(frame)
        left_out += 1
    yield from map(shown, head)
    if left_out > 0:
        yield f"  ... {left_out} frames left out ...\n"
    yield from map(shown, tail)
