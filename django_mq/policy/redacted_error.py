"""Show where an exception was raised, without its text, which may be private.

Log handlers and error trackers print or send `exc_info`. Its stack helps, and contains source lines
but no values.
"""

from __future__ import annotations

from functools import lru_cache
from typing import cast

from django_mq.exceptions import UnexpectedPayload
from django_mq.policy.error_text import describe
from django_mq.policy.outcomes import AttemptEnded
from django_mq.policy.plain_text import one_line

#: Texts that replace an error's own: if a failed attempt has that text, and otherwise.
HIDDEN = "(its text is hidden: see the failed attempt, or LOG_ERROR_TEXTS)"
HIDDEN_EVERYWHERE = "(its text is hidden: set LOG_ERROR_TEXTS to see it)"

_get_traceback = BaseException.__dict__["__traceback__"].__get__


def redacted(error: BaseException, text: str = HIDDEN) -> Exception:
    """Return an exception with the class name and stack of `error`, but with `text` as its text.

    A text that `loggable_text()` returns is kept. Causes and notes are left out, since they also
    have texts.

    >>> try:
    ...     int("secret")
    ... except ValueError as error:
    ...     shown = redacted(error)
    >>> type(shown).__name__, str(shown) == HIDDEN, shown.__traceback__ is not None
    ('ValueError', True, True)
    """
    module, _, name = describe(error).error_class.rpartition(".")
    found = _bare_class(module, name)(loggable_text(error) or text)
    return found.with_traceback(_get_traceback(error))


def loggable_text(error: BaseException | None) -> str:
    """Return a text that quotes no content; empty for errors that may quote some.

    Attempts that were ended from outside say what ended them, and an UnexpectedPayload names the
    field.

    >>> from django_mq.policy.outcomes import WorkerLost
    >>> loggable_text(WorkerLost("process 7 was killed by SIGKILL")), loggable_text(KeyError("x"))
    ('process 7 was killed by SIGKILL', '')
    """
    kind = type(error)  # isinstance() would read `__class__`
    if issubclass(kind, AttemptEnded):
        return one_line(str(error))
    if issubclass(kind, UnexpectedPayload):
        return cast(UnexpectedPayload, error)._redacted_text
    return ""


@lru_cache(maxsize=256)
def _bare_class(module: str, name: str) -> type[Exception]:
    return type(name, (Exception,), {"__module__": module or "builtins"})
