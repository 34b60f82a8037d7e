"""The class name and the text of an exception, read in spite of its own code."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from django_mq.policy.plain_text import clean, one_line

#: The largest class name, in bytes of UTF-8, and the largest text, in characters.
MAX_CLASS, MAX_ASKED = 256, 16 * 1024
#: Seconds, in total, that the `__str__()` methods of one failure may take.
STR_SECONDS = 1.0

# A class may override these names; the descriptors of the base class read the real values.
_get_args = BaseException.__dict__["args"].__get__
_get_qualname = type.__dict__["__qualname__"].__get__
_get_mro = type.__dict__["__mro__"].__get__
_get_namespace = type.__dict__["__dict__"].__get__

# With these methods, and arguments of these types, str() runs only code of the interpreter.
_TRUSTED_STR = (BaseException.__dict__["__str__"], KeyError.__dict__["__str__"])
_TRUSTED_ARGUMENTS = frozenset({str, bytes, int, float, bool, type(None)})


def class_name(error: BaseException) -> str:
    """Return the name of the class, with its module unless that is `builtins`."""
    name = str.__str__(_get_qualname(type(error)))
    module = _get_namespace(type(error)).get("__module__")
    if issubclass(type(module), str) and str.__ne__(module, "builtins"):
        name = f"{str.__str__(module)}.{name}"
    return one_line(name, MAX_CLASS)


class ErrorTexts:
    """Calls `str()` on exceptions, whose code may raise or hang."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self._patience = STR_SECONDS

    def of(self, error: BaseException) -> str:
        """Return the cleaned text of `error`, or in brackets the reason why there is none."""
        if id(error) not in self._known:
            self._known[id(error)] = clean(self._ask(error)[:MAX_ASKED])
        return self._known[id(error)]

    def _ask(self, error: BaseException) -> str:
        if _says_its_text_safely(error):
            return _text_of(error)
        if self._patience <= 0:
            return "(text not requested)"
        start = time.monotonic()
        answer = _within(self._patience, lambda: _text_of(error))
        if answer is None:
            self._patience = 0.0
            return "(its text took too long)"
        self._patience -= time.monotonic() - start
        return answer


def _says_its_text_safely(error: BaseException) -> bool:
    """Return whether `str(error)` runs only code of the interpreter, which is nearly always so."""
    namespaces = (_get_namespace(cls) for cls in _get_mro(type(error)))
    method = next(each["__str__"] for each in namespaces if "__str__" in each)
    return any(method is trusted for trusted in _TRUSTED_STR) and all(
        type(argument) in _TRUSTED_ARGUMENTS for argument in _get_args(error)
    )


def _text_of(error: BaseException) -> str:
    try:
        return str.__str__(str(error))
    except BaseException as trouble:  # even KeyboardInterrupt: only the text is lost
        return f"(no text: str() raised {class_name(trouble)})"


def _within(seconds: float, function: Callable[[], str]) -> str | None:
    """Return `function()`, or None if it takes longer; its thread then runs on.

    In Python only a thread can be abandoned. It has no thread-locals of the caller, so a lazy
    translation uses the language of the settings.
    """
    answers: list[str] = []
    thread = threading.Thread(
        target=lambda: answers.append(function()), name="django_mq-text", daemon=True
    )
    try:
        thread.start()
    except RuntimeError:  # the system can start no more threads
        return None
    thread.join(seconds)
    return answers[0] if answers else None
