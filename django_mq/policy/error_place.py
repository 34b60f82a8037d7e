"""Find the place in the code where an error was raised; failed attempts are grouped by it."""

from __future__ import annotations

import sys
import sysconfig
from types import FrameType, TracebackType

#: The directory of the standard library, and the prefix of modules compiled into the interpreter.
_STANDARD = (sysconfig.get_path("stdlib"), "<frozen ")
#: Every error of the database is raised in the same functions of these packages.
_CARRIERS = {"django", "psycopg", "psycopg_binary", "psycopg_c", "psycopg_pool"}

# A subclass may override the attribute; the descriptor of the base class reads the real value.
_get_traceback = BaseException.__dict__["__traceback__"].__get__


def error_place(error: BaseException) -> str:
    """Return module and function of the innermost frame in the project's code, or in a library's.

    Frames of django_mq, of Django, of the driver and of the standard library are skipped: many
    handlers fail in `json.loads()` or in `Model.save()`, but each at its own place. The line number
    is left out, since every edit moves it. Empty if there is no such frame, as for a timeout.

    >>> error_place(ValueError("never raised"))
    ''
    """
    found = None
    traceback: TracebackType | None = _get_traceback(error)
    while traceback is not None:
        if _counts(traceback.tb_frame):
            found = traceback.tb_frame
        traceback = traceback.tb_next
    return f"{_module(found)}:{found.f_code.co_qualname}" if found else ""


def _counts(frame: FrameType) -> bool:
    """Return whether a frame is of none of the packages that `error_place()` skips.

    An app may have the name of a standard module (calendar, profile), so the file counts, too.
    """
    package = _module(frame).partition(".")[0]
    if package in sys.stdlib_module_names:
        return not frame.f_code.co_filename.startswith(_STANDARD)
    return package != "django_mq" and package not in _CARRIERS


def _module(frame: FrameType) -> str:
    """Return the name of a frame's module, `?` if that is not text."""
    name = frame.f_globals.get("__name__")
    return name if type(name) is str else "?"
